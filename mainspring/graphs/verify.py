"""Does a recording do, bit for bit, what its callable does? And where they part, which operation is the first?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mainspring.graphs.cpu_graph import CpuGraph
from mainspring.graphs.cpu_program import TensorRef, tensors_in
from mainspring.graphs.cpu_recorder import Recorder
from mainspring.graphs.cpu_rules import same_bits, written_tensors
from mainspring.graphs.cuda_graph import CudaGraph
from mainspring.graphs.dispatch import DispatchMode
from mainspring.graphs.errors import GraphError
from mainspring.graphs.pool import GraphPool
from mainspring.graphs.reading import RecordedRunner
from mainspring.graphs.step_io import OutputBuffers
from mainspring.graphs.trial import Saved, Trial

__all__ = [
    "Mismatch",
    "OperationMismatch",
    "VerificationError",
    "bisect_graph",
    "compare",
    "first_difference",
    "Verifier",
]

LARGEST = 16 << 20
"""Largest result of a single operation, in bytes, that is kept for comparison."""


@dataclass(frozen=True, slots=True)
class OperationMismatch:
    """The first operation that gives something else when replayed.

    Attributes:
        index: its position among the operations that are not views.
        name: its name.
        what: how it differs, in words.
    """

    index: int
    name: str
    what: str

    def __str__(self) -> str:
        return f"operation {self.index} {self.name}: {self.what}"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A rung whose recording does not do what its callable does.

    Attributes:
        rung: its size.
        output: the output, or the state, that differs.
        what: how it differs, in words.
        operation: the first operation that differs, where it is known.
    """

    rung: int
    output: str
    what: str
    operation: OperationMismatch | None = None

    def __str__(self) -> str:
        first = f"; the first that differs is {self.operation}" if self.operation else ""
        return f"rung {self.rung}: {self.output!r} {self.what}{first}"


class VerificationError(GraphError):
    """A recording does not do what its callable does.

    Attributes:
        mismatches: one for each rung and output that differs.
    """

    def __init__(self, name: str, mismatches: tuple[Mismatch, ...]) -> None:
        more = f" (and {len(mismatches) - 1} more)" if len(mismatches) > 1 else ""
        hint = "" if mismatches[0].operation else "; runner.bisect(size) finds the operation"
        super().__init__(f"the recording of {name!r} does not replay what eager gives: {mismatches[0]}{more}{hint}")
        self.name = name
        self.mismatches = mismatches

    def __reduce__(self) -> tuple[type[VerificationError], tuple[str, tuple[Mismatch, ...]]]:
        """Made again from its parts where it crosses to another process."""
        return type(self), (self.name, self.mismatches)


def how_they_differ(recorded: Tensor, eager: Tensor) -> str | None:
    """How two tensors differ, in words; None where their bits are the same."""
    if recorded.shape != eager.shape or recorded.dtype != eager.dtype:
        return f"is {recorded.dtype}{list(recorded.shape)} recorded and {eager.dtype}{list(eager.shape)} eager"
    if same_bits(recorded, eager):
        return None
    left, right = recorded.reshape(-1), eager.reshape(-1)
    bits = [part.contiguous().view(torch.uint8).view(-1, part.element_size()) for part in (left, right)]
    differing = (bits[0] != bits[1]).any(dim=1).nonzero().flatten()
    first = int(differing[0])
    place = [int(index) for index in torch.unravel_index(differing[0], recorded.shape)] if recorded.dim() else []
    return (
        f"differs in {len(differing)} of {recorded.numel()} elements, first at {place}: {left[first].item()} recorded, "
        f"{right[first].item()} eager"
    )


def compare(recorded: Mapping[str, Tensor], eager: Mapping[str, Tensor], rung: int) -> list[Mismatch]:
    """Every output, or piece of state, whose bits differ."""
    found = []
    for name, tensor in recorded.items():
        what = how_they_differ(tensor, eager[name])
        if what is not None:
            found.append(Mismatch(rung, name, what))
    return found


