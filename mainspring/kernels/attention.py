"""Attention over the paged KV cache: one query a row (decode), or a run of queries a sequence (prefill).

The plain torch implementations here are the specification and the CPU path. They treat every row apart, so
that a row's result does not depend on its company.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mainspring.kernels.decode_cpu import prepare_decode_attention, prepare_rope_and_decode_attention
from mainspring.kernels.kv_cache import check_slots
from mainspring.kernels.library import register
from mainspring.kernels.rope import rope_and_cache


def paged_view(cache: Tensor, table: list[int], start: int, stop: int) -> Tensor:
    """Return one sequence's entries ``start <= position < stop``: ``[1, kv_heads, stop - start, head_dim]``.

    A view where the blocks lie one after another in the cache, a copy otherwise. Blocks outside the range
    are not read.
    """
    block_size, num_kv_heads, head_dim = cache.shape[1:]
    first = start // block_size
    blocks = table[first : (stop - 1) // block_size + 1]
    skip = start - first * block_size
    lowest = blocks[0]
    if blocks[-1] - lowest != len(blocks) - 1 or blocks != list(range(lowest, lowest + len(blocks))):
        cache = cache.index_select(0, torch.tensor(blocks, device=cache.device))
        lowest = 0
    entry = num_kv_heads * head_dim
    return cache.as_strided(
        (1, num_kv_heads, stop - start, head_dim),
        (0, head_dim, entry, 1),
        cache.storage_offset() + (lowest * block_size + skip) * entry,
    )


def causal_mask(num_queries: int, num_keys: int, window: int, device: torch.device) -> Tensor:
    """Return ``[num_queries, num_keys]`` bool, true where a query may look.

    The queries are the last positions of the keys. ``window`` > 0 keeps only that many keys, a query's own
    among them.
    """
    query = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
    key = torch.arange(num_keys, device=device)
    mask = key <= query
    return mask & (key > query - window) if window > 0 else mask


def prefill_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    """What :func:`prefill_attention` computes, in plain torch, sequence by sequence."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    tables: list[list[int]] = block_tables.tolist()
    starts: list[int] = query_starts.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        begin, end = starts[row], starts[row + 1]
        count = end - begin
        if count == 0:
            continue
        if length < count:
            raise ValueError(
                f"sequence {row} has {count} queries but only {length} keys; its own must be written first"
            )
        first_key = max(0, length - count + 1 - window) if window > 0 else 0
        k = paged_view(k_cache, tables[row], first_key, length)
        v = paged_view(v_cache, tables[row], first_key, length)
        num_keys = length - first_key
        mask = None
        whole = count == num_keys and not 0 < window < num_keys
        if not whole and count > 1:
            mask = causal_mask(count, num_keys, window, q.device)
        attended = F.scaled_dot_product_attention(
            q[begin:end].transpose(0, 1).unsqueeze(0),
            k,
            v,
            attn_mask=mask,
            is_causal=whole and count > 1,
            scale=scale,
            enable_gqa=True,
        )
        out[begin:end] = attended[0].transpose(0, 1)
    return out


def rope_then_decode_attention(
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
) -> Tensor:
    """What :func:`rope_and_decode_attention` does, as the two operations that it stands for."""
    q = rope_and_cache(qkv, cos_sin, positions, slots, k_cache, v_cache, q_weight, k_weight, eps)
    return decode_attention(q, k_cache, v_cache, block_tables, seq_lens, scale, window)


