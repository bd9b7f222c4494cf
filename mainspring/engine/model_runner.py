"""The runner: puts the scheduler's plans on the device, as prefill steps or as replays of the recorded step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import torch

from mainspring.engine.kv_cache import KVCacheSpec, allocate_kv_cache, layer_views
from mainspring.engine.limits import EngineLimits
from mainspring.engine.operation_counter import OperationCounter
from mainspring.engine.request import Request
from mainspring.engine.samplers import FULL, PLAIN, FullSampler, PlainSampler
from mainspring.engine.scheduler import DecodePlan, PrefillPlan
from mainspring.engine.seats import SeatState, SeatTable
from mainspring.engine.step import RING_STEPS, Sampler, Step, TokenRing
from mainspring.engine.transfer import Download, Uploader
from mainspring.graphs import FixedBuffers, GraphPool, GraphRunner, Input
from mainspring.models.decoder import Decoder
from mainspring.models.inputs import ModelInputs


@dataclass(frozen=True)
class LaunchedStep:
    """A step on its way: whose rows it has, and where their tokens will arrive."""

    requests: tuple[Request, ...]
    downloads: tuple[Download, ...]
    is_prefill: bool

    def results(self) -> list[tuple[Request, int, int]]:
        """Wait for the step; ``(request, token id or -1, what became of the row)`` for each row."""
        entries = [entry for download in self.downloads for entry in download.wait().tolist()]
        return [(request, token, status) for request, (token, status) in zip(self.requests, entries, strict=True)]


class ModelRunner:
    """One model's fixed buffers, KV cache and recorded steps on one device.

    The KV cache and the recordings are made by ``allocate``; until then nothing can be launched.
    """

    def __init__(self, model: Decoder, limits: EngineLimits, *, enforce_eager: bool, progress: bool) -> None:
        self.model = model
        self.limits = limits
        self.enforce_eager = enforce_eager
        self.progress = progress
        self.buffers = FixedBuffers(limits.device)
        self.pool = GraphPool(limits.device)
        self.upload = Uploader(limits.device)
        self.seats = SeatTable(self.buffers, limits.max_num_seqs, limits.max_blocks)
        self.ring = TokenRing(self.buffers, limits.max_rows)
        self.logits = self.buffers.allocate("logits", (limits.max_rows, model.config.vocab_size), limits.dtype)
        self.samplers: dict[str, Sampler] = {PLAIN: PlainSampler(), FULL: FullSampler(self.seats)}
        self.prefill_tokens = 0
        self.downloads = 0
        self._step: Step | None = None
        self._steps_launched = 0
        self.eager_operations = 0
        self._eager_operations: dict[tuple[str, int], int] = {}
        for name, getter in weight_getters(model):
            self.buffers.adopt(name, getter)
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
            )
            for name, sampler in self.samplers.items()
        }

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
        self._step = Step(self.model, layer_views(cache), self.seats, self.ring, self.logits, self.limits.block_size)

    def release_graphs(self) -> None:
        """Give back everything recorded; a step that needs a recording makes it anew."""
        for runner in self.runners.values():
            runner.release()

    def deallocate(self) -> None:
        """Give back the KV cache and everything recorded on it."""
        self.release_graphs()
        if self._step is not None:
            self._step = None
            self.buffers.remove("kv_cache")

    def record(self, sizes: Sequence[int] | None = None) -> None:
        """Record the plain step on the ladder, or on some of its rungs. The full step is recorded when first needed."""
        if not self.enforce_eager:
            self.runners[PLAIN].capture(sizes)

    @property
    def step(self) -> Step:
        """The step over the present KV cache."""
        if self._step is None:
            raise RuntimeError("the runner has no KV cache yet; call allocate() first")
        return self._step

    def launch(self, plan: PrefillPlan | DecodePlan) -> LaunchedStep:
        """Queue one step behind those under way."""
        self.seats.write_tables(plan.table_writes, self.upload)
        if isinstance(plan, PrefillPlan):
            return self._launch_prefill(plan)
        return self._launch_decode(plan)

    def _launch_decode(self, plan: DecodePlan) -> LaunchedStep:
        variant = FULL if any(needs_full_sampler(request) for request in plan.requests) else PLAIN
        rows = [_seat_of(request) for request in plan.requests]
        downloads = []
        for size in self.limits.ladder.split(len(rows)):
            chunk, rows = rows[:size], rows[size:]
            self._run(variant, chunk)
            downloads.append(self._read_ring(len(chunk)))
        return LaunchedStep(tuple(plan.requests), tuple(downloads), is_prefill=False)

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
        self.seats.write([(_seat_of(request), seat_state(request)) for request in completed], self.upload)
        tokens: list[int] = []
        positions: list[int] = []
        token_seats: list[int] = []
        lengths: list[int] = []
        last: list[int] = []
        for chunk in plan.chunks:
            end = chunk.start + chunk.length
            tokens += chunk.request.token_span(chunk.start, end)
            positions += range(chunk.start, end)
            token_seats += [_seat_of(chunk.request)] * chunk.length
            lengths.append(chunk.length)
            if chunk.is_last:
                last.append(len(tokens) - 1)
        parts: list[Sequence[int]] = [
            tokens,
            positions,
            token_seats,
            [_seat_of(chunk.request) for chunk in plan.chunks],
            list(accumulate(lengths, initial=0)),
            [chunk.start + chunk.length for chunk in plan.chunks],
            last,
            [_seat_of(request) for request in completed],
        ]
        packed = self.upload(np.concatenate([np.asarray(part, dtype=np.int64) for part in parts]))
        pieces = torch.split(packed, [len(part) for part in parts])
        sampler = self.samplers[FULL if any(needs_full_sampler(request) for request in completed) else PLAIN]
        self.step.prefill(self._prefill_inputs(*pieces[:6]), pieces[6], pieces[7], sampler)
        self.prefill_tokens += len(tokens)
        downloads = (self._read_ring(len(completed)),) if completed else ()
        return LaunchedStep(completed, downloads, is_prefill=True)

    def _prefill_inputs(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        token_seats: torch.Tensor,
        seats: torch.Tensor,
        query_starts: torch.Tensor,
        seq_lens: torch.Tensor,
    ) -> ModelInputs:
        size = self.limits.block_size
        blocks = self.seats.block_tables[token_seats, positions // size].to(torch.int64)
        return ModelInputs(
            token_ids=token_ids,
            positions=positions,
            slots=torch.where(blocks != 0, blocks * size + positions % size, -1),
            block_tables=self.seats.block_tables[seats],
            seq_lens=seq_lens.to(torch.int32),
            query_starts=query_starts.to(torch.int32),
        )

    @torch.no_grad()
    def dry_prefill(self) -> None:
        """Run the largest prefill step on the null seat, for measuring what it takes; it writes no KV."""
        length = min(self.limits.max_num_batched_tokens, self.limits.max_model_len)
        device = self.limits.device
        positions = torch.arange(length, device=device)
        null = torch.full((length,), self.seats.null_seat, device=device)
        bounds = torch.tensor([0, length], device=device)
        inputs = self._prefill_inputs(torch.zeros_like(positions), positions, null, null[:1], bounds, bounds[1:])
        self.model.compute_logits(self.model(inputs, self.step.kv_cache)[:1], out=self.logits[:1])

    def resynchronize(self) -> None:
        """Wait for the device and take over its count of steps, after a launch that may have been cut short."""
        self._steps_launched = int(self.ring.step.item())

    def _read_ring(self, count: int) -> Download:
        entry = self.ring.entries[self._steps_launched % RING_STEPS, :count]
        self._steps_launched += 1
        self.downloads += 1
        return Download(entry)


def seat_state(request: Request) -> SeatState:
    """The seat of a request whose prompt (and, after a preemption, answer so far) is about to be computed."""
    params = request.params
    generated = len(request.output_token_ids)
    return SeatState(
        token_id=request.token_span(request.num_tokens - 1, request.num_tokens)[0],
        position=request.num_tokens - 1,
        remaining=request.max_total_tokens - request.num_tokens,
        min_remaining=params.min_tokens - generated,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=request.seed,
        choice=request.choice,
        stop_ids=request.stop_ids,
    )


def needs_full_sampler(request: Request) -> bool:
    """Whether the request's next token asks for more than arg-max."""
    params = request.params
    return bool(params.temperature > 0.0 or params.min_tokens > len(request.output_token_ids))


def weight_getters(model: Decoder) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Name and present tensor of every weight and constant, looked up anew at each call so that a weight that was
    replaced is noticed."""
    for prefix, module in model.named_modules():
        names = [name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
        for name in names:
            yield f"{prefix}.{name}".lstrip("."), partial(getattr, module, name)


def _seat_of(request: Request) -> int:
    if request.seat is None:
        raise RuntimeError(f"request {request.request_id} was planned without a seat")
    return request.seat
