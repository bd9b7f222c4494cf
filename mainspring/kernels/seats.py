"""What a decode step does beside the model: look up each row's state, and move it on by the chosen token.

State lies in one matrix ``[5 or more, seats]`` int32 whose first rows are, in this order, the last token id, its
position, whether the seat is alive, how many tokens it may still get, and how many more it must get before a stop id
counts. The last seat is the null seat of padded rows, which is never alive.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mainspring.kernels.library import register

#: What became of a row in a step.
IDLE, RUNNING, STOPPED, EXHAUSTED = 0, 1, 2, 3


def gather_seats_reference(
    rows: Tensor, state: Tensor, block_tables: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What :func:`gather_seats` computes, in plain torch."""
    seats = torch.where(rows < 0, state.shape[1] - 1, rows).to(torch.int64)
    token_ids, positions, alive = state[:3].index_select(1, seats).unbind(0)
    positions = positions.to(torch.int64)
    blocks = block_tables.index_select(0, seats)
    max_blocks = blocks.shape[1]
    column = torch.div(positions, block_size, rounding_mode="floor").clamp(max=max_blocks - 1)
    block = blocks.gather(1, column.unsqueeze(1)).squeeze(1)
    in_table = positions < max_blocks * block_size
    runs = (alive != 0) & (block != 0) & in_table
    return (
        seats,
        runs,
        torch.where(runs, token_ids, 0).to(torch.int64),
        torch.where(runs, positions, 0),
        torch.where(runs, block * block_size + positions % block_size, -1).to(torch.int64),
        torch.where(runs, positions + 1, 0).to(torch.int32),
        torch.where(runs.unsqueeze(1), blocks, 0),
    )


def advance_seats_reference(
    tokens: Tensor,
    seats: Tensor,
    runs: Tensor,
    state: Tensor,
    stop_ids: Tensor,
    ring: Tensor,
    step: Tensor,
    record: Tensor,
    go_on: Tensor,
    policy: Tensor,
) -> None:
    """What :func:`advance_seats` does, in plain torch."""
    advanced = state[:5]
    before = advanced.index_select(1, seats)
    _, positions, alive, remaining, min_remaining = before.unbind(0)
    sampled = tokens.to(torch.int32)
    may_stop = min_remaining <= 0
    stops = (stop_ids.index_select(1, seats) == sampled).any(dim=0) & may_stop
    exhausted = remaining <= 1
    status = torch.where(stops, STOPPED, torch.where(exhausted, EXHAUSTED, RUNNING))
    goes_on = (~stops & ~exhausted).to(torch.int32)
    after = torch.stack((sampled, positions + 1, alive * goes_on, remaining - 1, min_remaining - 1))
    advanced.index_copy_(1, seats, torch.where(runs, after, before))
    entry = torch.stack((torch.where(runs, sampled, -1), torch.where(runs, status, IDLE).to(torch.int32)), dim=1)
    ring[:, : entry.shape[0]].index_copy_(0, step % ring.shape[0], entry.unsqueeze(0))
    record[: entry.shape[0], :2].copy_(entry)
    # A step of padding alone, as when it is recorded, leaves the ring where it is.
    step.add_((seats != state.shape[1] - 1).any())
    live = (runs & (goes_on != 0)).any()
    ended = (runs & (goes_on == 0)).any()
    until, leave_on_end = policy[:2].unbind(0)
    go_on.copy_(live & ~(ended & (leave_on_end != 0)) & (step < until))


_gather_seats = register(
    "gather_seats(Tensor rows, Tensor state, Tensor block_tables, int block_size) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    cpu=gather_seats_reference,
    cuda="mainspring.kernels.triton.seats:gather_seats",
    plain=gather_seats_reference,
)
_advance_seats = register(
    "advance_seats(Tensor tokens, Tensor seats, Tensor runs, Tensor(a!) state, Tensor stop_ids, Tensor(b!) ring, "
    "Tensor(c!) step, Tensor(d!) record, Tensor(e!) go_on, Tensor policy) -> ()",
    cpu=advance_seats_reference,
    cuda="mainspring.kernels.triton.seats:advance_seats",
    plain=advance_seats_reference,
)
_embed = register(
    "embed(Tensor token_ids, Tensor weight) -> Tensor",
    cpu=lambda token_ids, weight: F.embedding(token_ids, weight),
    cuda="mainspring.kernels.triton.seats:embed",
    plain=lambda token_ids, weight: F.embedding(token_ids, weight),
)


def gather_seats(
    rows: Tensor, state: Tensor, block_tables: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Look up what each row of a step needs to know.

    A row runs when its seat is alive and a block is allocated for its position; the others get token 0, position 0,
    slot -1, length 0 and a block table of zeros, so that they do nothing.

    Args:
        rows: ``[b]`` int32, the seat of each row, -1 for padding.
        state: ``[5 or more, seats]`` int32, see above; rows are contiguous.
        block_tables: ``[seats, max_blocks]`` int32, 0 where nothing is allocated.
        block_size: tokens of a block.

    Returns:
        ``seats`` ``[b]`` int64 (the null seat for padding), ``runs`` ``[b]`` bool, ``token_ids``, ``positions`` and
        ``slots`` ``[b]`` int64, ``seq_lens`` ``[b]`` int32 (the row's token included), ``block_tables``
        ``[b, max_blocks]`` int32; all new.
    """
    seats, runs, token_ids, positions, slots, lengths, tables = _gather_seats(rows, state, block_tables, block_size)
    return seats, runs, token_ids, positions, slots, lengths, tables


def advance_seats(
    tokens: Tensor,
    seats: Tensor,
    runs: Tensor,
    state: Tensor,
    stop_ids: Tensor,
    ring: Tensor,
    step: Tensor,
    record: Tensor,
    go_on: Tensor,
    policy: Tensor,
) -> None:
    """Move the seats of the rows that run on by their tokens, and note the tokens in the ring and in the record.

    A stop id ends a seat once no more tokens are owed, and so does its last allowed token. What is noted is
    (token id, status) of each row, (-1, ``IDLE``) for rows that do not run; ``step`` moves on by one unless every
    row is padding. ``go_on`` says whether the step may be repeated as it is: a row goes on, ``step`` has not reached
    ``until``, and no row ended just now where ``leave_on_end`` is set.

    Args:
        tokens: ``[b]`` int32 or int64.
        seats: ``[b]`` int64; a seat that is not the null seat must not occur twice.
        runs: ``[b]`` bool.
        state: ``[5 or more, seats]`` int32, see above; its first five rows are written.
        stop_ids: ``[width, seats]`` int32, -1 for none.
        ring: ``[steps, at least b, 2]`` int32; entry ``step % steps`` is written.
        step: ``[1]`` int64; written.
        record: ``[at least b, 2 or more]`` int32; the first two columns of the first ``b`` rows are written.
        go_on: ``[1]`` int32, written: 1 or 0.
        policy: ``[2]`` int64: ``until`` and ``leave_on_end``.
    """
    _advance_seats(tokens, seats, runs, state, stop_ids, ring, step, record, go_on, policy)


def embed(token_ids: Tensor, weight: Tensor) -> Tensor:
    """The embeddings ``[T, hidden]`` of ``token_ids`` ``[T]`` int64, rows of ``weight`` ``[vocab, hidden]``."""
    out: Tensor = _embed(token_ids, weight)
    return out