class Tracer(Recorder):  # type: ignore[no-untyped-call]
    """Records a run anew, keeping what each operation made; operations are numbered as in a recording."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, list[Tensor | None]]] = []

    def _append(self, name: str, *arguments: Any) -> None:
        super()._append(name, *arguments)
        written = self._program.operations[-1].writes
        self.made.append((name, [_kept(self._present(value)) for value in written]))

    def _present(self, value: Tensor | TensorRef) -> Tensor:
        if isinstance(value, Tensor):
            return value
        tensor = torch.empty(0, dtype=value.dtype, device="cpu")
        return tensor.set_(self._held[value.storage].untyped_storage(), value.offset, value.shape, value.stride)


def _kept(tensor: Tensor) -> Tensor | None:
    return tensor.clone() if tensor.layout == torch.strided and tensor.nbytes <= LARGEST else None


def first_difference(
    graph: CpuGraph, step: Callable[[], Any], put_back: Callable[[], None]
) -> OperationMismatch | None:
    """The first operation of a CPU recording whose result is not what an eager run gives.

    Args:
        graph: the recording.
        step: its callable.
        put_back: sets inputs and state to where both begin.
    """
    put_back()
    tracer = Tracer()
    with torch.inference_mode(False), torch.no_grad(), tracer:
        step()
    put_back()
    eager = iter(tracer.made)
    index = -1
    for index, (name, written) in enumerate(graph.stepwise()):
        expected = next(eager, None)
        if expected is None:
            return OperationMismatch(index, name, "eager has ended before it")
        if expected[0] != name:
            return OperationMismatch(index, name, f"eager runs {expected[0]} in its place")
        for tensor, known in zip(written, expected[1], strict=False):
            what = None if known is None else how_they_differ(tensor, known)
            if what is not None:
                return OperationMismatch(index, name, f"its result {what}")
    left = next(eager, None)
    return None if left is None else OperationMismatch(index + 1, left[0], "eager runs it after the recording's end")


class Exporter(DispatchMode):  # type: ignore[no-untyped-call]
    """Copies what one operation of a run makes or writes, and counts the operations.

    Args:
        wanted: number of the operation, counted without views.
    """

    def __init__(self, wanted: int) -> None:
        super().__init__()
        self.wanted = wanted
        self.names: list[str] = []
        self.exported: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation; copy its results if it is the wanted one."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if getattr(func, "is_view", False):
            return result
        if len(self.names) == self.wanted:
            made = [*tensors_in(result), *written_tensors(func, args, kwargs)]
            self.exported = [tensor.clone() for tensor in made if tensor.nbytes <= LARGEST]
        self.names.append(f"{func.namespace}::{func._schema.name.split('::')[-1]}")
        return result


def bisect_graph(
    step: Callable[[], Any], put_back: Callable[[], None], pool: GraphPool, name: str
) -> OperationMismatch | None:
    """The first operation that gives something else when it is replayed, by recording the step again and again, each
    time with one operation's results copied out: as many times as the number of operations can be halved.

    It takes for granted that what differs once differs from there on. None where nothing differs in these recordings,
    which are not quite the one in question: a copy more keeps memory from being used again.
    """
    kind = CudaGraph if pool.device.type == "cuda" else CpuGraph

    def eager(at: int) -> Exporter:
        put_back()
        exporter = Exporter(at)
        with torch.inference_mode(False), torch.no_grad(), exporter:
            step()
        return exporter

    def differs(at: int) -> OperationMismatch | None:
        expected = eager(at)
        recorded: list[Exporter] = []

        def exporting() -> list[Tensor]:
            recorded.append(Exporter(at))
            with recorded[-1]:
                step()
            return recorded[-1].exported

        put_back()
        graph = kind.capture(exporting, pool=pool, name=f"{name}, operation {at}")
        try:
            if recorded[-1].names[: at + 1] != expected.names[: at + 1]:
                ran = recorded[-1].names[at] if at < len(recorded[-1].names) else "nothing"
                return OperationMismatch(at, ran, f"eager runs {expected.names[at]} in its place")
            put_back()
            graph.replay()
            for made, known in zip(graph.outputs, expected.exported, strict=True):
                what = how_they_differ(made, known)
                if what is not None:
                    return OperationMismatch(at, expected.names[at], f"its result {what}")
        finally:
            graph.release()
        return None

    count = len(eager(-1).names)
    low, high = 0, count - 1
    found = differs(high) if count else None
    if found is None:
        return None
    while low < high:
        middle = (low + high) // 2
        there = differs(middle)
        if there is None:
            low = middle + 1
        else:
            high, found = middle, there
    return found


class Verifier:
    """Tries one rung of a runner out, recorded and eager.

    Args:
        runner: whose rung.
        rung: its size.
        step: its callable.
        trial: gives inputs and state.
        outputs: the runner's.
        load: puts inputs, of so many rows, into the buffers of a rung.
    """

    def __init__(
        self,
        runner: RecordedRunner,
        rung: int,
        step: Callable[[], Any],
        trial: Trial,
        outputs: OutputBuffers,
        load: Callable[[Mapping[str, Tensor], int, int], object],
    ) -> None:
        self._runner = runner
        self._rung = rung
        self._step = step
        self._trial = trial
        self._outputs = outputs
        self._load = load
        self._rows = rung - (rung > 2)  # one row of padding, where there is room for it

    def mismatches(self) -> list[Mismatch]:
        """What differs between replay and eager; on a CPU with the first operation that does."""
        graph = self._runner.graphs[self._rung]
        with self._prepared() as put_back:
            results = []
            for run in (graph.replay, self._step):
                put_back()
                run()
                results.append(Saved({**self._trial.state(self._rows), **self._outputs.named(self._rung)}).copies)
            found = compare(results[0], results[1], self._rung)
            if found and isinstance(graph, CpuGraph):
                found[0] = replace(found[0], operation=first_difference(graph, self._step, put_back))
        return found

    def first_operation(self) -> OperationMismatch | None:
        """The first operation that differs."""
        graph = self._runner.graphs[self._rung]
        with self._prepared() as put_back:
            if isinstance(graph, CpuGraph):
                return first_difference(graph, self._step, put_back)
            return bisect_graph(self._step, put_back, self._runner.pool, f"{self._runner.name}[{self._rung}]")

    @contextmanager
    def _prepared(self) -> Iterator[Callable[[], None]]:
        """Prepare the trial, and put everything back at its end.

        Yields:
            A function that sets inputs and state to where every run of the trial begins.
        """
        trial, rows = self._trial, self._rows
        generator = torch.Generator(device="cpu").manual_seed(self._rung)
        with torch.inference_mode(False), torch.no_grad():
            before = Saved(trial.state(rows))
            try:
                with torch.device("cpu"):  # whatever the caller's default device is
                    inputs = trial.prepare(rows, generator)
                start = Saved(trial.state(rows))

                def put_back() -> None:
                    start.restore()
                    self._load(inputs, rows, self._rung)

                yield put_back
            finally:
                before.restore()
