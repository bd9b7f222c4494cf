"""The runner: puts the scheduler's plans on the device, as prefill steps or as replays of the recorded step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from mainspring.engine import limits as engine_limits
from mainspring.engine.ambient import caller_casts, own_torch_state
from mainspring.engine.asks import Asks
from mainspring.engine.errors import RequestError
from mainspring.engine.kv_cache import KVCacheSpec, allocate_kv_cache, layer_views
from mainspring.engine.launched import LaunchedStep, PromptRead, TokenRead
from mainspring.engine.limits import EngineLimits
from mainspring.engine.logits_state import LogitsState
from mainspring.engine.loops import Loops
from mainspring.engine.operation_counter import OperationCounter
from mainspring.engine.prefill_batch import PrefillBatch
from mainspring.engine.prefill_graphs import PrefillGraphs
from mainspring.engine.processors import apply_processors, refuse_nothing_left
from mainspring.engine.prompt_reads import read_prompts
from mainspring.engine.request import Request
from mainspring.engine.request_state import seat_of, seat_state
from mainspring.engine.samplers import FULL, PLAIN, FullSampler, PlainSampler, variant_for
from mainspring.engine.scheduler import DecodePlan, PrefillPlan
from mainspring.engine.seats import SeatTable
from mainspring.engine.step import Sampler, Step, StepRecord, TokenRing
from mainspring.engine.step_trial import DecodeTrial
from mainspring.engine.transfer import Download, Uploader
from mainspring.graphs import AuditReport, FixedBuffers, GraphPool, GraphRunner, Input, Recording
from mainspring.models.decoder import Decoder

if TYPE_CHECKING:
    from mainspring.engine.schedule_log import ScheduleLog


class ModelRunner:
    """One model's fixed buffers, KV cache and recorded steps on one device.

    The KV cache and the recordings are made by ``allocate``; until then nothing can be launched.

    Attributes:
        waits_asleep: whether waiting for a step's tokens takes no processor time, where it costs nobody a step: in loop
            mode, in which what comes next is launched already.
    """

    def __init__(
        self,
        model: Decoder,
        limits: EngineLimits,
        *,
        enforce_eager: bool,
        progress: bool,
        verify_graphs: bool | None = None,
    ) -> None:
        self.model = model
        self.limits = limits
        self.enforce_eager = enforce_eager
        self.buffers = FixedBuffers(limits.device)
        self.pool = GraphPool(limits.device)
        self.upload = Uploader(limits.device)
        self.seats = SeatTable(self.buffers, limits.max_num_seqs, limits.max_blocks)
        self.ring = TokenRing(self.buffers, limits.max_rows)
        self.note = StepRecord(self.buffers, limits.max_rows)
        self.logits = self.buffers.allocate("logits", (limits.max_rows, model.config.vocab_size), limits.dtype)
        self.logits_state = LogitsState(
            self.seats, self.buffers, model.config.vocab_size, limits.max_rows, limits.max_logprobs
        )
        self.samplers: dict[str, Sampler] = {
            PLAIN: PlainSampler(),
            FULL: FullSampler(self.seats, self.logits_state),
        }
        self.prefill_steps = 0
        self.prefill_tokens = 0
        self.prefill_calls = 0
        self.decode_launches = 0
        self.downloads = 0
        self.steps_launched = 0
        self.waits_asleep = False
        self._step: Step | None = None
        self.eager_steps: Counter[str] = Counter()
        self.eager_operations = 0
        self._eager_operations: dict[tuple[str, int], int] = {}
        self.weight_names = [name for name, _ in weight_getters(model)]
        for name, getter in weight_getters(model):
            self.buffers.adopt(name, getter)
        self.loops = Loops(self)
        self.log: ScheduleLog | None = None
        self.runners = {
            name: GraphRunner(
                partial(self._decode, sampler=sampler),
                inputs={"rows": Input((), torch.int32, pad=-1)},
                ladder=limits.ladder,
                device=limits.device,
                buffers=self.buffers,
                pool=self.pool,
                enforce_eager=enforce_eager,
                name=f"decode.{name}",
                progress=progress,
                verify=verify_graphs,
                trial=DecodeTrial(self),
                warm_up=engine_limits.WARM_UP,
            )
            for name, sampler in self.samplers.items()
        }
        self.prefill = PrefillGraphs(self, progress=progress, verify_graphs=verify_graphs)

    @property
    def all_runners(self) -> list[GraphRunner]:
        """What records: decode steps, then prefill steps, each a variant at a time."""
        return [*self.runners.values(), *self.prefill.runners.values()]

    @property
    def kv_spec(self) -> KVCacheSpec:
        """Shape of the KV cache, without its number of blocks."""
        config = self.model.config
        return KVCacheSpec(
            config.num_layers, config.num_kv_heads, config.head_dim, self.limits.block_size, self.limits.dtype
        )

    def allocate(self, num_blocks: int) -> None:
        """Allocate a KV cache of ``num_blocks`` usable blocks (the null block comes on top); record nothing yet."""
        cache = allocate_kv_cache(self.kv_spec, num_blocks + 1, self.limits.device)
        self.buffers.adopt("kv_cache", cache)
        self._step = Step(
            self.model, layer_views(cache), self.seats, self.ring, self.note, self.logits, self.limits.block_size
        )

    def release_graphs(self, reason: str | None = None) -> None:
        """Give back everything recorded; a step that needs a recording makes it anew, counted under ``reason``."""
        self.loops.release()
        for runner in self.all_runners:
            runner.release(reason)

    def deallocate(self) -> None:
        """Give back the KV cache and everything recorded on it."""
        self.release_graphs()
        if self._step is not None:
            self._step = None
            self.buffers.remove("kv_cache")

    def record(self, sizes: Sequence[int] | None = None) -> None:
        """Record the plain decode step on some rungs, or on its whole ladder and the plain prefill step on its own. The
        full steps are recorded when first needed.

        These are not verified yet: what that takes is not to be measured as theirs. See ``verify``.
        """
        if not self.enforce_eager:
            self.runners[PLAIN].capture(sizes, verify=False)
            if sizes is None:
                self.prefill.record()

    def recording(self) -> Recording:
        """What both variants of the decode and of the prefill step have recorded, as plain data."""
        totals = self.bytes_taken()
        return Recording.merge((runner.recording() for runner in self.all_runners), "decode", totals)

    def bytes_taken(self) -> dict[str, int]:
        """Bytes by what they are for: the graphs' pool, their executables, fixed buffers, KV cache, weights."""
        captures = [report for runner in self.all_runners for report in runner.counters.captures.values()]
        weights = {
            tensor.untyped_storage().data_ptr(): tensor
            for tensor in map(self.buffers.get, self.weight_names)
            if tensor is not None and tensor.layout == torch.strided
        }
        return {
            "pool": self.pool.nbytes,
            "executables": sum(report.executable_bytes for report in captures),
            "buffers": self.buffers.nbytes,
            "kv_cache": self._kv_bytes,
            "weights": sum(tensor.untyped_storage().nbytes() for tensor in weights.values()),
        }

    def audit(self) -> dict[str, AuditReport]:
        """Compare every recorded address with the memory that there is now, by runner: ``decode.plain`` and so on."""
        return {runner.name: runner.audit() for runner in self.all_runners}

    def verify(self) -> int:
        """Compare every recording with an eager run, bit for bit; returns how many there were. Loops end first."""
        self.loops.end()
        return sum(len(runner.verify()) for runner in self.all_runners)

    @property
    def verifies(self) -> bool:
        """Whether recordings are compared with eager runs as they are made."""
        return any(runner.verifies for runner in self.all_runners)

    def replaced_weights(self) -> list[str]:
        """Names of the weights that are now another tensor, or elsewhere, than was recorded."""
        return [name for name in self.weight_names if self.buffers.change(name) is not None]

    def record_again(self, reason: str) -> None:
        """Take the present addresses of all weights and record again what was recorded; ``reason`` is counted."""
        if self.limits.device.type == "cuda":
            torch.cuda.synchronize(self.limits.device)
        for runner in self.all_runners:
            runner.recapture(reason)

    @property
    def _kv_bytes(self) -> int:
        return self.buffers["kv_cache"].nbytes if "kv_cache" in self.buffers else 0

    @property
    def step(self) -> Step:
        """The step over the present KV cache."""
        if self._step is None:
            raise RuntimeError("the runner has no KV cache yet; call allocate() first")
        return self._step

    def launch(self, plan: PrefillPlan | DecodePlan) -> LaunchedStep:
        """Queue one step behind those under way."""
        if caller_casts():
            with own_torch_state():
                return self.launch(plan)
        self.loops.make_way()
        done = None if self.log is None else self.log.launched(plan)
        calls = self.device_calls
        if isinstance(plan, PrefillPlan):
            launched = self._launch_prefill(plan)
            self.prefill_calls += self.device_calls - calls
            self.prefill_steps += 1
        else:
            self.seats.write_tables(plan.table_writes, self.upload)
            launched = self._launch_decode(plan)
            self.decode_launches += len(launched.reads)
        if done is not None:
            done()
        return launched

    @property
    def device_calls(self) -> int:
        """Calls that the CPU has made to the device: replays, loops or single operations, and copies."""
        calls = self.upload.calls + self.downloads + self.eager_operations + self.loops.launches
        for each in self.all_runners:
            calls += each.counters.replays.total() + each.counters.uploads
        return calls

    def require(self, asks: Asks) -> None:
        """Make ready for requests that ask for these kinds: at the first of a kind, its buffers are allocated and the
        full variant's recordings given up, to be made anew with that kind's operations. Raises ``RequestError`` where
        memory does not suffice."""
        missing = self.logits_state.missing(asks)
        if not missing:
            return
        self.loops.release(FULL)
        if self.log is not None:
            self.log.required(missing)
        try:
            self.logits_state.allocate(missing)
        except RuntimeError as error:
            raise RequestError(
                f"no memory for {missing!r}: {self.logits_state.nbytes(missing)} bytes for {self.limits.max_num_seqs} "
                f"seats; lower max_num_seqs or gpu_memory_utilization ({error})"
            ) from error
        if self.limits.device.type == "cuda":
            torch.cuda.synchronize(self.limits.device)
        for runners in (self.runners, self.prefill.runners):
            if FULL in runners:
                runners[FULL].release("a request asked for what the full step had no buffers for")
        self._eager_operations = {key: count for key, count in self._eager_operations.items() if key[0] != FULL}

    @torch.no_grad()
    def _launch_decode(self, plan: DecodePlan) -> LaunchedStep:
        variant = variant_for(plan.requests)
        requests = tuple(plan.requests)
        reads: list[TokenRead] = []
        failures: dict[Request, RequestError] = {}
        self._write_grammars(requests, failures)
        for size in self.limits.ladder.split(len(requests)):
            chunk, requests = requests[:size], requests[size:]
            self._run(variant, [seat_of(request) for request in chunk])
            reads += self._read_tokens(variant, chunk, failures)
        return LaunchedStep(tuple(reads), is_prefill=False, failures=failures)

    def _write_grammars(self, requests: Sequence[Request], failures: dict[Request, RequestError]) -> None:
        """Follow the grammars of these requests to their newest tokens, and write what may come next."""
        rows = []
        for request in requests:
            if request.grammar is None:
                continue
            try:
                request.grammar.follow(request.output_token_ids)
                rows.append((seat_of(request), request))
            except RequestError as error:
                failures[request] = error
        if rows:
            self.logits_state.write_grammars(rows, self.upload)

    def _decode(self, rows: torch.Tensor, *, sampler: Sampler) -> None:
        self.step.decode(rows, sampler)

    def _run(self, variant: str, rows: Sequence[int]) -> None:
        """One step on its rung; where it runs eager, its operations are counted the first time."""
        runner = self.runners[variant]
        if not self.enforce_eager:
            runner(rows=rows)
            return
        key = (variant, self.limits.ladder.rung_for(len(rows)))
        if key in self._eager_operations:
            runner(rows=rows)
        else:
            with OperationCounter() as counter:
                runner(rows=rows)
            self._eager_operations[key] = counter.operations
        self.eager_operations += self._eager_operations[key]

    @torch.no_grad()
    def _launch_prefill(self, plan: PrefillPlan) -> LaunchedStep:
        completed = tuple(chunk.request for chunk in plan.chunks if chunk.is_last)
        self.logits_state.write([(seat_of(request), request) for request in completed], self.upload)
        failures: dict[Request, RequestError] = {}
        self._write_grammars(completed, failures)
        batch, variant = PrefillBatch.of(plan), variant_for(completed)
        why_eager = self.prefill.why_eager(plan)
        if why_eager is None:
            self.prefill.run(batch, variant, plan.table_writes, [seat_state(request) for request in completed])
            prompt_reads: tuple[PromptRead, ...] = ()
        else:
            self.prefill.count_eager(why_eager)
            prompt_reads = self._prefill_eager(plan, batch, variant)
        self.prefill_tokens += plan.num_tokens
        reads = self._read_tokens(variant, completed, failures) if completed else []
        return LaunchedStep(tuple(reads), is_prefill=True, prompt_reads=prompt_reads, failures=failures)

    def _prefill_eager(
        self, plan: PrefillPlan, batch: PrefillBatch[np.ndarray], variant: str
    ) -> tuple[PromptRead, ...]:
        """A prefill step as it is, operation by operation."""
        completed = [chunk.request for chunk in plan.chunks if chunk.is_last]
        self.seats.write_tables(plan.table_writes, self.upload)
        self.seats.write([(seat_of(request), seat_state(request)) for request in completed], self.upload)
        there = batch.to_device(self.upload)
        hidden = self.step.forward(there.inputs(self.seats, self.limits.block_size))
        prompt_reads = read_prompts(self.model, plan, hidden, self.logits, self.upload)
        self.step.begin(hidden, there.last, there.completed_seats, self.samplers[variant])
        return prompt_reads

    @torch.no_grad()
    def dry_prefill(self) -> None:
        """Run the largest prefill step on the null seat, for measuring what it takes; it writes no KV."""
        length = min(self.limits.max_num_batched_tokens, self.limits.max_model_len)
        device = self.limits.device
        positions = torch.arange(length, device=device)
        null = torch.full((length,), self.seats.null_seat, device=device)
        bounds = torch.tensor([0, length], device=device)
        batch = PrefillBatch(
            torch.zeros_like(positions), positions, null, null[:1], bounds, bounds[1:], bounds[1:] - 1, null[:1]
        )
        hidden = self.step.forward(batch.inputs(self.seats, self.limits.block_size))
        self.model.compute_logits(hidden[:1], out=self.logits[:1])

    def resynchronize(self) -> None:
        """Wait for the device and take over its count of steps, after a launch that may have been cut short."""
        self.steps_launched = int(self.ring.step.item())

    def _read_tokens(
        self, variant: str, requests: Sequence[Request], failures: dict[Request, RequestError]
    ) -> list[TokenRead]:
        """Queue the reading of a step's rows; those that it left to the CPU are served here, and read once more."""
        held = {row: request for row, request in enumerate(requests) if request.asks & Asks.PROCESSORS}
        reads = [self._read_record(variant, requests, frozenset((*held.values(), *failures)))]
        if held:
            served = self._serve_held(held, failures)
            if served:
                reads.append(self._read_record(FULL, served, frozenset(failures)))
        return reads

    def _serve_held(self, held: dict[int, Request], failures: dict[Request, RequestError]) -> list[Request]:
        """Choose tokens for the rows with Python logits processors, outside the recording; the requests served."""
        served: dict[int, Request] = {}
        processed = []
        for row, request in held.items():
            try:
                processed.append(apply_processors(request, self.logits[row].to(torch.float32, copy=True)))
                served[row] = request
            except RequestError as error:
                failures[request] = error
        if served:
            rows = self.upload(np.array(list(served), dtype=np.int64))
            seats = self.upload(np.array([seat_of(request) for request in served.values()], dtype=np.int64))
            logits, sampler = torch.stack(processed), self.samplers[FULL]
            adjusted = logits.clone()
            sampler.adjust(adjusted, seats)
            possible = refuse_nothing_left(served.values(), adjusted, failures)
            runs = (self.seats.alive[seats] != 0) & possible
            self.step.settle(logits, self.logits[rows], seats, runs, sampler)
            self.eager_steps["logits_processors"] += 1
        return list(served.values())

    def _read_record(
        self, variant: str, requests: Sequence[Request], held: frozenset[Request] = frozenset()
    ) -> TokenRead:
        """Queue the reading of the record that the step launched last leaves."""
        self.steps_launched += 1
        self.downloads += 1
        record = self.record_of(variant)[: len(requests)]
        return TokenRead(tuple(requests), Download(record, self.waits_asleep), held)

    def record_of(self, variant: str) -> torch.Tensor:
        """Where a variant of the step leaves what the CPU reads: ``[max rows, 2 or more]`` int32."""
        return self.samplers[variant].record(self.note.rows)


def weight_getters(model: Decoder) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Name and present tensor of every weight and constant, looked up anew at each call so that a weight that was
    replaced is noticed."""
    for prefix, module in model.named_modules():
        names = [name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
        for name in names:
            yield f"{prefix}.{name}".lstrip("."), partial(getattr, module, name)
