"""Makes a `Recording` of a graph, or of every rung of a runner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from mainspring.graphs.buffers import FixedBuffers
from mainspring.graphs.cpu_graph import CpuGraph
from mainspring.graphs.cuda_graph import CudaGraph
from mainspring.graphs.pool import GraphPool
from mainspring.graphs.read_cpu import cpu_spans, read_cpu
from mainspring.graphs.recording import Recording, RungRecording
from mainspring.graphs.spans import SpanMap

__all__ = ["RecordedRunner", "read_graph", "read_graphs", "read_runner"]


class RecordedRunner(Protocol):
    """What is read of a `GraphRunner`."""

    name: str
    device: torch.device
    buffers: FixedBuffers
    pool: GraphPool
    graphs: dict[int, CpuGraph | CudaGraph]


def read_runner(runner: RecordedRunner) -> Recording:
    """Everything that `runner` has recorded."""
    return read_graphs(runner.graphs, runner.buffers, runner.pool, name=runner.name, device=runner.device)


def read_graph(graph: CpuGraph | CudaGraph, buffers: FixedBuffers | None = None) -> Recording:
    """The recording of one graph, as the only rung, of size 0."""
    device = graph.pool.device
    return read_graphs({0: graph}, buffers or FixedBuffers(device), graph.pool, device=device)


def read_graphs(
    graphs: Mapping[int, CpuGraph | CudaGraph],
    buffers: FixedBuffers,
    pool: GraphPool,
    *,
    name: str = "",
    device: torch.device | str = "cpu",
) -> Recording:
    """The recordings of `graphs`, by size, which lie in `pool` and use `buffers`."""
    rungs, spans = _read_cpu(graphs, buffers, pool, name)
    totals = {"pool": pool.nbytes, "buffers": buffers.nbytes}
    memory = tuple(sorted(spans.spans, key=lambda span: (span.address, -span.nbytes)))
    return Recording(tuple(rungs), str(device), memory, totals, name)


def _read_cpu(
    graphs: Mapping[int, CpuGraph | CudaGraph], buffers: FixedBuffers, pool: GraphPool, name: str
) -> tuple[list[RungRecording], SpanMap]:
    listed = {size: graph.operations for size, graph in graphs.items()}
    spans, opaque = cpu_spans(listed.values(), buffers, pool.arena.extent)
    rungs = [
        read_cpu(
            listed[size],
            spans,
            opaque,
            size=size,
            name=name,
            pool_bytes=graph.pool_bytes_added,
            capture_seconds=graph.seconds,
        )
        for size, graph in graphs.items()
    ]
    return rungs, spans
