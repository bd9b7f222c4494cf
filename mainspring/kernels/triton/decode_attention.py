"""Triton kernel of paged decode attention with split keys (flash-decoding, Dao et al. 2023).

One program attends for one row, one key head (with all query heads that share it) and one split of the row's keys.
How many splits there are follows from the batch and the width of the block tables, so it is fixed when recorded; how
many of them have keys follows from the row's length, on the device, and programs without keys leave at once. The
splits take runs of keys in turn, so that where a split begins does not depend on the length. A row that one split
holds is finished by it; of several, the last to be done puts them together, always in the same order: they count
themselves in memory, and the last one leaves the counter at zero.

With ``FUSED`` the kernel also does what stands between the QKV product and attention: each program rotates (and
normalises) its own query heads, and the first split of a row does so with the new key, attends to it from registers
and writes key and value to the cache.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from mainspring.kernels.triton import pdl
from mainspring.kernels.triton.attention_plan import SplitPlan, plan_splits, ring_fits
from mainspring.kernels.triton.pdl import pdl_launch_dependents, pdl_wait
from mainspring.kernels.triton.sizes import next_power_of_2

_LOG2_E = tl.constexpr(1.4426950408889634)

#: Elements of the splits' sums that a warp puts together at a time: 128 registers of a thread.
COMBINED_AT_ONCE = 4096


@triton.jit
def _load_chunk(
    k_cache_ptr, v_cache_ptr, block, key, present, kv_head, columns, in_head,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Keys and values [BLOCK_N, BLOCK_D] of the keys ``key`` that are present, in the blocks ``block``."""
    entry = ((block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE) * NUM_KV_HEADS + kv_head) * HEAD_DIM
    # What lies beyond the keys may be anything, NaN too: it is not loaded.
    wanted = present[:, None] & in_head[None, :]
    k = tl.load(k_cache_ptr + entry[:, None] + columns[None, :], mask=wanted, other=0.0)
    v = tl.load(v_cache_ptr + entry[:, None] + columns[None, :], mask=wanted, other=0.0)
    return k, v


@triton.jit
def _attend(q, k, v, present, scale, highest, total, attended):
    """Take a chunk of keys, at least one of them present, into the running softmax.

    Keys and columns are the rows of the products and query heads their columns: of those the matrix units take as few
    as 8, so that a few heads waste little. ``attended`` is [BLOCK_D, BLOCK_H].
    """
    scores = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
    scores = tl.where(present[:, None], scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 0))
    weights = tl.exp2(scores - higher[None, :])
    kept = tl.exp2(highest - higher)
    total = total * kept + tl.sum(weights, 0)
    attended = attended * kept[None, :] + tl.dot(tl.trans(v), weights.to(v.dtype), input_precision="ieee")
    return higher, total, attended


@triton.jit
def _rotate(x, partner, gain, partner_gain, cos, sin, eps, HEAD_DIM: tl.constexpr, NORM: tl.constexpr):
    """Heads [H, BLOCK_D] in the model's dtype, normalised (where NORM) and rotated, rounded as separate steps are.

    ``partner`` holds at each column the one that it is rotated with, half a head away; ``sin`` is negative in the
    first half. Columns beyond the head are zero.
    """
    wide = x.to(tl.float32)
    other = partner.to(tl.float32)
    if NORM:
        scale = (1.0 / tl.sqrt_rn(tl.sum(wide * wide, 1) / HEAD_DIM + eps))[:, None]
        wide = ((wide * scale).to(x.dtype).to(tl.float32) * gain).to(x.dtype).to(tl.float32)
        other = ((other * scale).to(x.dtype).to(tl.float32) * partner_gain).to(x.dtype).to(tl.float32)
    return (wide * cos + other * sin).to(x.dtype)


