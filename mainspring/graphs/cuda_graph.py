"""A CUDA graph recorded from one run of a callable."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from mainspring.graphs.capture import GraphHolds, capture_error, held_collector, refuse_forked
from mainspring.graphs.errors import CaptureError, GraphError
from mainspring.graphs.pool import GraphPool
from mainspring.graphs.report import Address, Operation, address_book

__all__ = ["CudaGraph"]


_BROKEN: list[torch.cuda.CUDAGraph] = []
"""Captures that CUDA invalidated: the host allocator keeps pointing at them, so they are never freed."""


class CudaGraph:
    """Kernels recorded from one run of a callable; made by `capture`.

    Attributes:
        pool: whose memory pool holds the intermediates.
        holds: loops that repeat this graph.
        seconds: wall time of warm-up, capture and instantiation.
        pool_bytes_added: bytes by which the allocator's reserve grew during the capture.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, pool: GraphPool, handle: tuple[int, int], outputs: Any) -> None:
        self.pool = pool
        self.holds = GraphHolds()
        self._handle = handle
        pool.add_graph(handle)
        self.seconds = 0.0
        self.pool_bytes_added = 0
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._outputs = outputs
        self._operations: tuple[Operation, ...] | None = None

    @classmethod
    def capture(
        cls,
        fn: Callable[[], Any],
        *,
        pool: GraphPool | None = None,
        warmup: int = 1,
        name: str = "graph",
        watch: Sequence[Tensor] = (),
    ) -> CudaGraph:
        """Run `fn` `warmup` times on the pool's side stream, then capture one more run.

        Args:
            fn: takes nothing; returns tensors in tuples, lists and dicts, or None.
            pool: whose memory to use; by default a new one on the current device.
            warmup: runs before the capture (>= 1), in which libraries load kernels and make workspaces.
            name: for error messages.
            watch: not needed here; `CpuGraph` follows the contents of these tensors.

        Raises:
            CaptureError: `fn` raised (its exception is the cause), synchronized, drew from a random
                generator, or the process was forked after CUDA came up. The next capture works.
        """
        refuse_forked()
        pool = pool or GraphPool(torch.device("cuda", torch.cuda.current_device()))
        if pool.device.type != "cuda":
            raise GraphError(f"a CUDA graph needs a pool on a CUDA device, not on {pool.device}")
        started = time.perf_counter()
        with torch.cuda.device(pool.device), held_collector(), torch.inference_mode(False), torch.no_grad():
            outer = torch.cuda.current_stream()
            pool.stream.wait_stream(outer)
            try:
                with torch.cuda.stream(pool.stream):
                    _warm_up(fn, max(1, warmup), name)
                    torch.cuda.synchronize()
                    before = torch.cuda.memory_reserved()
                    graph, handle, outputs = _record(fn, pool, name)
            finally:
                outer.wait_stream(pool.stream)
            added = torch.cuda.memory_reserved() - before
            graph.instantiate()
        recorded = cls(graph, pool, handle, outputs)
        recorded.pool_bytes_added = added
        recorded.seconds = time.perf_counter() - started
        return recorded

    def replay(self) -> None:
        """Launch the graph on the current stream; returns before it has run.

        Raises:
            GraphError: the graph was released.
        """
        if self._graph is None:
            raise GraphError("this graph was released; capture it again")
        self._graph.replay()

    @property
    def raw(self) -> int:
        """The `cudaGraph_t` handle, for `cuda.bindings`; valid until `release`."""
        if self._graph is None:
            raise GraphError("this graph was released; capture it again")
        return int(self._graph.raw_cuda_graph())

    @property
    def outputs(self) -> Any:
        """What the callable returned, held here so that no later graph of the pool is given its memory."""
        return self._outputs

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The nodes by kind, in the order of the driver; empty without `cuda.bindings`."""
        if self._operations is None:
            self._operations = () if self._graph is None else _nodes(self.raw)
        return self._operations

    @property
    def num_operations(self) -> int:
        """Number of nodes; 0 where `cuda.bindings` is not installed."""
        return 0 if self._graph is None else _count(self.raw)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The address book of what `operations` tells; kernel parameters are not read here."""
        return address_book(self.operations)

    @property
    def nbytes(self) -> int:
        """Bytes that this graph added to the pool."""
        return self.pool_bytes_added

    def writes_to(self, tensor: Tensor) -> bool:
        """Always false: what kernels write is not read here."""
        return False

    def __del__(self) -> None:
        # torch destroys a graph with its last reference; the pool must hear of it.
        if getattr(self, "_graph", None) is not None:
            self.pool.remove_graph(self._handle)

    def release(self) -> None:
        """Destroy the graph and let go of its memory, after everything on the device has finished.

        Raises:
            GraphError: a loop repeats this graph.
        """
        self.holds.refuse()
        if self._graph is not None:
            torch.cuda.synchronize(self.pool.device)
            self._graph.reset()
            self._graph, self._outputs, self._operations = None, None, ()
            self.pool.remove_graph(self._handle)


