"""The arrays of a prefill step: several prompts' chunks, one after the other."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Generic, TypeVar

import numpy as np
import torch

from mainspring.engine.plan import PrefillPlan
from mainspring.engine.request_state import seat_of
from mainspring.engine.seats import Upload

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

    def to_device(self: PrefillBatch[np.ndarray], upload: Upload) -> PrefillBatch[torch.Tensor]:
        """The same on the device, taken there in one copy."""
        parts = [getattr(self, field.name) for field in fields(self)]
        packed = upload(np.concatenate(parts))
        return PrefillBatch(*torch.split(packed, [len(part) for part in parts]))
