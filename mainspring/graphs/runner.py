"""Runs a callable on batches of any size by replaying recordings of a few sizes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mainspring.graphs.buffers import FixedBuffers
from mainspring.graphs.capture import held_collector, refuse_forked
from mainspring.graphs.counters import GraphCounters
from mainspring.graphs.cpu_graph import CpuGraph
from mainspring.graphs.cuda_graph import CudaGraph
from mainspring.graphs.errors import GraphError, LadderError
from mainspring.graphs.ladder import Ladder
from mainspring.graphs.pool import GraphPool
from mainspring.graphs.progress import track
from mainspring.graphs.report import CaptureReport
from mainspring.graphs.staging import Staging
from mainspring.graphs.step_io import Input, InputBuffer, OutputBuffers

__all__ = ["AUDIT_VARIABLE", "GraphRunner"]

AUDIT_VARIABLE = "MAINSPRING_AUDIT"
"""Environment variable; "1" checks every named buffer before each step."""


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
    ) -> None:
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

    def capture(self, sizes: Iterable[int] | None = None) -> list[CaptureReport]:
        """Record the rungs in `sizes` (default: all) that are not recorded yet, from the largest down.

        Every input holds its pad value meanwhile. Without this call a rung is recorded when it is first
        needed.

        Returns:
            A report for each rung recorded now; none with `enforce_eager`.

        Raises:
            LadderError: a size is no rung.
            CaptureError: `fn` cannot be recorded.
        """
        wanted = sorted(self.ladder.sizes if sizes is None else set(sizes), reverse=True)
        unknown = [size for size in wanted if size not in self.ladder]
        if unknown:
            raise LadderError(f"{unknown[0]} is no rung of {self.ladder}; record one of its sizes")
        missing = [] if self.enforce_eager else [size for size in wanted if size not in self.graphs]
        if not missing:
            return []
        with held_collector(collect=self.device.type == "cuda"):
            return [self._record(rung) for rung in track(missing, f"recording {self.name}", self._progress)]

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
        if self.buffers.generation != self._generation:
            self.recapture("a buffer was accepted at a new address")
        self._check_addresses()
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
        if self.buffers.generation != self._generation:
            self.recapture("a buffer was accepted at a new address")
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
            reason: counted in `counters.recaptures`, once per rung.

        Returns:
            A report for each rung.
        """
        rungs = list(self.graphs)
        self.release()
        self.buffers.accept()
        self._generation = self.buffers.generation
        for buffer in self._inputs.values():
            buffer.adopt_present()
        self._outputs.adopt_present()
        self.counters.recaptures[reason] += len(rungs)
        return self.capture(rungs) if rungs else []

    def release(self) -> None:
        """Give up every recording; the next call records anew. Buffers stay.

        Raises:
            GraphError: a loop repeats one of them; none is given up then.
        """
        for graph in self.graphs.values():
            graph.holds.refuse()
        for graph in self.graphs.values():
            graph.release()
        self.graphs.clear()
        self._steps.clear()

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
        if self.buffers.generation != self._generation:
            self.recapture("a buffer was accepted at a new address")
        self._check_addresses()
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
        """Copy a batch into the input buffers and pad it to `rung`."""
        with torch.no_grad():
            for key, buffer in self._inputs.items():
                if buffer.load(inputs[key], rows, rung, self._staging):
                    self.counters.uploads += 1
                else:
                    self.counters.uploads_skipped += 1

    def _check_addresses(self) -> None:
        """Cheap check of inputs and outputs; of everything when auditing is on."""
        if os.environ.get(AUDIT_VARIABLE) == "1":
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
        """Record one rung with every input at its pad value."""
        with torch.inference_mode(False), torch.no_grad():
            for buffer in self._inputs.values():
                buffer.fill_with_padding()
        kind = CudaGraph if self.device.type == "cuda" else CpuGraph
        watch = [buffer.tensor for buffer in self._inputs.values()]
        graph = kind.capture(self._step(rung), pool=self.pool, name=f"{self.name}[{rung}]", watch=watch)
        for buffer in self._inputs.values():
            buffer.always_upload |= buffer.was_written() or graph.writes_to(buffer.tensor)
        self.graphs[rung] = graph
        report = CaptureReport(rung, graph.seconds, graph.num_operations, graph.pool_bytes_added, graph.nbytes)
        self.counters.captures[rung] = report
        return report