@triton.jit
def _combine(
    partial_ptr, lse_ptr, out_ptr, head, used, num_splits, out_dtype: tl.constexpr,
    HEADS_PER_KV: tl.constexpr, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Put the first ``used`` splits of the heads from ``head`` on together and store them.

    Loads go past the first-level cache, which may hold what stood there before the other programs wrote.
    """
    splits = tl.arange(0, BLOCK_S)
    group = tl.arange(0, GROUP)
    columns = tl.arange(0, BLOCK_D)
    in_group = group < HEADS_PER_KV
    inside = in_group[:, None] & (columns < HEAD_DIM)[None, :]
    highest = tl.full((GROUP,), -1.0e38, tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    combined = tl.zeros((GROUP, BLOCK_D), tl.float32)
    for start in range(0, used, BLOCK_S):
        written = start + splits < used
        place = (head + group)[None, :] * num_splits + (start + splits)[:, None]
        there = written[:, None] & in_group[None, :]
        lse = tl.load(lse_ptr + place, mask=there, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            partial_ptr + place[:, :, None] * HEAD_DIM + columns[None, None, :],
            mask=written[:, None, None] & inside[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        higher = tl.maximum(highest, tl.max(lse, 0))
        weights = tl.exp2(lse - higher[None, :])
        kept = tl.exp2(highest - higher)
        total = total * kept + tl.sum(weights, 0)
        combined = combined * kept[:, None] + tl.sum(part * weights[:, :, None], 0)
        highest = higher
    combined = combined / tl.where(total > 0.0, total, 1.0)[:, None]
    target = out_ptr + (head + group)[:, None] * HEAD_DIM + columns[None, :]
    tl.store(target, combined.to(out_dtype), mask=inside)


@triton.jit(do_not_specialize=["window", "num_splits"])
def _decode_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    seq_lens_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    arrivals_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    q_weight_ptr,
    k_weight_ptr,
    scale,
    eps,
    window,
    num_splits,
    q_row_stride,
    q_head_stride,
    table_stride,
    max_keys,
    FUSED: tl.constexpr,
    NORM: tl.constexpr,
    WINDOWED: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SETTLED: tl.constexpr,
    PDL: tl.constexpr,
):
    RUNS: tl.constexpr = MIN_SPLIT // BLOCK_N
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    # The last splits come first: most have no keys, and are gone before the others need their place.
    split = num_splits - 1 - tl.program_id(2)
    group = tl.arange(0, BLOCK_H)
    columns = tl.arange(0, BLOCK_D)
    run = tl.arange(0, BLOCK_N)
    in_group = group < HEADS_PER_KV
    in_head = columns < HEAD_DIM
    partners = tl.where(columns < HALF, columns + HALF, columns - HALF)
    head = kv_head * HEADS_PER_KV + group
    tile = in_group[:, None] & in_head[None, :]
    q_gain = tl.full((1, BLOCK_D), 1.0, tl.float32)
    q_partner_gain = q_gain
    k_gain = q_gain
    k_partner_gain = q_gain
    if NORM:
        q_gain = tl.load(q_weight_ptr + columns, mask=in_head, other=0.0).to(tl.float32)[None, :]
        q_partner_gain = tl.load(q_weight_ptr + partners, mask=in_head, other=0.0).to(tl.float32)[None, :]
        k_gain = tl.load(k_weight_ptr + columns, mask=in_head, other=0.0).to(tl.float32)[None, :]
        k_partner_gain = tl.load(k_weight_ptr + partners, mask=in_head, other=0.0).to(tl.float32)[None, :]
    pdl_launch_dependents(PDL)
    if not SETTLED:
        pdl_wait(PDL)

    # What may be read without knowing the length is asked for together with it.
    length = tl.load(seq_lens_ptr + row)
    if FUSED:
        position = tl.load(positions_ptr + row).to(tl.int64)
        slot = tl.load(slots_ptr + row).to(tl.int64)
    table_ptr = block_tables_ptr + row * table_stride
    first = 0
    if WINDOWED:
        first = tl.maximum(length - window, 0)
    index = split * MIN_SPLIT + run
    following = (num_splits * (1 // RUNS) + split) * MIN_SPLIT + (1 % RUNS) * BLOCK_N + run
    block = tl.load(table_ptr + (first + index) // BLOCK_SIZE, mask=first + index < max_keys, other=0)
    next_block = tl.load(table_ptr + (first + following) // BLOCK_SIZE, mask=first + following < max_keys, other=0)
    # Keys in the cache; with FUSED the row's last one is not there yet, and belongs to the first split.
    count = length - first
    if FUSED:
        count = tl.maximum(count - 1, 0)
    used = tl.minimum(tl.cdiv(count, MIN_SPLIT), num_splits)
    if FUSED:
        used = tl.maximum(used, tl.minimum(length, 1))
    # An empty row is written by its first split, as zeros.
    if (split < used) | (split == 0):
        k, v = _load_chunk(
            k_cache_ptr, v_cache_ptr, block, first + index, index < count, kv_head, columns, in_head,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE,
        )  # fmt: skip
        if FUSED:
            angle = tl.where(columns < HALF, columns, columns - HALF)
            cos = tl.load(cos_sin_ptr + position * HEAD_DIM + angle, mask=in_head, other=0.0)[None, :]
            sin = tl.load(cos_sin_ptr + position * HEAD_DIM + HALF + angle, mask=in_head, other=0.0)[None, :]
            sin = tl.where((columns < HALF)[None, :], -sin, sin)
        chunks = 0
        if split * MIN_SPLIT < count:
            before = tl.cdiv(tl.cdiv(count, MIN_SPLIT) - split, num_splits) - 1
            in_last = count - (before * num_splits + split) * MIN_SPLIT
            chunks = before * RUNS + tl.minimum(tl.cdiv(in_last, BLOCK_N), RUNS)
        if SETTLED:
            pdl_wait(PDL)
        q_row = q_ptr + row * q_row_stride
        q = tl.load(q_row + head[:, None] * q_head_stride + columns[None, :], mask=tile, other=0.0)
        if FUSED:
            partner = tl.load(q_row + head[:, None] * q_head_stride + partners[None, :], mask=tile, other=0.0)
            # The new key and value: heads behind the query heads in each row of the product.
            key_head = q_row + (NUM_KV_HEADS * HEADS_PER_KV + kv_head) * q_head_stride
            wanted = in_head & (columns * 0 + split == 0)
            k_new = tl.load(key_head + columns, mask=wanted, other=0.0)[None, :]
            k_partner = tl.load(key_head + partners, mask=wanted, other=0.0)[None, :]
            v_new = tl.load(key_head + NUM_KV_HEADS * q_head_stride + columns, mask=wanted, other=0.0)
            q = _rotate(q, partner, q_gain, q_partner_gain, cos, sin, eps, HEAD_DIM, NORM)
        highest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_H,), tl.float32)
        attended = tl.zeros((BLOCK_D, BLOCK_H), tl.float32)
        for chunk in range(0, chunks):
            # The next chunk is on its way while this one is worked on, and the blocks of the one after it.
            next_k, next_v = _load_chunk(
                k_cache_ptr, v_cache_ptr, next_block, first + following, following < count, kv_head, columns, in_head,
                NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE,
            )  # fmt: skip
            later = (((chunk + 2) // RUNS) * num_splits + split) * MIN_SPLIT + ((chunk + 2) % RUNS) * BLOCK_N + run
            next_block = tl.load(table_ptr + (first + later) // BLOCK_SIZE, mask=later < count, other=0)
            highest, total, attended = _attend(q, k, v, index < count, scale * _LOG2_E, highest, total, attended)
            k = next_k
            v = next_v
            index = following
            following = later
        if FUSED:  # noqa: SIM102 - the one is settled when compiled
            if (split == 0) & (length > 0):
                k_turned = _rotate(k_new, k_partner, k_gain, k_partner_gain, cos, sin, eps, HEAD_DIM, NORM)
                # (Triton's interpreter gives a scalar comparison that is spread over a mask the wrong type.)
                owned = (in_head & (columns.to(tl.int64) * 0 + slot >= 0))[None, :]
                entry = (slot * NUM_KV_HEADS + kv_head) * HEAD_DIM + columns[None, :]
                tl.store(k_cache_ptr + entry, k_turned, mask=owned)
                tl.store(v_cache_ptr + entry, v_new[None, :], mask=owned)
                score = tl.sum(q.to(tl.float32) * k_turned.to(tl.float32), 1) * (scale * _LOG2_E)
                higher = tl.maximum(highest, score)
                kept = tl.exp2(highest - higher)
                weight = tl.exp2(score - higher)
                total = total * kept + weight
                attended = attended * kept[None, :] + weight[None, :] * v_new.to(tl.float32)[:, None]
                highest = higher
        attended = tl.trans(attended / tl.where(total > 0.0, total, 1.0)[None, :])
        row_heads = row * NUM_KV_HEADS * HEADS_PER_KV
        target = out_ptr + (row_heads + head)[:, None] * HEAD_DIM + columns[None, :]
        if SPLIT:
            if used > 1:
                place = (row_heads + head) * num_splits + split
                tl.store(partial_ptr + place[:, None] * HEAD_DIM + columns[None, :], attended, mask=tile)
                tl.store(lse_ptr + place, highest + tl.log2(total), mask=in_group)
                # All of the program's stores come before its arrival, and all arrivals before the last one's loads.
                tl.debug_barrier()
                arrivals = arrivals_ptr + row * NUM_KV_HEADS + kv_head
                if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == used - 1:
                    tl.debug_barrier()
                    tl.store(arrivals, 0)
                    _combine(
                        partial_ptr, lse_ptr, out_ptr, row_heads + kv_head * HEADS_PER_KV, used, num_splits,
                        out_ptr.dtype.element_ty, HEADS_PER_KV, HEAD_DIM, GROUP, BLOCK_D, BLOCK_S,
                    )  # fmt: skip
            else:
                tl.store(target, attended.to(out_ptr.dtype.element_ty), mask=tile)
        else:
            tl.store(target, attended.to(out_ptr.dtype.element_ty), mask=tile)


@cache
def _arrival_counters(device: torch.device, count: int) -> Tensor:
    """Zeros that every launch leaves as zeros; launches that share them must be on one stream."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"attention over up to {count} rows and key heads is being recorded before it ever ran: its counters would "
            "lie in the recording's memory; run the step once before recording it"
        )
    return torch.zeros(count, dtype=torch.int32, device=device)


