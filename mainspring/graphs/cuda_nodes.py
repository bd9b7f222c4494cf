"""The CUDA driver's view of a graph, through `cuda.bindings` 12 or 13. Nothing here decides anything.

Everything above takes a `GraphDriver`, so that it can be tested without a GPU.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mainspring.graphs.errors import GraphError

__all__ = ["Allocation", "CudaDriver", "GraphDriver", "KernelFunction", "KernelNode", "cuda_driver"]


@dataclass(frozen=True, slots=True)
class KernelFunction:
    """What all nodes that launch one kernel have in common.

    Attributes:
        symbol: its name as the driver has it.
        sizes: of its parameters, in bytes.
    """

    symbol: str
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KernelNode:
    """A kernel node's parameters.

    Attributes:
        function: the kernel.
        grid: blocks in x, y, z.
        block: threads in x, y, z.
        shared_memory: dynamic, in bytes.
        values: bytes of each parameter.
    """

    function: KernelFunction
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_memory: int
    values: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Allocation:
    """A live allocation that the driver knows: address, bytes, and whether it is pinned memory of the host."""

    address: int
    nbytes: int
    is_host: bool


class GraphDriver(Protocol):
    """What reading a graph asks of CUDA. Handles are integers."""

    def nodes(self, graph: int) -> list[int]:
        """The nodes of a graph."""
        ...

    def count(self, graph: int) -> int:
        """How many nodes a graph has."""
        ...

    def kind(self, node: int) -> str:
        """Such as "kernel", "memcpy", "memset", "graph", "conditional"."""
        ...

    def edges(self, graph: int) -> list[tuple[int, int, str]]:
        """From node, to node, and "full" or "programmatic"."""
        ...

    def kernel(self, node: int) -> KernelNode:
        """Parameters of a kernel node."""
        ...

    def memcpy(self, node: int) -> list[tuple[str, int, int]]:
        """What a copy node touches: "write" or "read", address, bytes."""
        ...

    def memset(self, node: int) -> list[tuple[str, int, int]]:
        """What a memset node touches, in the same form."""
        ...

    def bodies(self, node: int, kind: str) -> tuple[list[int], str]:
        """The graphs inside a "graph" or "conditional" node, and what to note about it."""
        ...

    def allocation(self, address: int) -> Allocation | None:
        """The live allocation that holds `address`, or None."""
        ...


_KINDS = {
    0: "kernel",
    1: "memcpy",
    2: "memset",
    3: "host",
    4: "graph",
    5: "empty",
    6: "wait_event",
    7: "event_record",
    8: "semaphore_signal",
    9: "semaphore_wait",
    10: "alloc",
    11: "free",
    12: "memory_operations",
    13: "conditional",
}
_PROGRAMMATIC = 1
_HOST_MEMORY = 1
_CONDITIONALS = {0: "if", 1: "while", 2: "switch"}


class CudaDriver:
    """`GraphDriver` over `cuda.bindings.driver`.

    Kernels' names and parameter layouts are kept by handle for the life of the object. Make one for each reading: a
    handle may come to mean another kernel once a module is unloaded.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._functions: dict[tuple[int, int], tuple[KernelFunction, tuple[int, ...]]] = {}
        self._handles: dict[int, Any] = {}
        self._edges_call = getattr(driver, "cuGraphGetEdges_v2", driver.cuGraphGetEdges)

    def nodes(self, graph: int) -> list[int]:
        """The nodes of a graph."""
        handle = self._driver.CUgraph(init_value=graph)
        _, count = self._call("cuGraphGetNodes", handle)
        listed, count = self._call("cuGraphGetNodes", handle, count) if count else ((), 0)
        found = []
        for node in listed[:count]:
            number = int(node)
            self._handles[number] = node
            found.append(number)
        return found

    def count(self, graph: int) -> int:
        """How many nodes a graph has."""
        return int(self._call("cuGraphGetNodes", self._driver.CUgraph(init_value=graph))[1])

    def kind(self, node: int) -> str:
        """Kind of a node."""
        try:
            number = int(self._call("cuGraphNodeGetType", self._handles[node]))
        except ValueError:  # the bindings' enumeration is older than the driver
            return "other"
        return _KINDS.get(number, "other")

    def edges(self, graph: int) -> list[tuple[int, int, str]]:
        """Edges with their data, without which CUDA 13 refuses to list programmatic ones."""
        handle = self._driver.CUgraph(init_value=graph)
        count = self._checked("cuGraphGetEdges", self._edges_call(handle))[-1]
        if not count:
            return []
        answer = self._checked("cuGraphGetEdges", self._edges_call(handle, count))
        sources, targets, count = answer[0], answer[1], answer[-1]
        data: Sequence[Any] = answer[2] if len(answer) > 3 else ()
        kinds = ["programmatic" if int(each.type) == _PROGRAMMATIC else "full" for each in data] or ["full"] * count
        return [(int(sources[at]), int(targets[at]), kinds[at]) for at in range(count)]

    def kernel(self, node: int) -> KernelNode:
        """Parameters of a kernel node, which the runtime API does not give for kernels launched through the driver."""
        params = self._call("cuGraphKernelNodeGetParams", self._handles[node])
        func, kern = int(params.func), int(params.kern)
        key = (func, kern)
        if key not in self._functions:
            self._functions[key] = self._describe(params.func, params.kern, func == 0)
        function, offsets = self._functions[key]
        return KernelNode(
            function,
            (int(params.gridDimX), int(params.gridDimY), int(params.gridDimZ)),
            (int(params.blockDimX), int(params.blockDimY), int(params.blockDimZ)),
            int(params.sharedMemBytes),
            _values(int(params.kernelParams), int(params.extra), function.sizes, offsets),
        )

    def memcpy(self, node: int) -> list[tuple[str, int, int]]:
        """Source and destination of a copy; arrays have no address."""
        params = self._call("cuGraphMemcpyNodeGetParams", self._handles[node])
        width, height, depth = (max(int(size), 1) for size in (params.WidthInBytes, params.Height, params.Depth))
        touched = []
        for role, end in (("write", "dst"), ("read", "src")):
            base = int(getattr(params, f"{end}Device")) or int(getattr(params, f"{end}Host") or 0)
            pitch, rows = int(getattr(params, f"{end}Pitch")), int(getattr(params, f"{end}Height"))
            if base:
                first = int(getattr(params, f"{end}XInBytes"))
                first += int(getattr(params, f"{end}Y")) * pitch + int(getattr(params, f"{end}Z")) * pitch * rows
                extent = width + (height - 1) * pitch + (depth - 1) * pitch * rows
                touched.append((role, base + first, extent))
        return touched

    def memset(self, node: int) -> list[tuple[str, int, int]]:
        """Destination of a memset."""
        params = self._call("cuGraphMemsetNodeGetParams", self._handles[node])
        row = int(params.width) * int(params.elementSize)
        return [("write", int(params.dst), row + (max(int(params.height), 1) - 1) * int(params.pitch))]

    def bodies(self, node: int, kind: str) -> tuple[list[int], str]:
        """The graphs inside a node. A conditional's can be asked for from CUDA 13.2 on; before, nothing is found."""
        if kind == "graph":
            return [int(self._call("cuGraphChildGraphNodeGetGraph", self._handles[node]))], ""
        if not hasattr(self._driver, "cuGraphNodeGetParams"):
            return [], "its bodies cannot be read with this version of CUDA"
        try:
            params = self._call("cuGraphNodeGetParams", self._handles[node]).conditional
        except (GraphError, RuntimeError):  # the driver is older than the bindings
            return [], "its bodies cannot be read with this version of CUDA"
        note = _CONDITIONALS.get(int(params.type), f"type {int(params.type)}")
        return [int(graph) for graph in params.phGraph_out or ()], note

    def allocation(self, address: int) -> Allocation | None:
        """What the driver knows at `address`."""
        attribute = self._driver.CUpointer_attribute
        wanted = [
            attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        ]
        answer = self._driver.cuPointerGetAttributes(len(wanted), wanted, self._driver.CUdeviceptr(address))
        if int(answer[0]) != 0:
            return None
        kind, start, nbytes = (int(value) for value in answer[1])
        return Allocation(start, nbytes, kind == _HOST_MEMORY) if kind and nbytes else None

    def _describe(self, func: Any, kern: Any, by_kernel: bool) -> tuple[KernelFunction, tuple[int, ...]]:
        name = self._call("cuKernelGetName", kern) if by_kernel else self._call("cuFuncGetName", func)
        info = self._driver.cuKernelGetParamInfo if by_kernel else self._driver.cuFuncGetParamInfo
        offsets: list[int] = []
        sizes: list[int] = []
        while True:
            error, offset, size = info(kern if by_kernel else func, len(sizes))
            if int(error) != 0:  # past the last one
                break
            offsets.append(int(offset))
            sizes.append(int(size))
        text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
        return KernelFunction(text, tuple(sizes)), tuple(offsets)

    def _call(self, name: str, *arguments: Any) -> Any:
        rest = self._checked(name, getattr(self._driver, name)(*arguments))
        return rest[0] if len(rest) == 1 else rest

    @staticmethod
    def _checked(name: str, answer: Sequence[Any]) -> Sequence[Any]:
        if int(answer[0]) != 0:
            raise GraphError(f"{name} failed with {answer[0]}")
        return answer[1:]


