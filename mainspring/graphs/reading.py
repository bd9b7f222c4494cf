"""Makes a `Recording` of a graph, or of every rung of a runner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from mainspring.graphs.allocator import allocator_spans, snapshot
from mainspring.graphs.books import Book
from mainspring.graphs.buffers import FixedBuffers
from mainspring.graphs.capture import held_collector
from mainspring.graphs.cpu_graph import CpuGraph
from mainspring.graphs.cuda_graph import CudaGraph
from mainspring.graphs.cuda_nodes import GraphDriver, cuda_driver
from mainspring.graphs.errors import GraphError
from mainspring.graphs.outside import OutsideTensor, outside_spans
from mainspring.graphs.pool import GraphPool
from mainspring.graphs.read_cpu import cpu_spans, named_spans, read_cpu
from mainspring.graphs.read_cuda import RANKS, CudaReader
from mainspring.graphs.recording import Recording, RungRecording
from mainspring.graphs.spans import Span, SpanMap

__all__ = ["RecordedRunner", "cuda_spans", "read_books", "read_graph", "read_graphs", "read_runner"]


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
    expected: Iterable[int] = (),
) -> Recording:
    """The recordings of `graphs`, by size, which lie in `pool` and use `buffers`.

    Args:
        graphs: by size.
        buffers: the named ones.
        pool: of the graphs.
        name: of their runner.
        device: as text or torch's.
        expected: on a GPU, addresses that are known to have been pointers, whatever is there now.
    """
    with held_collector(collect=False):  # objects by the ten thousand, none of them garbage
        if pool.device.type == "cuda":
            segments = snapshot(pool.device)
            owned = SpanMap(cuda_spans(graphs.values(), buffers, pool, segments), RANKS)
            rungs, spans = _read_cuda(graphs, owned, name, expected)
            pool_bytes = pool.nbytes_in(segments)
        else:
            rungs, spans = _read_cpu(graphs, buffers, pool, name)
            pool_bytes = pool.nbytes
    totals = {"pool": pool_bytes, "buffers": buffers.nbytes}
    return Recording(tuple(rungs), str(device), _in_use(rungs, spans), totals, name)


def read_books(graphs: Mapping[int, CpuGraph | CudaGraph], buffers: FixedBuffers, pool: GraphPool) -> dict[int, Book]:
    """The address books of `graphs` alone, by size: on a GPU in a part of the time that their recordings take."""
    if pool.device.type != "cuda":
        return {rung.size: Book.of(rung) for rung in read_graphs(graphs, buffers, pool).rungs}
    with held_collector(collect=False):
        reader = CudaReader(_driver(), SpanMap(cuda_spans(graphs.values(), buffers, pool), RANKS))
        books = {}
        for size, graph in graphs.items():
            if isinstance(graph, CudaGraph):
                reader.bodies = graph.bodies
                books[size] = reader.book(graph.raw)
    return books


def _in_use(rungs: Sequence[RungRecording], spans: Iterable[Span]) -> tuple[Span, ...]:
    """The spans that have a name or in which a recorded address lies, by address."""
    owners = {entry.owner for rung in rungs for entry in rung.addresses}
    kept = {
        (span.address, -span.nbytes, span.owner, span.kind): span
        for span in spans
        if span.kind == "buffer" or span.owner in owners
    }
    return tuple(kept[key] for key in sorted(kept))


def _read_cuda(
    graphs: Mapping[int, CpuGraph | CudaGraph], spans: SpanMap, name: str, expected: Iterable[int]
) -> tuple[list[RungRecording], list[Span]]:
    reader = CudaReader(_driver(), spans, expected=frozenset(expected))
    rungs = []
    for size, graph in graphs.items():
        if isinstance(graph, CudaGraph):
            reader.bodies = graph.bodies
            rungs.append(
                reader.read(
                    graph.raw,
                    size=size,
                    name=name,
                    pool_bytes=graph.pool_bytes_added,
                    capture_seconds=graph.seconds,
                    executable_bytes=graph.executable_bytes,
                )
            )
    return rungs, [*reader.spans.spans, *reader.found]


def _driver() -> GraphDriver:
    driver = cuda_driver()
    if driver is None:
        raise GraphError(
            "reading a CUDA graph needs the package cuda-bindings, which is not installed here; install it with "
            "`pip install cuda-bindings`"
        )
    return driver


def cuda_spans(
    graphs: Iterable[CpuGraph | CudaGraph],
    buffers: FixedBuffers,
    pool: GraphPool,
    segments: Iterable[Mapping[str, Any]] | None = None,
) -> list[Span]:
    """Who owns what on the pool's device now: named buffers, tensors that the graphs use, what the allocator holds.

    Args:
        graphs: whose tensors from outside are looked at.
        buffers: the named ones.
        pool: the graphs' pool.
        segments: the allocator's snapshot, where it has been taken already.
    """
    used: dict[tuple[int, ...], OutsideTensor] = {}  # rungs use the same ones
    for graph in graphs:
        for outside in graph.outside:
            used.setdefault(outside.key, outside)
    return [
        *named_spans(buffers),
        *outside_spans(outside for outside in used.values() if outside.change() is None),
        *allocator_spans(snapshot(pool.device) if segments is None else segments, pool.handles),
    ]


def _read_cpu(
    graphs: Mapping[int, CpuGraph | CudaGraph], buffers: FixedBuffers, pool: GraphPool, name: str
) -> tuple[list[RungRecording], list[Span]]:
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
    return rungs, list(spans.spans)