def _attention(
    q: Tensor,
    num_heads: int,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int,
    plan: SplitPlan | int,
    fused: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, float] | None = None,
    settled: bool = False,
) -> Tensor:
    """Launch the kernel over ``q`` ``[batch, heads, head_dim]``, which with ``fused`` holds keys and values as well.

    ``fused`` is (cos_sin, positions, slots, q_weight, k_weight, eps).
    """
    batch, head_dim = q.shape[0], q.shape[2]
    block_size, num_kv_heads = k_cache.shape[1:3]
    out = q.new_empty((batch, num_heads, head_dim))
    if not batch:
        return out
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("the KV cache of a layer must be contiguous; pass whole tensors, not strided views")
    q = q if q.stride(2) == 1 else q.contiguous()
    block_tables = block_tables if block_tables.stride(1) == 1 else block_tables.contiguous()
    heads_per_kv = num_heads // num_kv_heads
    block_d = max(next_power_of_2(head_dim), 16)
    if not isinstance(plan, SplitPlan):
        ring = (
            fused is not None and settled and not pdl.interpreting() and ring_fits(q.dtype, head_dim, heads_per_kv)
            and torch.cuda.get_device_capability(q.device) >= (8, 0)
        )  # fmt: skip
        chosen = plan_splits(batch, num_kv_heads, block_tables.shape[1] * block_size, block_d * q.element_size(), ring)
        plan = chosen if plan <= 0 else SplitPlan(plan, chosen.block_n, chosen.block_n, chosen.warps)
    planned = plan.splits
    split = planned > 1
    partial = lse = arrivals = out
    if split:
        partial = q.new_empty((batch, num_heads, planned, head_dim), dtype=torch.float32)
        lse = q.new_empty((batch, num_heads, planned), dtype=torch.float32)
        arrivals = _arrival_counters(q.device, max(1 << 16, next_power_of_2(batch * num_kv_heads)))
    cos_sin, positions, slots, q_weight, k_weight, eps = fused or (lse, seq_lens, seq_lens, None, None, 0.0)
    group = next_power_of_2(heads_per_kv)
    tensors = (
        q, k_cache, v_cache, block_tables, seq_lens, out, partial, lse, arrivals, cos_sin, positions, slots,
        q if q_weight is None else q_weight, q if k_weight is None else k_weight,
    )  # fmt: skip
    numbers = (scale, eps, window, planned, q.stride(0), q.stride(1), block_tables.stride(0))
    constants = dict(
        NORM=q_weight is not None, WINDOWED=window > 0, HEADS_PER_KV=heads_per_kv, NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim, BLOCK_SIZE=block_size, SPLIT=split, MIN_SPLIT=plan.min_split, BLOCK_N=plan.block_n,
        BLOCK_H=max(group, 8), GROUP=group, num_warps=plan.warps, **pdl.options(pdl.mode(q.device)),
    )  # fmt: skip
    if plan.stages:
        from mainspring.kernels.triton.ring_attention import ring_attention_kernel

        ring_attention_kernel[(batch, num_kv_heads, planned)](
            *tensors,
            *numbers,
            STAGES=plan.stages,
            WARPS=plan.warps,
            BLOCK_S=max(1, min(64, 32 * plan.warps // group)),
            **constants,
        )
        return out
    _decode_kernel[(batch, num_kv_heads, planned)](
        *tensors, *numbers, block_tables.shape[1] * block_size, FUSED=fused is not None, BLOCK_D=block_d,
        BLOCK_S=max(1, min(next_power_of_2(planned), plan.warps * COMBINED_AT_ONCE // (group * block_d))),
        SETTLED=settled, num_stages=1, **constants,
    )  # fmt: skip
    return out


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int = 0,
    num_splits: int = 0,
) -> Tensor:
    """See :func:`mainspring.kernels.attention.decode_attention`; ``num_splits`` > 0 overrides the plan."""
    return _attention(q, q.shape[1], k_cache, v_cache, block_tables, seq_lens, scale, window, num_splits)


def rope_and_decode_attention(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int = 0,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    settled: bool = False,
    num_splits: SplitPlan | int = 0,
) -> Tensor:
    """See :func:`mainspring.kernels.attention.rope_and_decode_attention`; ``num_splits`` > 0, or a whole plan,
    overrides the plan."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.unflatten(1, (-1, head_dim))
    num_heads = heads.shape[1] - 2 * num_kv_heads
    settings = (cos_sin, positions, slots, q_weight, k_weight, eps)
    return _attention(
        heads, num_heads, k_cache, v_cache, block_tables, seq_lens, scale, window, num_splits, settings, settled
    )  # fmt: skip
