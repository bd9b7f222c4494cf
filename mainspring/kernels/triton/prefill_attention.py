"""Triton kernel of paged prefill attention: causal, varlen, keys in the cache (FlashAttention-2, Dao 2023).

One program attends for one tile of queries and one head. Which sequence a tile belongs to is searched on the
device: tile numbers are given out so that sequence i starts at ``query_starts[i] // BLOCK_M + i``, which
leaves a few programs without work and needs no length on the host.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _sequence_of(tile, query_starts_ptr, num_sequences, BLOCK_M: tl.constexpr):
    """The last sequence whose first tile is not above ``tile``."""
    low = 0
    high = num_sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        first_tile = tl.load(query_starts_ptr + middle) // BLOCK_M + middle
        if first_tile <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _attend(
    q,
    attended,
    highest,
    total,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    kv_head,
    positions,
    length,
    begin,
    end,
    scale,
    window,
    MASKED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Fold the keys ``begin <= key < end`` into the running softmax."""
    columns = tl.arange(0, BLOCK_D)
    in_head = columns < HEAD_DIM
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        present = key < length
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
        entry = ((block * BLOCK_SIZE + key % BLOCK_SIZE) * NUM_KV_HEADS + kv_head) * HEAD_DIM
        wanted = present[:, None] & in_head[None, :]
        k = tl.load(k_cache_ptr + entry[:, None] + columns[None, :], mask=wanted, other=0.0)
        v = tl.load(v_cache_ptr + entry[:, None] + columns[None, :], mask=wanted, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * _LOG2_E)
        if MASKED:
            visible = (key[None, :] <= positions[:, None]) & present[None, :]
            if window > 0:
                visible = visible & (key[None, :] > positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        # A query that sees no key of this tile, and saw none before, has no highest yet.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        kept = tl.exp2(highest - base)
        total = total * kept + tl.sum(weights, 1)
        attended = attended * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = higher
    return attended, highest, total


@triton.jit(do_not_specialize=["window", "num_sequences"])
def _prefill_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    query_starts_ptr,
    seq_lens_ptr,
    out_ptr,
    scale,
    window,
    num_sequences,
    q_token_stride,
    q_head_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Later tiles see more keys: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    sequence = _sequence_of(tile, query_starts_ptr, num_sequences, BLOCK_M)
    begin_token = tl.load(query_starts_ptr + sequence)
    count = tl.load(query_starts_ptr + sequence + 1) - begin_token
    length = tl.load(seq_lens_ptr + sequence)
    first_query = (tile - (begin_token // BLOCK_M + sequence)) * BLOCK_M
    if first_query < count:
        query = first_query + tl.arange(0, BLOCK_M)
        columns = tl.arange(0, BLOCK_D)
        token = (begin_token + query).to(tl.int64)
        rows = (query < count)[:, None] & (columns < HEAD_DIM)[None, :]
        q = tl.load(
            q_ptr + token[:, None] * q_token_stride + head * q_head_stride + columns[None, :],
            mask=rows,
            other=0.0,
        )
        # Queries beyond the count see what the last one sees; they are not stored.
        context = length - count
        positions = tl.minimum(context + query, length - 1)
        highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        attended = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        table = block_tables_ptr + sequence.to(tl.int64) * table_stride
        end = tl.minimum(context + first_query + BLOCK_M, length)
        begin = 0
        # Keys that every query of the tile sees need no mask.
        whole = (context + first_query + 1) // BLOCK_N * BLOCK_N
        if window > 0:
            begin = tl.maximum(context + first_query + 1 - window, 0) // BLOCK_N * BLOCK_N
            whole = begin
        attended, highest, total = _attend(
            q, attended, highest, total, k_cache_ptr, v_cache_ptr, table, kv_head, positions, length,
            begin, whole, scale, window, MASKED=False, NUM_KV_HEADS=NUM_KV_HEADS, HEAD_DIM=HEAD_DIM,
            BLOCK_SIZE=BLOCK_SIZE, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D,
        )  # fmt: skip
        attended, highest, total = _attend(
            q, attended, highest, total, k_cache_ptr, v_cache_ptr, table, kv_head, positions, length,
            whole, end, scale, window, MASKED=True, NUM_KV_HEADS=NUM_KV_HEADS, HEAD_DIM=HEAD_DIM,
            BLOCK_SIZE=BLOCK_SIZE, BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D,
        )  # fmt: skip
        attended = attended / tl.where(total > 0.0, total, 1.0)[:, None]
        target = out_ptr + (token[:, None] * NUM_HEADS + head) * HEAD_DIM + columns[None, :]
        tl.store(target, attended.to(q.dtype), mask=rows)


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    """See :func:`mainspring.kernels.attention.prefill_attention`."""
    tokens, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    num_sequences = seq_lens.shape[0]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    if not tokens or not num_sequences:
        return out
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("the KV cache of a layer must be contiguous; pass whole tensors, not strided views")
    q = q if q.stride(2) == 1 else q.contiguous()
    block_tables = block_tables if block_tables.stride(1) == 1 else block_tables.contiguous()
    block_d = max(triton.next_power_of_2(head_dim), 16)
    wide = block_d * q.element_size() > 256
    block_m, block_n = (32, 32) if wide else (64, 64)
    if q.dtype != torch.float32 and tokens >= 512 * num_sequences and block_d <= 128:
        block_m = 128
    _prefill_kernel[(tokens // block_m + num_sequences, num_heads)](
        q, k_cache, v_cache, block_tables, query_starts, seq_lens, out, scale, window, num_sequences,
        q.stride(0), q.stride(1), block_tables.stride(0),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d,
        num_warps=8 if block_m == 128 else 4, num_stages=2,
    )  # fmt: skip
    return out
