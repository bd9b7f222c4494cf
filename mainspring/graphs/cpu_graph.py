"""A CUDA graph's contract on the CPU: the operations of one run, replayed at the same addresses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mainspring.graphs.capture import GraphHolds, capture_error, held_collector, recording_of
from mainspring.graphs.cpu_program import Program, map_structure
from mainspring.graphs.cpu_recorder import Recorder
from mainspring.graphs.cpu_watch import Observer, refuse_host_access
from mainspring.graphs.errors import GraphError
from mainspring.graphs.outside import OutsideTensor, outside_of
from mainspring.graphs.pool import GraphPool
from mainspring.graphs.report import Address, Operation, address_book

__all__ = ["CpuGraph"]


class CpuGraph:
    """ATen operations recorded from one run of a callable; made by `capture`.

    A replay reads and writes the tensors that the callable used, at their addresses, and runs none of its
    Python. Intermediates lie in the arena of `pool`; what the callable returned does not.

    Attributes:
        pool: whose arena holds the intermediates.
        holds: loops that repeat this graph.
        seconds: wall time of the capture.
        pool_bytes_added: bytes by which the arena grew.
        runs: of the callable before the recorded one.
        executable_bytes: always 0; see `CudaGraph`.
        outside: memory that the operations use and that is not the recording's own.
        escaped: what the run made and did not return, but somebody held when it had ended: replays do not reach it.
    """

    executable_bytes = 0
    escaped: tuple[str, ...] = ()

    def __init__(self, program: Program, pool: GraphPool) -> None:
        self.pool = pool
        self.holds = GraphHolds()
        self.seconds = 0.0
        self.pool_bytes_added = 0
        self.runs = 0
        self.outside: tuple[OutsideTensor, ...] = ()
        self._program: Program | None = program
        self._calls: tuple[Callable[[], object], ...] = ()
        self._resolve: Callable[[Any], Any] = lambda value: value
        self._outputs: Any = None
        before = pool.arena.nbytes
        pool.arena.join(self, program.nbytes)
        self.pool_bytes_added = pool.arena.nbytes - before
        self._outputs = map_structure(program.results, self._resolve)

    @classmethod
    def capture(
        cls,
        fn: Callable[[], Any],
        *,
        pool: GraphPool | None = None,
        warmup: int = 1,
        name: str = "graph",
        watch: Sequence[Tensor] = (),
    ) -> CpuGraph:
        """Run `fn` `warmup` times, then once more while recording.

        Args:
            fn: takes nothing; returns tensors in tuples, lists and dicts, or None.
            pool: whose arena to use; a new one by default.
            warmup: runs before the recorded one, so that lazily made state exists.
            name: for error messages.
            watch: tensors known to be used, whose contents are followed from the start of the recording, so
                that writes around the dispatcher are noticed.

        Raises:
            CaptureError: `fn` raised (its exception is the cause), or did something that cannot be recorded.
        """
        pool = pool or GraphPool("cpu")
        if pool.device.type != "cpu":
            raise GraphError(f"a CPU graph needs a pool on the CPU, not on {pool.device}")
        started = time.perf_counter()
        with held_collector(collect=False), recording_of(name), torch.inference_mode(False), torch.no_grad():
            try:
                for _ in range(warmup - 1):
                    fn()
                observer = Observer()
                if warmup > 0:
                    with observer:
                        fn()
                recorder = Recorder([*watch, *observer.seen.values()])
                with refuse_host_access(lambda: recorder.inside_operation), recorder:
                    results = fn()
                program = recorder.finish(results)
            except Exception as error:
                raise capture_error(name, error) from error
            program.plan()
            graph = cls(program, pool)
            graph.escaped = tuple(program.escaped)
        graph.outside = tuple(outside_of(program))
        graph.runs = warmup
        graph.seconds = time.perf_counter() - started
        return graph

    def replay(self) -> None:
        """Run the recorded operations.

        Raises:
            GraphError: the graph was released, or a loop runs on its pool.
        """
        if self._program is None:
            raise GraphError("this graph was released; capture it again")
        self.pool.refuse_looping()
        if torch.is_autocast_enabled("cpu"):  # the recorded operations hold their casts already
            with torch.autocast("cpu", enabled=False):
                self.replay()
            return
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            for call in self._calls:
                call()

    def stepwise(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Replay operation by operation, giving each one's name and the tensors that it wrote, right after it ran."""
        operations = [] if self._program is None else self._program.operations
        for operation, call in zip(operations, self._calls, strict=True):
            with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
                call()
            yield operation.name, [self._resolve(value) for value in operation.writes]

    @property
    def outputs(self) -> Any:
        """What the callable returned, in memory that replays rewrite and that is held here."""
        return self._outputs

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The operation list, with present addresses."""
        return () if self._program is None else self._program.describe(self._resolve)

    @property
    def num_operations(self) -> int:
        """Length of the operation list."""
        return 0 if self._program is None else len(self._program.operations)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The address book."""
        return address_book(self.operations)

    @property
    def nbytes(self) -> int:
        """Bytes of intermediates that this graph needs in the arena, shared with the pool's other graphs."""
        return 0 if self._program is None else self._program.nbytes

    def writes_to(self, tensor: Tensor) -> bool:
        """Whether a recorded operation declares a write into the memory of `tensor`."""
        wanted = tensor.untyped_storage()._cdata
        operations = [] if self._program is None else self._program.operations
        return any(
            isinstance(written, Tensor) and written.untyped_storage()._cdata == wanted
            for operation in operations
            for written in operation.writes
        )

    def rebind(self, arena: torch.UntypedStorage) -> None:
        """Move the intermediates to `arena`."""
        if self._program is not None:
            calls, self._resolve = self._program.bind(arena)
            self._calls = tuple(calls)

    def release(self) -> None:
        """Give up the recording and everything that it holds.

        Raises:
            GraphError: a loop repeats this graph.
        """
        self.holds.refuse()
        self.pool.arena.leave(self)
        self._program, self._calls, self._outputs = None, (), None
        self.outside = ()
        self._resolve = lambda value: value
