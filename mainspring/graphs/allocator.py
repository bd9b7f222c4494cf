"""What torch's caching allocator holds on a CUDA device, as spans."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from mainspring.graphs.spans import Span

__all__ = ["FREED", "POOL", "allocator_spans", "snapshot"]

POOL = "graph pool"
"""Owner of what lies in the memory that graphs share."""

FREED = "freed memory"
"""Owner of a block that torch keeps but has given to nobody."""

_DEFAULT_POOL = (0, 0)


def snapshot(device: torch.device) -> list[dict[str, Any]]:
    """The allocator's segments on `device`; see `torch.cuda.memory_snapshot`."""
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [segment for segment in segments if segment["device"] == index]


def allocator_spans(segments: Iterable[Mapping[str, Any]], ours: Collection[tuple[int, int]]) -> list[Span]:
    """Who owns what in the allocator's segments.

    A segment of one of the pools in `ours` is a graph pool as a whole: what was freed in it during a capture is used
    again by the same graph. Elsewhere a block belongs to whoever allocated it ("workspace", unless a name is known
    for it), or to nobody ("freed").
    """
    spans = []
    for segment in segments:
        pool = tuple(segment["segment_pool_id"])
        if pool in ours:
            spans.append(Span(POOL, "pool", segment["address"], segment["total_size"]))
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"].startswith("active"):
                owner = "torch workspace" if pool == _DEFAULT_POOL else "another graph pool"
                spans.append(Span(owner, "workspace", address, block["size"]))
            else:
                spans.append(Span(FREED, "freed", address, block["size"]))
            address += block["size"]
    return spans
