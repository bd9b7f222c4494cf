"""Triton kernels of paged decode attention with split keys (flash-decoding, Dao et al. 2023).

One program attends for one row, one key head (with all query heads that share it) and one split of the
row's keys; a second kernel combines the splits. How many splits there are follows from the batch and the
width of the block tables, so it is fixed when recorded; how long a split is follows from the row's length,
on the device, and programs that have no keys leave at once.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = tl.constexpr(1.4426950408889634)

#: Programs aimed at where the batch alone does not fill the device: two for each of an H200's 132 processors.
TARGET_PROGRAMS = 264
#: The fewest keys worth a split of their own where the batch fills the device already.
LONG_SPLIT = 512
MAX_SPLITS = 128


@triton.jit
def _split_range(length, window, num_splits, MIN_SPLIT: tl.constexpr):
    """The row's first key, how many it attends to, and how many of them each split takes."""
    first = 0
    if window > 0:
        first = tl.maximum(length - window, 0)
    count = length - first
    each = tl.cdiv(tl.cdiv(count, num_splits), MIN_SPLIT) * MIN_SPLIT
    return first, count, each


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
    scale,
    window,
    num_splits,
    q_row_stride,
    q_head_stride,
    table_stride,
    HEADS_PER_KV: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(seq_lens_ptr + row)
    first, count, each = _split_range(length, window, num_splits, MIN_SPLIT)
    begin = split * each
    end = tl.minimum(begin + each, count)
    # Without splits an empty row is written here, as zeros; with them the second kernel writes it.
    if (begin < end) | (not SPLIT):
        group = tl.arange(0, BLOCK_M)
        columns = tl.arange(0, BLOCK_D)
        in_group = group < HEADS_PER_KV
        in_head = columns < HEAD_DIM
        head = kv_head * HEADS_PER_KV + group
        tile = in_group[:, None] & in_head[None, :]
        q = tl.load(
            q_ptr + row * q_row_stride + head[:, None] * q_head_stride + columns[None, :],
            mask=tile,
            other=0.0,
        )
        highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        attended = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for start in range(begin, end, BLOCK_N):
            index = start + tl.arange(0, BLOCK_N)
            present = index < end
            key = first + index
            block = tl.load(block_tables_ptr + row * table_stride + key // BLOCK_SIZE, mask=present, other=0).to(
                tl.int64
            )
            entry = ((block * BLOCK_SIZE + key % BLOCK_SIZE) * NUM_KV_HEADS + kv_head) * HEAD_DIM
            # What lies beyond the keys may be anything, NaN too: it is not loaded.
            wanted = present[:, None] & in_head[None, :]
            k = tl.load(k_cache_ptr + entry[:, None] + columns[None, :], mask=wanted, other=0.0)
            v = tl.load(v_cache_ptr + entry[:, None] + columns[None, :], mask=wanted, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * _LOG2_E)
            scores = tl.where(present[None, :], scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            kept = tl.exp2(highest - higher)
            total = total * kept + tl.sum(weights, 1)
            attended = attended * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            highest = higher
        attended = attended / tl.where(total > 0.0, total, 1.0)[:, None]
        all_heads = row * NUM_KV_HEADS * HEADS_PER_KV + head
        if SPLIT:
            place = all_heads * num_splits + split
            tl.store(partial_ptr + place[:, None] * HEAD_DIM + columns[None, :], attended, mask=tile)
            tl.store(lse_ptr + place, highest + tl.log2(total), mask=in_group)
        else:
            target = out_ptr + all_heads[:, None] * HEAD_DIM + columns[None, :]
            tl.store(target, attended.to(q.dtype), mask=tile)


@triton.jit(do_not_specialize=["window", "num_splits"])
def _combine_kernel(
    partial_ptr,
    lse_ptr,
    seq_lens_ptr,
    out_ptr,
    window,
    num_splits,
    num_heads,
    HEAD_DIM: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = row * num_heads + tl.program_id(1)
    length = tl.load(seq_lens_ptr + row)
    _, count, each = _split_range(length, window, num_splits, MIN_SPLIT)
    # Only these splits were written; the rest of the scratch space holds anything.
    used = tl.cdiv(count, tl.maximum(each, 1))
    columns = tl.arange(0, BLOCK_D)
    in_head = columns < HEAD_DIM
    splits = tl.arange(0, BLOCK_S)
    lse = tl.load(lse_ptr + head * num_splits + splits, mask=splits < used, other=float("-inf"))
    highest = tl.maximum(tl.max(lse, 0), -1.0e38)
    total = tl.sum(tl.exp2(lse - highest), 0)
    combined = tl.zeros((BLOCK_D,), tl.float32)
    for split in range(0, used):
        place = head * num_splits + split
        weight = tl.exp2(tl.load(lse_ptr + place) - highest)
        part = tl.load(partial_ptr + place * HEAD_DIM + columns, mask=in_head, other=0.0)
        combined += weight * part
    combined = combined / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + head * HEAD_DIM + columns, combined.to(out_ptr.dtype.element_ty), mask=in_head)


def plan_splits(batch: int, num_kv_heads: int, max_keys: int, block_n: int) -> tuple[int, int]:
    """Return how many splits to launch and the fewest keys one takes; nothing here depends on a length.

    Args:
        batch: rows.
        num_kv_heads: key heads.
        max_keys: the most keys a row may have.
        block_n: keys of one tile.
    """
    programs = batch * num_kv_heads
    if programs < TARGET_PROGRAMS:
        wanted = min(triton.cdiv(TARGET_PROGRAMS, programs), MAX_SPLITS)
        smallest = block_n
    else:
        # The batch fills the device; splits only keep a few long rows from being waited for.
        wanted, smallest = 8, max(LONG_SPLIT, block_n)
    return max(1, min(wanted, triton.cdiv(max_keys, smallest))), smallest


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
    batch, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not batch:
        return out
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("the KV cache of a layer must be contiguous; pass whole tensors, not strided views")
    q = q if q.stride(2) == 1 else q.contiguous()
    block_tables = block_tables if block_tables.stride(1) == 1 else block_tables.contiguous()
    heads_per_kv = num_heads // num_kv_heads
    block_d = max(triton.next_power_of_2(head_dim), 16)
    block_n = 64 if block_d * q.element_size() <= 256 else 32
    planned, min_split = plan_splits(batch, num_kv_heads, block_tables.shape[1] * block_size, block_n)
    if num_splits > 0:
        planned, min_split = num_splits, block_n
    split = planned > 1
    partial = lse = out
    if split:
        partial = q.new_empty((batch, num_heads, planned, head_dim), dtype=torch.float32)
        lse = q.new_empty((batch, num_heads, planned), dtype=torch.float32)
    _decode_kernel[(batch, num_kv_heads, planned)](
        q, k_cache, v_cache, block_tables, seq_lens, out, partial, lse, scale, window, planned,
        q.stride(0), q.stride(1), block_tables.stride(0),
        HEADS_PER_KV=heads_per_kv, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        SPLIT=split, MIN_SPLIT=min_split, BLOCK_M=max(triton.next_power_of_2(heads_per_kv), 16),
        BLOCK_N=block_n, BLOCK_D=block_d, num_warps=4, num_stages=2,
    )  # fmt: skip
    if split:
        _combine_kernel[(batch, num_heads)](
            partial, lse, seq_lens, out, window, planned, num_heads,
            HEAD_DIM=head_dim, MIN_SPLIT=min_split, BLOCK_S=triton.next_power_of_2(planned),
            BLOCK_D=block_d, num_warps=1,
        )  # fmt: skip
    return out
