"""The arrays of a prefill step: several prompts' chunks, one after the other."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Generic, TypeVar

import numpy as np
import torch

from mainspring.engine.plan import PrefillPlan
from mainspring.engine.request_state import seat_of
from mainspring.engine.seats import SeatTable, Upload
from mainspring.models.inputs import ModelInputs

#: Columns of ``PrefillBatch.rows``: its parts in order.
BATCH_WIDTH = 8
COMPLETED_SEATS = 7

ArrayT = TypeVar("ArrayT", np.ndarray, torch.Tensor)


@dataclass(frozen=True)
class PrefillBatch(Generic[ArrayT]):
    """``n`` chunks of ``T`` tokens together, of which ``m`` complete a prompt; all int64, on the host or the device.

    ``token_ids``, ``positions`` and ``token_seats`` are ``[T]``, ``seats`` and ``seq_lens`` (after the chunk) ``[n]``,
    ``query_starts`` ``[n + 1]``; ``last`` ``[m]`` are the indices of the tokens that complete a prompt, and
    ``completed_seats`` ``[m]`` their seats.
    """

    token_ids: ArrayT
    positions: ArrayT
    token_seats: ArrayT
    seats: ArrayT
    query_starts: ArrayT
    seq_lens: ArrayT
    last: ArrayT
    completed_seats: ArrayT

    @staticmethod
    def of(plan: PrefillPlan) -> PrefillBatch[np.ndarray]:
        """The arrays of a plan, on the host."""
        tokens: list[int] = []
        positions: list[int] = []
        token_seats: list[int] = []
        last: list[int] = []
        for chunk in plan.chunks:
            end = chunk.start + chunk.length
            tokens += chunk.request.token_span(chunk.start, end)
            positions += range(chunk.start, end)
            token_seats += [seat_of(chunk.request)] * chunk.length
            if chunk.is_last:
                last.append(len(tokens) - 1)
        parts = (
            tokens,
            positions,
            token_seats,
            [seat_of(chunk.request) for chunk in plan.chunks],
            list(accumulate((chunk.length for chunk in plan.chunks), initial=0)),
            [chunk.start + chunk.length for chunk in plan.chunks],
            last,
            [seat_of(chunk.request) for chunk in plan.chunks if chunk.is_last],
        )
        return PrefillBatch(*(np.asarray(part, dtype=np.int64) for part in parts))

    def rows(self: PrefillBatch[np.ndarray]) -> np.ndarray:
        """All of it as one matrix ``[T, BATCH_WIDTH]``, a row for each token: a part shorter than ``T`` lies in the
        first rows, followed by -1. The starts of the chunks are told by their ends."""
        parts = [getattr(self, field.name) for field in fields(self)]
        parts[4] = self.query_starts[1:]
        rows = np.full((len(self.token_ids), BATCH_WIDTH), -1, dtype=np.int64)
        for column, part in enumerate(parts):
            rows[: len(part), column] = part
        return rows

    @staticmethod
    def of_rows(rows: torch.Tensor, num_sequences: int, null_seat: int) -> PrefillBatch[torch.Tensor]:
        """The batch in the first columns of such a matrix, padded with rows of -1: of ``num_sequences`` chunks,
        whatever it holds.

        Padding belongs to the null seat: tokens behind the last chunk, chunks without a token and a key, and rows that
        complete no prompt. Nothing depends on the contents but the contents, so that it can be recorded.
        """
        columns = rows[:, :BATCH_WIDTH].t().contiguous()
        values = columns.clamp(min=0)
        seats = torch.where(columns < 0, null_seat, columns)
        ends = columns[4, :num_sequences]
        ends = torch.where(ends < 0, ends.amax().clamp(min=0), ends)
        return PrefillBatch(
            token_ids=values[0],
            positions=values[1],
            token_seats=seats[2],
            seats=seats[3, :num_sequences],
            query_starts=torch.nn.functional.pad(ends, (1, 0)),
            seq_lens=values[5, :num_sequences],
            last=values[6, :num_sequences],
            completed_seats=seats[COMPLETED_SEATS, :num_sequences],
        )

    def inputs(self: PrefillBatch[torch.Tensor], table: SeatTable, block_size: int) -> ModelInputs:
        """What the model is given: KV slots and block tables are looked up. A token of the null seat writes nothing."""
        blocks = table.block_tables[self.token_seats, self.positions // block_size].to(torch.int64)
        owned = (blocks != 0) & (self.token_seats != table.null_seat)
        return ModelInputs(
            token_ids=self.token_ids,
            positions=self.positions,
            slots=torch.where(owned, blocks * block_size + self.positions % block_size, -1),
            block_tables=table.block_tables[self.seats],
            seq_lens=self.seq_lens.to(torch.int32),
            query_starts=self.query_starts.to(torch.int32),
        )

    def to_device(self: PrefillBatch[np.ndarray], upload: Upload) -> PrefillBatch[torch.Tensor]:
        """The same on the device, taken there in one copy."""
        parts = [getattr(self, field.name) for field in fields(self)]
        packed = upload(np.concatenate(parts))
        return PrefillBatch(*torch.split(packed, [len(part) for part in parts]))