def _warm_up(fn: Callable[[], Any], runs: int, name: str) -> None:
    """Run `fn` outside of a capture and see that it leaves the random generators alone."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    offset, cpu_state = generator.get_offset(), torch.random.get_rng_state()
    try:
        for _ in range(runs):
            fn()
    except Exception as error:
        raise capture_error(name, error) from error
    if generator.get_offset() != offset or not torch.equal(cpu_state, torch.random.get_rng_state()):
        raise CaptureError(
            f"recording {name!r} failed: it draws from the random generator, whose state would not be "
            f"part of the recording. Compute random numbers from a seed and a counter that are tensors"
        )


@contextmanager
def _synchronizing_calls_raise() -> Iterator[None]:
    """Let torch raise where a call would synchronize, before CUDA sees it and invalidates the capture."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _record(fn: Callable[[], Any], pool: GraphPool, name: str) -> tuple[torch.cuda.CUDAGraph, tuple[int, int], Any]:
    """Capture one run of `fn` on the current stream."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    handle = pool.handle
    graph.capture_begin(
        pool=handle,  # type: ignore[arg-type]
        capture_error_mode="thread_local",
    )
    try:
        with _synchronizing_calls_raise():
            outputs = fn()
    except BaseException as error:
        _end_broken(graph, pool, handle)
        if isinstance(error, Exception):
            raise capture_error(name, error) from error
        raise
    try:
        graph.capture_end()
    except RuntimeError as error:
        _end_broken(graph, pool, handle)
        raise capture_error(name, error) from error
    return graph, handle, outputs


def _end_broken(graph: torch.cuda.CUDAGraph, pool: GraphPool, handle: tuple[int, int]) -> None:
    """End a capture that failed, so that the stream and the allocator are free for the next one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it may well be empty
            graph.capture_end()
    except RuntimeError:
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), handle)
        pool.abandon_handle()
        _BROKEN.append(graph)
    with suppress(RuntimeError):
        graph.reset()
    pool.retire_if_empty(handle)


def _bindings() -> Any:
    """`cuda.bindings.runtime`, or None where it is not installed."""
    try:
        from cuda.bindings import runtime  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
    return runtime


def _count(raw: int) -> int:
    """Number of nodes of a `cudaGraph_t`; 0 without `cuda.bindings`."""
    runtime = _bindings()
    if runtime is None:
        return 0
    error, _, count = runtime.cudaGraphGetNodes(runtime.cudaGraph_t(init_value=raw))
    _check(error, "cudaGraphGetNodes")
    return int(count)


def _nodes(raw: int) -> tuple[Operation, ...]:
    """The nodes of a `cudaGraph_t` and their kinds; empty without `cuda.bindings`."""
    runtime = _bindings()
    if runtime is None:
        return ()
    error, nodes, count = runtime.cudaGraphGetNodes(runtime.cudaGraph_t(init_value=raw), _count(raw))
    _check(error, "cudaGraphGetNodes")
    operations = []
    for index, node in enumerate(nodes[:count]):
        error, kind = runtime.cudaGraphNodeGetType(node)
        _check(error, "cudaGraphNodeGetType")
        label = str(kind.name).removeprefix("cudaGraphNodeType").lower()
        operations.append(Operation(index, label, label, handle=int(node)))
    return tuple(operations)


def _check(error: Any, call: str) -> None:
    if int(error) != 0:
        raise GraphError(f"{call} failed with {error}")
