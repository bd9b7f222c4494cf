"""Seats: the state of each running request, in buffers whose addresses never change.

A request takes a seat when it is admitted and keeps it to its end, so that finishing, splitting a batch and changing
rungs move no state. The step reads and advances the seats on the device; the CPU writes a seat only at admission.

All fields lie in one int32 matrix ``[fields, seats + 1]`` (float fields are views of the same bits), so that one copy
admits any number of requests. The last seat is the null seat: it is never alive, and padded rows point at it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mainspring.engine.settings import STOP_IDS_WIDTH
from mainspring.graphs import FixedBuffers

#: Takes a host array to the device without waiting for it.
Upload = Callable[[np.ndarray], torch.Tensor]

#: Fields that the step advances itself; they come first, so that one write puts all of them back.
ADVANCED = ("token_ids", "positions", "alive", "remaining", "min_remaining")
#: Fields that stay as they were written at admission.
CONSTANT_INTS = ("top_k", "choices", "seed_low", "seed_high")
CONSTANT_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
#: Bits that say what the request asks of the sampling beyond these (``Asks``).
ASKS = ("asks",)
FIELDS = ADVANCED + CONSTANT_INTS + CONSTANT_FLOATS + ASKS
STOP_IDS_FROM = len(FIELDS)
NUM_ROWS = STOP_IDS_FROM + STOP_IDS_WIDTH


@dataclass(frozen=True)
class SeatState:
    """What a seat holds when its request is about to sample its next token.

    ``token_id`` and ``position`` are of the last known token, whose KV entry the sampled token's step has written or
    will write; ``remaining`` is how many tokens the request may still get, ``min_remaining`` how many it must still
    get before a stop id counts.
    """

    token_id: int
    position: int
    remaining: int
    min_remaining: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    stop_ids: Sequence[int] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    asks: int = 0

    def column(self) -> np.ndarray:
        """The state as one int32 column ``[NUM_ROWS]`` of the seat matrix."""
        column = np.full(NUM_ROWS, -1, dtype=np.int32)
        seed = self.seed & 0xFFFFFFFFFFFFFFFF
        halves = np.array([seed & 0xFFFFFFFF, seed >> 32], dtype=np.uint32).view(np.int32)
        column[:STOP_IDS_FROM] = [
            self.token_id,
            self.position,
            1,
            self.remaining,
            self.min_remaining,
            self.top_k,
            self.choice,
            *halves,
            *np.array([getattr(self, name) for name in CONSTANT_FLOATS], dtype=np.float32).view(np.int32),
            self.asks,
        ]
        column[STOP_IDS_FROM : STOP_IDS_FROM + len(self.stop_ids)] = self.stop_ids
        return column


class SeatTable:
    """The seat matrix, its fields by name, and the block tables, all registered in ``buffers``.

    Attributes named like the fields are ``[seats + 1]`` views; ``stop_ids`` is ``[STOP_IDS_WIDTH, seats + 1]``;
    ``block_tables`` is ``[seats + 1, max_blocks]`` int32, 0 (the null block) where nothing is allocated.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    alive: torch.Tensor
    remaining: torch.Tensor
    min_remaining: torch.Tensor
    top_k: torch.Tensor
    choices: torch.Tensor
    seed_low: torch.Tensor
    seed_high: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition_penalty: torch.Tensor
    presence_penalty: torch.Tensor
    frequency_penalty: torch.Tensor
    asks: torch.Tensor

    def __init__(self, buffers: FixedBuffers, num_seats: int, max_blocks: int) -> None:
        self.num_seats = num_seats
        self.max_blocks = max_blocks
        self.null_seat = num_seats
        self.matrix = buffers.allocate("seats", (NUM_ROWS, num_seats + 1), torch.int32)
        self.advanced = self.matrix[: len(ADVANCED)]
        for row, name in enumerate(FIELDS):
            view = self.matrix[row]
            setattr(self, name, view.view(torch.float32) if name in CONSTANT_FLOATS else view)
        self.stop_ids = self.matrix[STOP_IDS_FROM:]
        self.block_tables = buffers.allocate("block_tables", (num_seats + 1, max_blocks), torch.int32)
        self._tables_host = np.zeros((num_seats + 1, max_blocks), dtype=np.int32)

    def write(self, states: Sequence[tuple[int, SeatState]], upload: Upload) -> None:
        """Put ``(seat, state)`` pairs in place, with one copy and one scatter for all of them."""
        if not states:
            return
        seats = upload(np.array([seat for seat, _ in states], dtype=np.int64))
        columns = upload(np.stack([state.column() for _, state in states], axis=1))
        self.matrix.index_copy_(1, seats, columns)

    def write_tables(self, writes: Sequence[tuple[int, int, int]], upload: Upload) -> None:
        """Apply ``(seat, column, block)`` writes. A write to column 0 begins a new life of its seat: the rest of the
        row is cleared with it, so that no block of an earlier request stays behind."""
        if not writes:
            return
        fresh = {seat for seat, column, _ in writes if column == 0}
        for seat in fresh:
            self._tables_host[seat] = 0
        for seat, column, block in writes:
            self._tables_host[seat, column] = block
        if fresh:
            order = sorted(fresh)
            self.block_tables.index_copy_(0, upload(np.array(order, dtype=np.int64)), upload(self._tables_host[order]))
        grown = [write for write in writes if write[0] not in fresh]
        if grown:
            flat = upload(np.array([seat * self.max_blocks + column for seat, column, _ in grown], dtype=np.int64))
            blocks = upload(np.array([block for _, _, block in grown], dtype=np.int32))
            self.block_tables.view(-1).index_copy_(0, flat, blocks)