def _values(kernel_params: int, extra: int, sizes: Sequence[int], offsets: Sequence[int]) -> tuple[bytes, ...]:
    """Bytes of each parameter, from the array of their addresses or from the one buffer that holds them all."""
    if kernel_params and sizes:
        pointers = struct.unpack(f"={len(sizes)}Q", ctypes.string_at(kernel_params, 8 * len(sizes)))
        begin = pointers[0]
        if begin and pointers == tuple([begin + offset for offset in offsets]):  # side by side: read at once
            whole = ctypes.string_at(begin, offsets[-1] + sizes[-1])
            return tuple([whole[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)])
        return tuple(
            ctypes.string_at(pointer, size) if pointer else bytes(size)
            for pointer, size in zip(pointers, sizes, strict=True)
        )
    if not extra:
        return ()
    # Pairs of a key and a pointer, ended by 0: key 1 is the buffer, key 2 the address of its size.
    at, buffer = extra, 0
    while key := ctypes.c_void_p.from_address(at).value:
        if key == 1:
            buffer = ctypes.c_void_p.from_address(at + 8).value or 0
        at += 16
    return tuple(ctypes.string_at(buffer + offset, size) for offset, size in zip(offsets, sizes, strict=True))


def cuda_driver() -> CudaDriver | None:
    """The driver through `cuda.bindings`, or None where they are not installed."""
    try:
        from cuda.bindings import driver  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
    return CudaDriver(driver)
