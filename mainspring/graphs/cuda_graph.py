"""A CUDA graph recorded from one run of a callable."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mainspring.graphs.capture import GraphHolds, held_collector, recording_of, refuse_forked
from mainspring.graphs.cuda_capture import Discarded, capture_run
from mainspring.graphs.cuda_nodes import cuda_driver
from mainspring.graphs.errors import GraphError
from mainspring.graphs.outside import OutsideTensor
from mainspring.graphs.pool import GraphPool
from mainspring.graphs.report import Address, Operation, address_book

__all__ = ["CudaGraph"]


class CudaGraph:
    """Kernels recorded from one run of a callable; made by `capture`.

    Attributes:
        pool: whose memory pool holds the intermediates.
        holds: loops that repeat this graph.
        seconds: wall time of warm-up, capture and instantiation.
        pool_bytes_added: bytes by which the allocator's reserve grew during the capture.
        executable_bytes: device memory that instantiating the graph took.
        outside: memory that the run took from outside, by references that do not hold it.
        runs: of the callable before the captured one.
        discarded: the capture that was thrown away for this one, if any.
        escaped: always empty; see `CpuGraph`.
        bodies: graphs inside of conditional nodes by node handle, for versions of CUDA that do not tell them.
    """

    escaped: tuple[str, ...] = ()

    def __init__(self, graph: torch.cuda.CUDAGraph, pool: GraphPool, handle: tuple[int, int], outputs: Any) -> None:
        self.pool = pool
        self.holds = GraphHolds()
        self._handle = handle
        pool.add_graph(handle)
        self.seconds = 0.0
        self.pool_bytes_added = 0
        self.executable_bytes = 0
        self.outside: tuple[OutsideTensor, ...] = ()
        self.runs = 0
        self.discarded: Discarded | None = None
        self.bodies: dict[int, list[int]] = {}
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
        """Run `fn` `warmup` times on the pool's side stream, then capture one more run; see `capture_run`.

        Args:
            fn: takes nothing; returns tensors in tuples, lists and dicts, or None.
            pool: whose memory to use; by default a new one on the current device.
            warmup: runs before the capture, in which libraries load kernels and make workspaces. 0 is for an `fn` whose
                like was recorded with this pool before: a run comes first only where the capture shows that it must.
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
                with torch.cuda.stream(pool.stream), recording_of(name):
                    captured = capture_run(fn, pool, name, warmup)
            finally:
                outer.wait_stream(pool.stream)
            free = torch.cuda.mem_get_info()[0]
            captured.graph.instantiate()
            executable = max(free - torch.cuda.mem_get_info()[0], 0)
        recorded = cls(captured.graph, pool, captured.handle, captured.outputs)
        recorded.executable_bytes = executable
        recorded.outside = captured.outside
        recorded.pool_bytes_added = captured.pool_bytes_added
        recorded.runs, recorded.discarded = captured.runs, captured.discarded
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
        """The nodes by kind, in the order of the driver; empty without `cuda.bindings`. `Recording.of` tells more."""
        if self._operations is None:
            driver = None if self._graph is None else cuda_driver()
            nodes = [] if driver is None else [(node, driver.kind(node)) for node in driver.nodes(self.raw)]
            self._operations = tuple(
                Operation(index, kind, kind, handle=node) for index, (node, kind) in enumerate(nodes)
            )
        return self._operations

    @property
    def num_operations(self) -> int:
        """Number of nodes; 0 where `cuda.bindings` is not installed."""
        driver = None if self._graph is None else cuda_driver()
        return 0 if driver is None else driver.count(self.raw)

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
            self._graph, self._outputs, self._operations, self.outside = None, None, (), ()
            self.pool.remove_graph(self._handle)
