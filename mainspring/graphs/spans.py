"""Who owns an address: named stretches of memory, looked up many at a time."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["KINDS", "Span", "SpanMap"]

KINDS = {
    "buffer": "a named buffer: an input, an output, state, a weight, the KV cache",
    "pool": "intermediates in the graphs' shared pool",
    "output": "a result that the graph itself holds",
    "constant": "a literal that the recording holds",
    "tensor": "a tensor from outside that has no name here",
    "workspace": "live memory of torch or of a library, such as cuBLAS's workspace",
    "host": "pinned memory of the host",
    "opaque": "a packed weight, which has no address",
    "freed": "memory that nobody holds any more",
    "unknown": "an address that nothing known contains",
}
"""What an owner can be."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of memory with an owner.

    Attributes:
        owner: its name.
        kind: one of `KINDS`.
        address: of its first byte.
        nbytes: its length.
    """

    owner: str
    kind: str
    address: int
    nbytes: int

    @property
    def end(self) -> int:
        """Address behind the last byte."""
        return self.address + self.nbytes

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


class SpanMap:
    """Spans by address. Where several hold an address, the innermost answers: of those of the highest rank the one
    that starts last, then the shortest, then the first given.

    Args:
        spans: in any order; may overlap; empty ones hold nothing.
        ranks: rank of a kind where it is not 0. Spans of a lower rank answer only where no other does.
    """

    def __init__(self, spans: Iterable[Span], ranks: dict[str, int] | None = None) -> None:
        self.spans: tuple[Span, ...] = tuple(span for span in spans if span.nbytes > 0)
        ranks = ranks or {}
        starts: list[int] = []
        owners: list[int] = []
        begins = sorted(range(len(self.spans)), key=lambda at: self.spans[at].address)
        edges = sorted({edge for span in self.spans for edge in (span.address, span.end)})
        active: list[tuple[int, int, int, int]] = []
        following = 0
        for edge in edges:
            while following < len(begins) and self.spans[begins[following]].address == edge:
                span = self.spans[begins[following]]
                heapq.heappush(active, (-ranks.get(span.kind, 0), -span.address, span.nbytes, begins[following]))
                following += 1
            while active and self.spans[active[0][3]].end <= edge:
                heapq.heappop(active)
            owner = active[0][3] if active else -1
            if not owners or owners[-1] != owner:
                starts.append(edge)
                owners.append(owner)
        self._starts = starts
        self._owners = owners
        self._start_array = np.array(starts, dtype=np.uint64)
        self._owner_array = np.array([*owners, -1], dtype=np.int64)

    def find(self, address: int) -> Span | None:
        """The span that holds `address`, or None."""
        at = bisect_right(self._starts, address) - 1
        return self.spans[self._owners[at]] if at >= 0 and self._owners[at] >= 0 else None

    def find_all(self, addresses: npt.NDArray[np.uint64] | Sequence[int]) -> npt.NDArray[np.int64]:
        """For each address the index in `spans` of the one that holds it, or -1; [n] int64."""
        words = np.asarray(addresses, dtype=np.uint64)
        at = np.searchsorted(self._start_array, words, side="right") - 1
        return self._owner_array[at]

    def __len__(self) -> int:
        return len(self.spans)