_decode_attention = register(
    "decode_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor seq_lens, "
    "float scale, int window=0) -> Tensor",
    prepare=prepare_decode_attention,
    cuda="mainspring.kernels.triton.decode_attention:decode_attention",
)
_rope_and_decode_attention = register(
    "rope_and_decode_attention(Tensor qkv, Tensor cos_sin, Tensor positions, Tensor slots, Tensor(a!) k_cache, "
    "Tensor(b!) v_cache, Tensor block_tables, Tensor seq_lens, float scale, int window=0, Tensor? q_weight=None, "
    "Tensor? k_weight=None, float eps=0.0, bool settled=False) -> Tensor",
    prepare=prepare_rope_and_decode_attention,
    cuda="mainspring.kernels.triton.decode_attention:rope_and_decode_attention",
    plain=rope_then_decode_attention,
)
_prefill_attention = register(
    "prefill_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor query_starts, "
    "Tensor seq_lens, float scale, int window=0) -> Tensor",
    cpu=prefill_attention_reference,
    cuda="mainspring.kernels.triton.prefill_attention:prefill_attention",
)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Attend with one query a row to that row's keys in the paged cache.

    Args:
        q: ``[batch, num_heads, head_dim]``; ``num_heads`` is a multiple of ``num_kv_heads``.
        k_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``, contiguous.
        v_cache: like ``k_cache``.
        block_tables: ``[batch, max_blocks]`` int32; entries beyond a row's length are never followed.
        seq_lens: ``[batch]`` int32, how many keys each row has, the query's own among them; 0 for padding.
        scale: factor on the products, usually ``head_dim ** -0.5``.
        window: 0 for all keys, otherwise only the last ``window`` of them.

    Returns:
        ``[batch, num_heads, head_dim]``, new, in the dtype of ``q``; zeros where the length is 0.
    """
    out: Tensor = _decode_attention(q, k_cache, v_cache, block_tables, seq_lens, scale, window)
    return out


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
) -> Tensor:
    """What lies between the QKV product and the output product of a decode step, in one kernel on a GPU.

    That is :func:`mainspring.kernels.rope.rope_and_cache` and :func:`decode_attention`, whose arguments these are. The
    token of each row is its last key: ``positions`` are ``seq_lens - 1`` and ``slots`` say where its key and value go;
    a row of length 0 has slot -1. On a GPU, calls that may run at the same time (on two streams) are not allowed:
    they share the counters by which the parts of a row find out that they are the last.

    ``settled`` promises that ``positions``, ``slots``, ``block_tables``, ``seq_lens`` and the cache's entries of
    earlier tokens were there before the kernel in front was allowed to start: that a kernel without programmatic
    launch lies between, such as :func:`mainspring.kernels.seats.embed`. Then keys and values are fetched before the
    wait, while the QKV product still runs.

    Returns:
        ``[batch, num_heads, head_dim]``, new, in the dtype of ``qkv``; zeros where the length is 0.

    Raises:
        ValueError: one norm weight is given without the other.
    """
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight and k_weight go together: give both or neither")
    check_slots(slots, qkv.shape[0])
    out: Tensor = _rope_and_decode_attention(
        qkv, cos_sin, positions, slots, k_cache, v_cache, block_tables, seq_lens, scale, window, q_weight, k_weight,
        eps, settled,
    )  # fmt: skip
    return out


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
    """Attend causally with the last tokens of each sequence to all its keys in the paged cache.

    The keys and values of the queries themselves must be in the cache already. Nothing that is launched on a GPU
    depends on a length, so that it can be recorded for so many tokens and sequences: those that are not there are
    sequences without a query and a key at the end, and tokens behind the last one's.

    Args:
        q: ``[tokens, num_heads, head_dim]``, the sequences one after another.
        k_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``, contiguous.
        v_cache: like ``k_cache``.
        block_tables: ``[sequences, max_blocks]`` int32.
        query_starts: ``[sequences + 1]`` int32; sequence ``i`` has the queries
            ``query_starts[i] <= t < query_starts[i + 1]``, the last positions of its keys.
        seq_lens: ``[sequences]`` int32, keys of each sequence, those of the queries among them.
        scale: factor on the products.
        window: 0 for all keys, otherwise a query sees only the last ``window`` keys up to its own.

    Returns:
        ``[tokens, num_heads, head_dim]``, new, in the dtype of ``q``; zeros for tokens of no sequence.

    Raises:
        ValueError: a sequence has more queries than keys (checked where lengths are on the CPU).
    """
    out: Tensor = _prefill_attention(q, k_cache, v_cache, block_tables, query_starts, seq_lens, scale, window)
    return out
