"""Who owns an address: named stretches of memory, looked up many at a time."""

from __future__ import annotations

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
        begins = np.array([span.address for span in self.spans], dtype=np.uint64)
        ends = begins + np.array([span.nbytes for span in self.spans], dtype=np.uint64)
        rank = np.array([ranks.get(span.kind, 0) for span in self.spans], dtype=np.int64)
        edges = np.unique(np.concatenate([begins, ends]))
        first, last = np.searchsorted(edges, begins).tolist(), np.searchsorted(edges, ends).tolist()
        owners = np.full(len(edges), -1, dtype=np.int64)
        given = np.arange(len(self.spans))
        for at in np.lexsort((-given, begins - ends, begins, rank)).tolist():  # who answers is written last
            owners[first[at] : last[at]] = at
        changes = np.flatnonzero(np.diff(owners, prepend=-2))
        self._start_array = edges[changes]
        self._owner_array = np.append(owners[changes], -1)
        self._starts: list[int] = self._start_array.tolist()
        self._owners: list[int] = self._owner_array.tolist()

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
