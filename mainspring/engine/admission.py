"""What a prefill step puts in place before it runs: block tables, and the seats of the prompts that it completes.

An unrecorded step writes them with copies of their own. A recorded one brings them along in its input and puts them in
place itself, so that the CPU makes one copy for all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mainspring.engine.prefill_batch import BATCH_WIDTH, COMPLETED_SEATS
from mainspring.engine.seats import NUM_ROWS, SeatState, SeatTable

#: Columns of a recorded step's input behind those of the batch: a seat whose table begins anew, the place of a table's
#: entry and its block, the state of a completed prompt's seat.
FRESH, PLACES, BLOCKS, STATES = range(BATCH_WIDTH, BATCH_WIDTH + 4)
ROW_WIDTH = STATES + NUM_ROWS


@dataclass(frozen=True)
class Admission:
    """All int64, on the host.

    ``fresh`` ``[f]`` are the seats whose block tables begin anew, ``places`` ``[w]`` the flat places of entries in the
    block tables, ``blocks`` ``[w]`` what is written there, and ``states`` ``[m, NUM_ROWS]`` the columns of the seat
    matrix for the prompts that are completed, in the batch's order.
    """

    fresh: np.ndarray
    places: np.ndarray
    blocks: np.ndarray
    states: np.ndarray

    @staticmethod
    def of(writes: Sequence[tuple[int, int, int]], states: Sequence[SeatState], max_blocks: int) -> Admission:
        """For ``(seat, column, block)`` writes, as ``SeatTable.write_tables`` takes them, and the states of completed
        prompts; ``max_blocks`` is the width of the block tables."""
        parts = (
            [seat for seat, column, _ in writes if column == 0],
            [seat * max_blocks + column for seat, column, _ in writes],
            [block for _, _, block in writes],
            [state.column() for state in states],
        )
        return Admission(*(np.array(part, dtype=np.int64) for part in parts))

    def fits(self, rung: int, num_sequences: int) -> bool:
        """Whether an input of ``rung`` rows has room for it."""
        return len(self.places) <= rung and len(self.fresh) <= num_sequences

    def beside(self, batch: np.ndarray) -> np.ndarray:
        """The input of a recorded step: the rows of a batch ``[T, BATCH_WIDTH]`` with all of this beside them,
        ``[max(T, w), ROW_WIDTH]``; -1 where there is nothing."""
        rows = np.full((max(len(self.places), len(batch)), ROW_WIDTH), -1, dtype=np.int64)
        rows[: len(batch), :BATCH_WIDTH] = batch
        rows[: len(self.fresh), FRESH] = self.fresh
        rows[: len(self.places), PLACES] = self.places
        rows[: len(self.places), BLOCKS] = self.blocks
        if len(self.states):
            rows[: len(self.states), STATES:] = self.states
        return rows


def admit(rows: torch.Tensor, num_sequences: int, table: SeatTable) -> None:
    """Put in place what such an input, padded with rows of -1, holds. Padding writes noughts to the null seat."""
    columns = rows.t().contiguous()
    seats = torch.where(columns < 0, table.null_seat, columns)
    entries = table.block_tables.view(-1)
    table.block_tables.index_fill_(0, seats[FRESH, :num_sequences], 0)
    places = torch.where(columns[PLACES] < 0, table.null_seat * table.max_blocks, columns[PLACES])
    entries.index_copy_(0, places, columns[BLOCKS].clamp(min=0).to(torch.int32))
    completed = columns[COMPLETED_SEATS, :num_sequences] >= 0
    states = torch.where(completed, columns[STATES:, :num_sequences], 0).to(torch.int32)
    table.matrix.index_copy_(1, seats[COMPLETED_SEATS, :num_sequences], states)
