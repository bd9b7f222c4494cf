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
from mainspring.models.decoder import Decoder
from mainspring.models.inputs import ModelInputs

#: What became of a row in a step, written beside its token.
IDLE, RUNNING, STOPPED, EXHAUSTED = 0, 1, 2, 3
#: Steps whose tokens stay readable on the device; the CPU reads each at most a few steps later.
RING_STEPS = 64

KVCache = Sequence[tuple[torch.Tensor, torch.Tensor]]


class Sampler(Protocol):
    """Chooses a token for each row from its logits and its seat's parameters."""

    def __call__(self, logits: torch.Tensor, seats: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``logits`` ``[b, vocab]``, may be changed in place; ``seats`` ``[b]`` int64; ``positions`` ``[b]``, the
        absolute position of the token to be chosen. Returns ``[b]`` token ids."""
        ...

    def held(self, seats: torch.Tensor) -> torch.Tensor | None:
        """``[b]`` bool: the rows for which the step ends with their logits, since the CPU is to change those; None
        where there can be none."""
        ...

    def note(
        self, logits: torch.Tensor, seats: torch.Tensor, tokens: torch.Tensor, runs: torch.Tensor, entry: torch.Tensor
    ) -> None:
        """Take over the ``tokens`` ``[b]`` chosen in the rows that run; ``logits`` are the model's own, and ``entry``
        ``[1]`` is the step's entry of the ring."""
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

    @property
    def entry(self) -> torch.Tensor:
        """``[1]`` int64: the entry that the next step writes."""
        return self.step % RING_STEPS

    def write(self, tokens: torch.Tensor, status: torch.Tensor, advance: torch.Tensor) -> None:
        """Write one step's ``[b]`` tokens and statuses to the ring's next entry and move on by ``advance`` (0 or 1)."""
        entry = torch.stack((tokens, status), dim=1)
        self.entries[:, : entry.shape[0]].index_copy_(0, self.entry, entry.unsqueeze(0))
        self.step.add_(advance)


@dataclass(frozen=True)
class Step:
    """One model's step over fixed buffers.

    ``logits`` is ``[max rows, vocab]`` in the model's dtype: the one large buffer that a step leaves behind.
    """

    model: Decoder
    kv_cache: KVCache
    seats: SeatTable
    ring: TokenRing
    logits: torch.Tensor
    block_size: int

    def decode(self, rows: torch.Tensor, sampler: Sampler) -> None:
        """Decode one token for each row: ``rows`` ``[b]`` int32, the seat of each row, -1 for padding.

        A row does nothing when its request has ended, or when no KV block is allocated for its position: its KV slot
        is -1, its length 0, its block table the null block, and it emits the token -1.
        """
        table = self.seats
        seats = torch.where(rows < 0, table.null_seat, rows).to(torch.int64)
        positions = table.positions[seats].to(torch.int64)
        blocks = table.block_tables[seats]
        column = torch.div(positions, self.block_size, rounding_mode="floor").clamp(max=table.max_blocks - 1)
        block = blocks.gather(1, column.unsqueeze(1)).squeeze(1)
        in_table = positions < table.max_blocks * self.block_size
        runs = (table.alive[seats] != 0) & (block != 0) & in_table
        slots = torch.where(runs, block * self.block_size + positions % self.block_size, -1)
        hidden = self.model(
            ModelInputs(
                token_ids=torch.where(runs, table.token_ids[seats], 0).to(torch.int64),
                positions=torch.where(runs, positions, 0),
                slots=slots.to(torch.int64),
                block_tables=torch.where(runs.unsqueeze(1), blocks, 0),
                seq_lens=torch.where(runs, positions + 1, 0).to(torch.int32),
                query_starts=None,
            ),
            self.kv_cache,
        )
        self.finish(hidden, seats, runs, sampler)

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        """Run prompt chunks, writing their KV; the hidden states ``[T, hidden]`` of all their tokens."""
        hidden: torch.Tensor = self.model(inputs, self.kv_cache)
        return hidden

    def begin(self, hidden: torch.Tensor, last: torch.Tensor, seats: torch.Tensor, sampler: Sampler) -> None:
        """Choose the first token of each prompt that a prefill step completed.

        ``last`` ``[m]`` are the indices in ``hidden`` of the tokens that complete a prompt and ``seats`` ``[m]`` their
        requests' seats; ``m`` may be 0.
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
        table = self.seats
        before = table.advanced[:, seats]
        _, positions, alive, remaining, min_remaining = before
        chosen = sampler(logits, seats, positions + 1)
        sampler.note(raw, seats, chosen, runs, self.ring.entry)
        sampled = chosen.to(torch.int32)
        may_stop = min_remaining <= 0
        stops = (table.stop_ids[:, seats] == sampled).any(dim=0) & may_stop
        exhausted = remaining <= 1
        status = torch.where(stops, STOPPED, torch.where(exhausted, EXHAUSTED, RUNNING))
        goes_on = (~stops & ~exhausted).to(torch.int32)
        after = torch.stack((sampled, positions + 1, alive * goes_on, remaining - 1, min_remaining - 1))
        table.advanced.index_copy_(1, seats, torch.where(runs, after, before))
        # A step of padding alone, as when it is recorded, leaves the ring where it is.
        has_rows = (seats != table.null_seat).any()
        self.ring.write(torch.where(runs, sampled, -1), torch.where(runs, status, IDLE).to(torch.int32), has_rows)
