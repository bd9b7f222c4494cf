"""Reads a CPU recording: its operation list and its address book."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mainspring.graphs.allocator import POOL
from mainspring.graphs.buffers import FixedBuffers
from mainspring.graphs.recording import Dependency, RecordedOperation, RungRecording, Use, address_entries
from mainspring.graphs.report import Operation, TensorUse
from mainspring.graphs.spans import Span, SpanMap

__all__ = ["RANKS", "cpu_spans", "named_spans", "read_cpu"]

RANKS = {"buffer": 3, "output": 2, "constant": 2, "pool": 1, "tensor": 1}
"""A named buffer answers before anything else that holds an address."""


def named_spans(buffers: FixedBuffers) -> list[Span]:
    """The named buffers that have an address, where they were recorded."""
    return [Span(name, "buffer", start, end - start) for start, end, name in buffers.extents()]


def cpu_spans(
    graphs: Iterable[tuple[Operation, ...]], buffers: FixedBuffers, arena: tuple[int, int]
) -> tuple[SpanMap, dict[int, str]]:
    """Owners of every address in CPU recordings, and names of packed weights by identity.

    Args:
        graphs: operation lists.
        buffers: the named buffers.
        arena: address and bytes of the shared arena.
    """
    spans = [*named_spans(buffers), Span(POOL, "pool", *arena)]
    seen: set[tuple[int, int]] = {arena}
    known = SpanMap(spans, RANKS)
    opaque = buffers.packed()
    counts: dict[str, int] = {}
    for operations in graphs:
        for operation in operations:
            for use in operation.tensors:
                if use.identity is not None:
                    if use.identity not in opaque:
                        opaque[use.identity] = _numbered(f"packed tensor {use.text}", counts)
                elif use.base is not None and use.owner != "pool" and use.base not in seen:
                    seen.add(use.base)
                    if known.find(use.base[0]) is None or use.owner is not None:
                        kind = use.owner or "tensor"
                        label = {"output": "graph output", "constant": "constant"}.get(kind, "unnamed tensor")
                        spans.append(Span(_numbered(f"{label} {use.text}", counts), kind, *use.base))
    return SpanMap(spans, RANKS), opaque


def read_cpu(
    operations: tuple[Operation, ...],
    spans: SpanMap,
    opaque: Mapping[int, str],
    *,
    size: int = 0,
    name: str = "",
    pool_bytes: int = 0,
    capture_seconds: float = 0.0,
) -> RungRecording:
    """One graph's recording; the numbers are passed through."""
    places: dict[int, Span] = {}
    listed = tuple(
        RecordedOperation(
            index=operation.index,
            kind=operation.kind,
            name=operation.name,
            dependencies=tuple(Dependency(index) for index in operation.after),
            uses=tuple(_use(at, use, spans, opaque, places) for at, use in enumerate(operation.tensors)),
        )
        for operation in operations
    )
    return RungRecording(size, listed, address_entries(listed, places), pool_bytes, capture_seconds, 0, name)


def _use(at: int, use: TensorUse, spans: SpanMap, opaque: Mapping[int, str], places: dict[int, Span]) -> Use:
    if use.identity is not None:
        owner = opaque.get(use.identity, "packed tensor")
        return Use(None, owner, at, kind="opaque", role=use.role, nbytes=None, text=use.text)
    address = use.address or 0
    if address not in places:
        span = spans.find(address)
        if span is None and use.base is not None:  # an empty tensor, or one that begins at its storage's end
            span = spans.find(use.base[0])
        if span is not None:
            places[address] = span
    owner = places[address].owner if address in places else "no memory" if use.nbytes == 0 else "unknown"
    return Use(address, owner, at, role=use.role, nbytes=use.nbytes, text=use.text)


def _numbered(label: str, counts: dict[str, int]) -> str:
    """`label`, with a number from the second of its kind on."""
    counts[label] = counts.get(label, 0) + 1
    return label if counts[label] == 1 else f"{label} #{counts[label]}"
