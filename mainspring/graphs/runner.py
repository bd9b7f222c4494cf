"""Runs a callable on batches of any size by replaying recordings of a few sizes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mainspring.graphs.audit import Auditor, AuditReport
from mainspring.graphs.buffers import FixedBuffers
from mainspring.graphs.capture import held_collector, refuse_forked, refuse_nested
from mainspring.graphs.counters import GraphCounters
from mainspring.graphs.cpu_graph import CpuGraph
from mainspring.graphs.cuda_graph import CudaGraph
from mainspring.graphs.cuda_nodes import cuda_driver
from mainspring.graphs.errors import GraphError, LadderError
from mainspring.graphs.ladder import Ladder
from mainspring.graphs.pool import GraphPool
from mainspring.graphs.progress import track
from mainspring.graphs.reading import read_runner
from mainspring.graphs.recording import Recording
from mainspring.graphs.report import CaptureReport
from mainspring.graphs.staging import Staging
from mainspring.graphs.step_io import Input, InputBuffer, OutputBuffers
from mainspring.graphs.trial import RandomTrial, Trial
from mainspring.graphs.verify import OperationMismatch, VerificationError, Verifier

__all__ = ["AUDIT_VARIABLE", "VERIFY_VARIABLE", "GraphRunner"]

logger = logging.getLogger(__name__)

AUDIT_VARIABLE = "MAINSPRING_AUDIT"
"""Environment variable; "1" checks every named buffer before each step."""

VERIFY_VARIABLE = "MAINSPRING_VERIFY"
"""Environment variable; "1" verifies every rung as soon as it is recorded."""


class GraphRunner:
    """Pads a batch to a rung of the ladder, copies it into fixed buffers, replays that rung, slices the
    outputs.

    Args:
        fn: called as `fn(**views)`, one view [rung, ...] of a fixed buffer per input; returns a tensor, tuple
            or dict of tensors [rung, ...], or None. It may use other tensors (weights, state) as long as they
            stay where they are, and must leave state alone in rows that hold the pad value.
        inputs: the arguments by name.
        ladder: batch sizes to record.
        device: "cpu" or a CUDA device.
        buffers: where to allocate inputs and outputs, as "{name}.input.{input}" and "{name}.output..."; what
            else it holds (weights, state) is checked too. A new one by default.
        pool: memory for intermediates, to share with other runners; a new one by default.
        enforce_eager: run `fn` itself, every time, on the same padded buffers.
        name: for buffer names and messages.
        progress: whether `capture` shows a progress bar (on a terminal).
        warm_up: on a GPU, which rungs `fn` runs on before they are captured: "each", or "first", the first one recorded
            and those whose capture shows that they need it (see `CudaGraph.capture`). "first" is for an `fn` that does
            the same whether or not it has seen a rung before, but for compiling kernels and making what it keeps.
        verify: whether each rung is compared with `fn`, bit for bit, as soon as it is recorded; by default only where
            the environment says MAINSPRING_VERIFY=1.
        trial: how to try the step out, where random inputs (`Input.sample`) are not enough to make it do something.

    Attributes:
        buffers: inputs, outputs, and whatever else is watched by name.
        counters: what was done so far.
        graphs: the recording of each rung.
        verifies: whether rungs are verified as they are recorded.

    Outputs are views of fixed buffers: the next call overwrites them; clone what must last longer.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        inputs: Mapping[str, Input],
        ladder: Ladder,
        device: torch.device | str,
        buffers: FixedBuffers | None = None,
        pool: GraphPool | None = None,
        enforce_eager: bool = False,
        name: str = "step",
        progress: bool = True,
        verify: bool | None = None,
        trial: Trial | None = None,
        warm_up: str = "each",
    ) -> None:
        if warm_up not in ("each", "first"):
            raise GraphError(f"runner {name!r} has warm_up {warm_up!r}; give 'each' or 'first'")
        if not inputs:
            raise GraphError(f"runner {name!r} has no inputs; it needs at least one to know the number of rows")
        if torch.device(device).type == "cuda":
            refuse_forked()
        self.name = name
        self.ladder = ladder
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.buffers = FixedBuffers(self.device) if buffers is None else buffers
        self.pool = GraphPool(self.device) if pool is None else pool
        self.enforce_eager = enforce_eager
        self.counters = GraphCounters()
        self.graphs: dict[int, CpuGraph | CudaGraph] = {}
        self._fn = fn
        self._progress = progress
        self._inputs = {
            key: InputBuffer(f"{name}.input.{key}", spec, ladder.top, self.buffers) for key, spec in inputs.items()
        }
        self._outputs = OutputBuffers(f"{name}.output", ladder.top, self.buffers)
        slot_bytes = max(1, ladder.top * max(spec.row_bytes for spec in inputs.values()))
        self._staging = Staging(self.device, slot_bytes, depth=4 * len(inputs))
        self._steps: dict[int, Callable[[], None]] = {}
        self._generation = self.buffers.generation
        self._released: dict[int, str] = {}
        self._auditor = Auditor(self)
        self.verifies = os.environ.get(VERIFY_VARIABLE) == "1" if verify is None else verify
        self._trial = trial
        self._warms_each = warm_up == "each"
        self._has_run = False

    def __call__(self, **inputs: Tensor | Sequence[Any]) -> Any:
        """Run one batch.

        Args:
            inputs: every input by name, each a tensor or sequence [rows, ...] with the same number of rows.
                More rows than the top rung are served by several steps.

        Returns:
            What `fn` returns, cut to the rows given: views of fixed buffers (copies if several steps were
            needed).

        Raises:
            GraphError: inputs are missing, unknown, empty or do not fit.
            StaleAddressError: an input or output buffer was changed since it was recorded.
            CaptureError: a rung had to be recorded first and could not be.
        """
        refuse_nested(self.name)
        rows = self._count_rows(inputs)
        if rows <= self.ladder.top:
            return self._run(inputs, rows)
        self.counters.split_batches += 1
        pieces, start = [], 0
        for size in self.ladder.split(rows):
            part = {key: values[start : start + size] for key, values in inputs.items()}
            pieces.append(self._outputs.clone(self._run(part, size)))
            start += size
        return self._outputs.concatenate(pieces)

    def capture(self, sizes: Iterable[int] | None = None, *, verify: bool | None = None) -> list[CaptureReport]:
        """Record the rungs in `sizes` (default: all) that are not recorded yet, from the largest down.

        Every input holds its pad value meanwhile. Without this call a rung is recorded when it is first
        needed.

        Args:
            sizes: rungs.
            verify: whether to compare them with `fn` afterwards; by default as the runner was made.

        Returns:
            A report for each rung recorded now; none with `enforce_eager`.

        Raises:
            LadderError: a size is no rung.
            CaptureError: `fn` cannot be recorded.
            VerificationError: with `verify`, a recording does not do what `fn` does.
        """
        wanted = sorted(self.ladder.sizes if sizes is None else set(sizes), reverse=True)
        unknown = [size for size in wanted if size not in self.ladder]
        if unknown:
            raise LadderError(f"{unknown[0]} is no rung of {self.ladder}; record one of its sizes")
        missing = [] if self.enforce_eager else [size for size in wanted if size not in self.graphs]
        if not missing:
            return []
        # A collection takes a tenth of a second, for which no rung that is recorded when it is needed should wait.
        with held_collector(collect=self.device.type == "cuda" and len(missing) > 1):
            reports = [self._record(rung) for rung in track(missing, f"recording {self.name}", self._progress)]
        self._audit_new(missing)
        if self.verifies if verify is None else verify:
            self.verify(missing)
        return reports

    def _audit_new(self, sizes: Sequence[int]) -> None:
        """Read what was just recorded and look at its addresses, where they can be read."""
        if not self.can_be_read:
            return
        started = time.perf_counter()
        try:
            self._auditor.take(sizes)
            report = self._auditor.audit(sizes)
        except (GraphError, RuntimeError, ValueError) as error:  # they are good all the same
            logger.warning("the recordings of %s could not be read: %s", self.name, error)
            return
        self.counters.audits += 1
        self.counters.audit_seconds += time.perf_counter() - started
        self.counters.audit_findings = len(report.findings)
        if not report.ok:
            if os.environ.get(AUDIT_VARIABLE) == "1":
                report.raise_findings()
            logger.warning("audit of %s: %s", self.name, report)

    def load(self, **inputs: Tensor | Sequence[Any]) -> int:
        """Put one batch into the input buffers, padded, and run nothing: what precedes the launch of a `Loop`.

        Args:
            inputs: as for a call, of at most the top rung's rows.

        Returns:
            The rung that serves the batch.

        Raises:
            LadderError: there are more rows than the top rung has.
            GraphError, StaleAddressError: as for a call.
        """
        rows = self._count_rows(inputs)
        rung = self.ladder.rung_for(rows)
        self._follow_buffers()
        self._check_addresses(rung)
        self._load(inputs, rows, rung)
        return rung

    def graph(self, size: int) -> CpuGraph | CudaGraph:
        """The recording of rung `size`, made now if there is none yet: what a `Loop` repeats.

        It reads the input buffers, which `load` fills. As long as a `Loop` holds it, `release` and
        `recapture` refuse.

        Raises:
            LadderError: `size` is no rung.
            GraphError: the runner was made with `enforce_eager`.
            CaptureError: the rung cannot be recorded.
        """
        if self.enforce_eager:
            raise GraphError(
                f"runner {self.name!r} has enforce_eager=True, so it records nothing that could be repeated"
            )
        self._follow_buffers()
        self.capture([size])
        return self.graphs[size]

    def count_repeats(self, rung: int, rows: int, times: int) -> None:
        """Count steps of `rows` rows that a loop ran on `rung`."""
        self.counters.rows += rows * times
        self.counters.padded_rows += (rung - rows) * times
        self.counters.repeats[rung] += times

    def recapture(self, reason: str) -> list[CaptureReport]:
        """Accept the present addresses of every buffer and record again what was recorded.

        Args:
            reason: logged, and counted in `counters.recaptures`, once per rung.

        Returns:
            A report for each rung.
        """
        rungs = list(self.graphs)
        if rungs:
            logger.info("recording %d rungs of %s again: %s", len(rungs), self.name, reason)
        self.release(reason)
        self.buffers.accept()
        self._generation = self.buffers.generation
        for buffer in self._inputs.values():
            buffer.adopt_present()
        self._outputs.adopt_present()
        return self.capture(rungs) if rungs else []

    def release(self, reason: str | None = None) -> None:
        """Give up every recording; the next call records anew. Buffers stay.

        Args:
            reason: counted in `counters.recaptures` for each rung that is recorded again; not counted where it is None.

        Raises:
            GraphError: a loop repeats one of them; none is given up then.
        """
        for graph in self.graphs.values():
            graph.holds.refuse()
        for rung, graph in self.graphs.items():
            graph.release()
            if reason is not None:
                self._released[rung] = reason
        self.graphs.clear()
        self._steps.clear()
        self._auditor.forget()
        self._has_run = False

    def verify(self, sizes: Iterable[int] | None = None) -> list[int]:
        """Replay each recorded rung (or those in `sizes`) beside an eager run on the same random inputs, and compare
        outputs and written state bit for bit. State is put back afterwards.

        Returns:
            The rungs that were verified.

        Raises:
            VerificationError: some rung's bits differ; on a CPU with the first operation that does.
        """
        wanted = list(self.graphs if sizes is None else sizes)
        mismatches = [mismatch for rung in wanted for mismatch in self._verifier(rung).mismatches()]
        self.counters.verified += len(wanted)
        if mismatches:
            raise VerificationError(self.name, tuple(mismatches))
        return wanted

    def bisect(self, size: int) -> OperationMismatch | None:
        """The first operation of rung `size` that replays something else than eager gives, or None.

        On a CPU the recording is replayed operation by operation. On a GPU, where intermediates are overwritten, the
        rung is recorded anew some times with one operation's results copied out.
        """
        self.capture([size])
        return self._verifier(size).first_operation()

    def _verifier(self, rung: int) -> Verifier:
        trial = self._trial or RandomTrial(
            {key: buffer.spec for key, buffer in self._inputs.items()}, self.graphs[rung].outside, self.buffers
        )
        return Verifier(self, rung, self._step(rung), trial, self._outputs, self._put)

    def _put(self, inputs: Mapping[str, Tensor | Sequence[Any]], rows: int, rung: int) -> list[bool]:
        """Copy a batch into the input buffers and pad it to `rung`; for each, whether it had to be copied."""
        with torch.no_grad():
            return [buffer.load(inputs[key], rows, rung, self._staging) for key, buffer in self._inputs.items()]

    @property
    def can_be_read(self) -> bool:
        """Whether recordings can be read here: on a GPU that takes the package cuda-bindings."""
        return self.device.type != "cuda" or cuda_driver() is not None

    def audit(self) -> AuditReport:
        """Compare every recorded address with the memory that there is now.

        Raises:
            GraphError: recordings cannot be read here.
        """
        return self._auditor.audit()

    def recording(self) -> Recording:
        """What is recorded now: each rung's operation list and address book, as plain data."""
        return read_runner(self)

    def check(self) -> None:
        """Compare every named buffer with what was recorded.

        Raises:
            StaleAddressError: the first that differs.
        """
        self.buffers.check()

    def _count_rows(self, inputs: Mapping[str, Tensor | Sequence[Any]]) -> int:
        if inputs.keys() != self._inputs.keys():
            missing, unknown = self._inputs.keys() - inputs.keys(), inputs.keys() - self._inputs.keys()
            raise GraphError(
                f"runner {self.name!r} takes {sorted(self._inputs)}; missing {sorted(missing)}, unknown "
                f"{sorted(unknown)}"
            )
        counts = {key: self._inputs[key].rows_of(values) for key, values in inputs.items()}
        rows = next(iter(counts.values()))
        if any(count != rows for count in counts.values()):
            raise GraphError(f"runner {self.name!r} was given different numbers of rows: {counts}")
        return rows

    def _run(self, inputs: Mapping[str, Tensor | Sequence[Any]], rows: int) -> Any:
        """One step of at most the top rung's rows."""
        rung = self.ladder.rung_for(rows)
        self._follow_buffers()
        self._check_addresses(rung)
        graph = None
        if not self.enforce_eager:
            graph = self.graphs.get(rung)
            if graph is None:
                self.capture([rung])
                graph = self.graphs[rung]
        self._load(inputs, rows, rung)
        counters = self.counters
        counters.rows += rows
        counters.padded_rows += rung - rows
        if graph is None:
            with torch.inference_mode(False), torch.no_grad():
                self._step(rung)()
            counters.eager_steps["enforce_eager"] += 1
        else:
            graph.replay()
            counters.replays[rung] += 1
        return self._outputs.first(rows)

    def _load(self, inputs: Mapping[str, Tensor | Sequence[Any]], rows: int, rung: int) -> None:
        """Copy a batch into the input buffers and pad it to `rung`, and count that."""
        copied = self._put(inputs, rows, rung)
        self.counters.uploads += sum(copied)
        self.counters.uploads_skipped += len(copied) - sum(copied)

    def _follow_buffers(self) -> None:
        """Record again where a buffer was accepted at a new address."""
        if self.buffers.generation != self._generation:
            self.recapture("a buffer was accepted at a new address")

    def _check_addresses(self, rung: int) -> None:
        """Cheap check of inputs and outputs; of everything that the rung uses when auditing is on."""
        if os.environ.get(AUDIT_VARIABLE) == "1":
            if rung in self.graphs:
                self._auditor.check(rung)
            else:
                self.buffers.check()
            return
        for buffer in self._inputs.values():
            buffer.check()
        self._outputs.check()

    def _step(self, rung: int) -> Callable[[], None]:
        """The callable of one rung: `fn` on views of the inputs, its result copied into the outputs."""
        if rung not in self._steps:
            views = {key: buffer.view(rung) for key, buffer in self._inputs.items()}

            def step() -> None:
                self._outputs.store(self._fn(**views), rung)

            self._steps[rung] = step
        return self._steps[rung]

    def _record(self, rung: int) -> CaptureReport:
        """Record one rung with every input at its pad value, after a run where there must be one."""
        with torch.inference_mode(False), torch.no_grad():
            for buffer in self._inputs.values():
                buffer.fill_with_padding()
        kind = CudaGraph if self.device.type == "cuda" else CpuGraph
        watch = [buffer.tensor for buffer in self._inputs.values()]
        warmup = 1 if self._warms_each or not self._has_run or self.device.type != "cuda" else 0
        graph = kind.capture(self._step(rung), pool=self.pool, warmup=warmup, name=f"{self.name}[{rung}]", watch=watch)
        self._has_run = True
        if isinstance(graph, CudaGraph) and graph.discarded is not None and graph.discarded.invalidated:
            self._warms_each = True  # another would cost the pool its memory again
        for buffer in self._inputs.values():
            buffer.always_upload |= buffer.was_written(graph.runs > 0) or graph.writes_to(buffer.tensor)
        self.graphs[rung] = graph
        if rung in self._released:
            self.counters.recaptures[self._released.pop(rung)] += 1
        report = CaptureReport(
            rung,
            graph.seconds,
            graph.num_operations,
            graph.pool_bytes_added,
            graph.nbytes,
            graph.executable_bytes,
            graph.runs,
        )
        self.counters.captures[rung] = report
        return report
