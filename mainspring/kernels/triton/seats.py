"""Triton kernels of :mod:`mainspring.kernels.seats`."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mainspring.kernels.triton import pdl
from mainspring.kernels.triton.pdl import pdl_launch_dependents, pdl_wait

_TABLE_BLOCK = 1024
_ROWS = 64


@triton.jit
def _gather_kernel(
    rows_ptr, state_ptr, tables_ptr,
    seats_out, runs_out, token_ids_out, positions_out, slots_out, lengths_out, tables_out,
    num_seats, state_stride, table_stride, max_blocks,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    row = tl.program_id(0)
    part = tl.program_id(1)
    seat = tl.load(rows_ptr + row)
    seat = tl.where(seat < 0, num_seats - 1, seat).to(tl.int64)
    token_id = tl.load(state_ptr + seat)
    position = tl.load(state_ptr + state_stride + seat)
    alive = tl.load(state_ptr + 2 * state_stride + seat)
    table = tables_ptr + seat * table_stride
    columns = part * BLOCK + tl.arange(0, BLOCK)
    entries = tl.load(table + columns, mask=columns < max_blocks, other=0)
    column = tl.minimum(position // BLOCK_SIZE, max_blocks - 1)
    block = tl.load(table + column)
    runs = (alive != 0) & (block != 0) & (position < max_blocks * BLOCK_SIZE)
    out = tables_out + row.to(tl.int64) * max_blocks + columns
    tl.store(out, tl.where(runs, entries, 0), mask=columns < max_blocks)
    if part == 0:
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(seats_out + row, seat)
        tl.store(runs_out + row, runs.to(tl.int8))
        tl.store(token_ids_out + row, tl.where(runs, token_id, 0).to(tl.int64))
        tl.store(positions_out + row, tl.where(runs, position, 0).to(tl.int64))
        tl.store(slots_out + row, tl.where(runs, slot, -1))
        tl.store(lengths_out + row, tl.where(runs, position + 1, 0))


def gather_seats(rows: Tensor, state: Tensor, block_tables: Tensor, block_size: int) -> tuple[Tensor, ...]:
    """See :func:`mainspring.kernels.seats.gather_seats`."""
    batch, max_blocks = rows.shape[0], block_tables.shape[1]
    wide = rows.new_empty((4, batch), dtype=torch.int64)
    seats, token_ids, positions, slots = wide.unbind(0)
    lengths = rows.new_empty((batch,), dtype=torch.int32)
    runs = rows.new_empty((batch,), dtype=torch.bool)
    tables = block_tables.new_empty((batch, max_blocks))
    if batch:
        _gather_kernel[(batch, triton.cdiv(max_blocks, _TABLE_BLOCK))](
            rows, state, block_tables, seats, runs.view(torch.int8), token_ids, positions, slots, lengths, tables,
            state.shape[1], state.stride(0), block_tables.stride(0), max_blocks,
            BLOCK_SIZE=block_size, BLOCK=min(_TABLE_BLOCK, max(triton.next_power_of_2(max_blocks), 16)),
            **pdl.options(pdl.mode(rows.device)),
        )  # fmt: skip
    return seats, runs, token_ids, positions, slots, lengths, tables


@triton.jit
def _advance_kernel(
    tokens_ptr, seats_ptr, runs_ptr, state_ptr, stop_ids_ptr, ring_ptr, step_ptr, record_ptr, go_on_ptr, policy_ptr,
    batch, num_seats, state_stride, stop_stride, ring_stride, ring_steps, record_stride,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    step = tl.load(step_ptr)
    until = tl.load(policy_ptr)
    leave_on_end = tl.load(policy_ptr + 1)
    entry = ring_ptr + (step % ring_steps) * ring_stride
    stops_at = tl.arange(0, WIDE)
    real_rows = tl.zeros((ROWS,), tl.int32)
    live_rows = tl.zeros((ROWS,), tl.int32)
    ended_rows = tl.zeros((ROWS,), tl.int32)
    for start in range(0, batch, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = row < batch
        seat = tl.load(seats_ptr + row, mask=inside, other=num_seats - 1)
        runs = tl.load(runs_ptr + row, mask=inside, other=0) != 0
        token = tl.load(tokens_ptr + row, mask=inside, other=0).to(tl.int32)
        real_rows += (seat != num_seats - 1).to(tl.int32)
        state = state_ptr + seat
        position = tl.load(state + state_stride, mask=runs, other=0)
        alive = tl.load(state + 2 * state_stride, mask=runs, other=0)
        remaining = tl.load(state + 3 * state_stride, mask=runs, other=0)
        min_remaining = tl.load(state + 4 * state_stride, mask=runs, other=0)
        stop_id = tl.load(
            stop_ids_ptr + stops_at[:, None] * stop_stride + seat[None, :],
            mask=(stops_at < WIDTH)[:, None] & runs[None, :],
            other=-1,
        )
        same = (stop_id == token[None, :]) & (stops_at < WIDTH)[:, None]
        stops = (tl.max(same.to(tl.int32), 0) != 0) & (min_remaining <= 0)
        exhausted = remaining <= 1
        status = tl.where(stops, 2, tl.where(exhausted, 3, 1))
        ends = runs & (stops | exhausted)
        live_rows += (runs & (ends == 0)).to(tl.int32)
        ended_rows += ends.to(tl.int32)
        emitted = tl.where(runs, token, -1)
        became = tl.where(runs, status, 0)
        tl.store(entry + 2 * row, emitted, mask=inside)
        tl.store(entry + 2 * row + 1, became, mask=inside)
        tl.store(record_ptr + row * record_stride, emitted, mask=inside)
        tl.store(record_ptr + row * record_stride + 1, became, mask=inside)
        tl.store(state, token, mask=runs)
        tl.store(state + state_stride, position + 1, mask=runs)
        tl.store(state + 2 * state_stride, tl.where(stops | exhausted, 0, alive), mask=runs)
        tl.store(state + 3 * state_stride, remaining - 1, mask=runs)
        tl.store(state + 4 * state_stride, min_remaining - 1, mask=runs)
    step += tl.where(tl.sum(real_rows, 0) > 0, 1, 0)
    tl.store(step_ptr, step)
    leaves = (tl.sum(ended_rows, 0) > 0) & (leave_on_end != 0)
    goes_on = (tl.sum(live_rows, 0) > 0) & (leaves == 0) & (step < until)
    tl.store(go_on_ptr, goes_on.to(tl.int32))


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
    """See :func:`mainspring.kernels.seats.advance_seats`; one program of one warp, which takes the rows in turn.

    More warps would hold copies of a row's state, and one could read what another has already moved on.
    """
    batch, width = tokens.shape[0], stop_ids.shape[0]
    if batch:
        _advance_kernel[(1,)](
            tokens, seats, runs.view(torch.int8), state, stop_ids, ring, step, record, go_on, policy,
            batch, state.shape[1], state.stride(0), stop_ids.stride(0), ring.stride(0), ring.shape[0], record.stride(0),
            WIDTH=width, WIDE=triton.next_power_of_2(width), ROWS=_ROWS, num_warps=1,
            **pdl.options(pdl.mode(tokens.device)),
        )  # fmt: skip


@triton.jit
def _embed_kernel(token_ids_ptr, weight_ptr, out_ptr, size, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token_id = tl.load(token_ids_ptr + row)
    values = tl.load(weight_ptr + token_id * stride + columns, mask=columns < size, other=0.0)
    tl.store(out_ptr + row * size + columns, values, mask=columns < size)


def embed(token_ids: Tensor, weight: Tensor) -> Tensor:
    """See :func:`mainspring.kernels.seats.embed`.

    An ordinary launch: everything in front is done and visible before it starts, so that the kernels behind it may read
    what lies in front of it (``rope_and_decode_attention``, ``settled``) before they wait.
    """
    count, size = token_ids.shape[0], weight.shape[1]
    out = weight.new_empty((count, size))
    if count:
        block = min(1024, triton.next_power_of_2(size))
        _embed_kernel[(count, triton.cdiv(size, block))](
            token_ids, weight, out, size, weight.stride(0), BLOCK=block, PDL=pdl.OFF
        )
    return out
