"""A driver and graphs made of plain data, so that everything above `cuda_nodes` is tested without a GPU."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from mainspring.graphs import CudaGraph, GraphPool
from mainspring.graphs.cuda_nodes import Allocation, KernelFunction, KernelNode

MUL = (
    "_ZN2at6native18elementwise_kernelILi128ELi4EZNS0_22gpu_kernel_impl_nocastINS0_13BinaryFunctorIfffNS0_15binary_"
    "internal10MulFunctorIfEEEEEEvRNS_18TensorIteratorBaseERKT_EUliE_EEviT1_"
)

SPLIT_K = (
    "_ZN8cublasLt19splitKreduce_kernelILi32ELi16EifffffLb1ELb1ELb0EEEvNS_18cublasSplitKParamsIT1_EEPKT2_PKT3_PS7_PKT1_"
    "SC_S9_PKT4_PS8_PvlPS4_Pi"
)
"""cuBLAS's: a struct of 32 bytes, then pointers by the name, of which some are the host's and never followed."""

FILL = "_Z4fillPfS_l"
"""fill(float*, float*, long): a kernel whose name tells its pointers."""


def pointers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def kernel(symbol: str, *values: bytes, grid: tuple[int, int, int] = (1, 1, 1)) -> KernelNode:
    return KernelNode(KernelFunction(symbol, tuple(map(len, values))), grid, (128, 1, 1), 0, values)


@dataclass
class FakeDriver:
    """Nodes by handle: (kind, what it holds); graphs by handle: their nodes and edges."""

    graphs: dict[int, tuple[list[int], list[tuple[int, int, str]]]]
    held: dict[int, tuple[str, Any]]
    allocations: list[Allocation] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)

    def nodes(self, graph: int) -> list[int]:
        return self.graphs[graph][0]

    def count(self, graph: int) -> int:
        return len(self.graphs[graph][0])

    def edges(self, graph: int) -> list[tuple[int, int, str]]:
        return self.graphs[graph][1]

    def kind(self, node: int) -> str:
        return self.held[node][0]

    def kernel(self, node: int) -> KernelNode:
        found: KernelNode = self.held[node][1]
        return found

    def memcpy(self, node: int) -> list[tuple[str, int, int]]:
        return list(self.held[node][1])

    def memset(self, node: int) -> list[tuple[str, int, int]]:
        return list(self.held[node][1])

    def bodies(self, node: int, kind: str) -> tuple[list[int], str]:
        return list(self.held[node][1]), "while" if kind == "conditional" else ""

    def allocation(self, address: int) -> Allocation | None:
        self.asked.append(address)
        return next((a for a in self.allocations if a.address <= address < a.address + a.nbytes), None)


def fake_graph(pool: GraphPool, raw: int) -> CudaGraph:
    """A `CudaGraph` whose handle is `raw`."""
    torch_graph: Any = SimpleNamespace(raw_cuda_graph=lambda: raw, reset=lambda: None)
    return CudaGraph(torch_graph, pool, (9, 9), None)


def segment(address: int, *blocks: tuple[int, str], pool: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    """A segment of the allocator's snapshot."""
    return {
        "address": address,
        "total_size": sum(size for size, _ in blocks),
        "segment_pool_id": pool,
        "device": 0,
        "blocks": [{"size": size, "state": state} for size, state in blocks],
    }
