"""The step: everything that one token needs, from its embedding to the state for the next one.

The same code serves the recorded decode step and the prefill step. The decode step takes one input, ``rows`` (which
seat each row serves, -1 for padding), and works on fixed buffers otherwise, so that it can be recorded once per rung
and repeated without the CPU: N replays decode N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mainspring.engine.seats import SeatTable
from mainspring.graphs import FixedBuffers
from mainspring.kernels.seats import EXHAUSTED, IDLE, RUNNING, STOPPED, advance_seats, gather_seats
from mainspring.models.decoder import Decoder
from mainspring.models.inputs import ModelInputs

__all__ = ["EXHAUSTED", "IDLE", "RING_STEPS", "RUNNING", "STOPPED", "Sampler", "Step", "StepRecord", "TokenRing"]

#: Steps whose tokens stay readable on the device, for comparing and finding faults.
RING_STEPS = 64

KVCache = Sequence[tuple[torch.Tensor, torch.Tensor]]


class Sampler(Protocol):
    """Chooses a token for each row from its logits and its seat's parameters."""

    def __call__(self, logits: torch.Tensor, seats: torch.Tensor) -> torch.Tensor:
        """``logits`` ``[b, vocab]``, may be changed in place; ``seats`` ``[b]`` int64. Returns ``[b]`` token ids."""
        ...

    def adjust(self, logits: torch.Tensor, seats: torch.Tensor) -> None:
        """Apply biases, penalties and masks to ``logits`` ``[b, vocab]`` in place; a call does so by itself."""
        ...

    def held(self, seats: torch.Tensor) -> torch.Tensor | None:
        """``[b]`` bool: the rows for which the step ends with their logits, since the CPU is to change those; None
        where there can be none."""
        ...

    def note(self, logits: torch.Tensor, seats: torch.Tensor, tokens: torch.Tensor, runs: torch.Tensor) -> None:
        """Take over the ``tokens`` ``[b]`` chosen in the rows that run; ``logits`` are the model's own."""
        ...

    def record(self, plain: torch.Tensor) -> torch.Tensor:
        """Where the step leaves what the CPU reads of it: ``plain``, or a buffer with more columns."""
        ...


class TokenRing:
    """Where each step leaves its tokens: ``[RING_STEPS, rows, 2]`` int32 (token id or -1, what became of the row)."""

    def __init__(self, buffers: FixedBuffers, max_rows: int) -> None:
        self.entries = buffers.allocate("token_ring", (RING_STEPS, max_rows, 2), torch.int32)
        self.step = buffers.allocate("step_index", (1,), torch.int64)
        self.clear()

    def clear(self) -> None:
        """Set every entry to what an idle row writes, and begin again at the first."""
        self.entries.copy_(torch.tensor([-1, IDLE], dtype=torch.int32, device="cpu"))
        self.step.zero_()


class StepRecord:
    """What a step leaves for the CPU, and what the CPU tells a step that repeats itself; all at fixed addresses.

    ``rows`` is ``[rows, 2]`` int32: (token id or -1, its status) of each row of the latest step; ``go_on`` ``[1]``
    int32 says whether the step may be repeated as it is, by ``policy`` ``[2]`` int64 (see ``kernels.seats``).
    """

    def __init__(self, buffers: FixedBuffers, max_rows: int) -> None:
        self.rows = buffers.allocate("step_record", (max_rows, 2), torch.int32)
        self.go_on = buffers.allocate("go_on", (1,), torch.int32)
        self.policy = buffers.allocate("loop_policy", (2,), torch.int64)


@dataclass(frozen=True)
class Step:
    """One model's step over fixed buffers.

    ``logits`` is ``[max rows, vocab]`` in the model's dtype: the one large buffer that a step leaves behind.
    """

    model: Decoder
    kv_cache: KVCache
    seats: SeatTable
    ring: TokenRing
    record: StepRecord
    logits: torch.Tensor
    block_size: int

    def decode(self, rows: torch.Tensor, sampler: Sampler) -> None:
        """Decode one token for each row: ``rows`` ``[b]`` int32, the seat of each row, -1 for padding.

        A row does nothing when its request has ended, or when no KV block is allocated for its position: its KV slot
        is -1, its length 0, its block table the null block, and it emits the token -1.
        """
        table = self.seats
        seats, runs, token_ids, positions, slots, seq_lens, block_tables = gather_seats(
            rows, table.advanced, table.block_tables, self.block_size
        )
        inputs = ModelInputs(token_ids, positions, slots, block_tables, seq_lens, query_starts=None)
        self.finish(self.model(inputs, self.kv_cache), seats, runs, sampler)

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        """Run prompt chunks, writing their KV; the hidden states ``[T, hidden]`` of all their tokens."""
        hidden: torch.Tensor = self.model(inputs, self.kv_cache)
        return hidden

    def begin(self, hidden: torch.Tensor, last: torch.Tensor, seats: torch.Tensor, sampler: Sampler) -> None:
        """Choose the first token of each prompt that a prefill step completed.

        ``last`` ``[m]`` are the indices in ``hidden`` of the tokens that complete a prompt and ``seats`` ``[m]`` their
        requests' seats; ``m`` may be 0. Rows of the null seat are padding.
        """
        if len(last):
            self.finish(hidden[last], seats, self.seats.alive[seats] != 0, sampler)

    def finish(self, hidden: torch.Tensor, seats: torch.Tensor, runs: torch.Tensor, sampler: Sampler) -> None:
        """From the last hidden states ``[b, hidden]`` to tokens in the ring and seats ready for the next step."""
        logits = self.model.compute_logits(hidden, out=self.logits[: hidden.shape[0]])
        held = sampler.held(seats)
        self.settle(logits, logits, seats, runs if held is None else runs & ~held, sampler)

    def settle(
        self, logits: torch.Tensor, raw: torch.Tensor, seats: torch.Tensor, runs: torch.Tensor, sampler: Sampler
    ) -> None:
        """From logits ``[b, vocab]`` to tokens in the ring and seats ready for the next step.

        ``raw`` are the model's own logits, the same tensor unless the CPU changed them.
        """
        table, ring, record = self.seats, self.ring, self.record
        tokens = sampler(logits, seats)
        sampler.note(raw, seats, tokens, runs)
        advance_seats(
            tokens,
            seats,
            runs,
            table.advanced,
            table.stop_ids,
            ring.entries,
            ring.step,
            sampler.record(record.rows),
            record.go_on,
            record.policy,
        )
