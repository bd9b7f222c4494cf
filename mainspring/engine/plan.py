"""What the scheduler asks the runner to launch next: one prefill step or one decode step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mainspring.engine.request import Request


class TableWrite(NamedTuple):
    """One entry of the device's block tables that must hold ``block_id`` before the step is launched."""

    seat: int
    column: int
    block_id: int


@dataclass(frozen=True)
class PrefillChunk:
    """Compute positions ``start`` .. ``start + length`` - 1 of a request; the last chunk samples a token."""

    request: Request
    start: int
    length: int
    is_last: bool


@dataclass(frozen=True)
class PrefillPlan:
    """A prefill step: chunks of one or several requests, together at most ``max_num_batched_tokens`` long.

    A chunk may read, through the prefix cache, blocks that an earlier chunk of the same plan writes. So the
    runner writes the KV of all chunks of a layer before that layer's attention, or runs the chunks in order.
    """

    chunks: list[PrefillChunk]
    table_writes: list[TableWrite]

    @property
    def num_tokens(self) -> int:
        """Tokens in all chunks."""
        return sum(chunk.length for chunk in self.chunks)


@dataclass(frozen=True)
class DecodePlan:
    """A decode step: one token for each request, oldest first."""

    requests: list[Request]
    table_writes: list[TableWrite]


@dataclass(frozen=True)
class Reservation:
    """Blocks reserved for ``steps`` further decode steps (a request with less budget left stops before)."""

    steps: int
    table_writes: list[TableWrite]
