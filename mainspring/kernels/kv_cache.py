"""Writing keys and values into the paged KV cache.

The cache of a layer is two tensors ``[num_blocks, block_size, num_kv_heads, head_dim]``. A slot is
``block * block_size + offset``. Block 0 is the null block, which belongs to nobody.
"""

from __future__ import annotations

from torch import Tensor

from mainspring.kernels.library import register


def flat_cache(cache: Tensor) -> Tensor:
    """A layer's keys or values by slot: ``[slots, kv_heads, head_dim]``, a view."""
    return cache.view(-1, *cache.shape[2:])


def store(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """What :func:`write_kv` does, in plain torch, with caches from :func:`flat_cache`."""
    if min(slots.tolist(), default=0) < 0:
        owned = slots >= 0
        slots, k, v = slots[owned], k[owned], v[owned]
    keys.index_copy_(0, slots, k)
    values.index_copy_(0, slots, v)


def write_kv_reference(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """What :func:`write_kv` does, in plain torch."""
    store(k, v, flat_cache(k_cache), flat_cache(v_cache), slots)


_write_kv = register(
    "write_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots) -> ()",
    cpu=write_kv_reference,
    cuda="mainspring.kernels.triton.kv_cache:write_kv",
)


def check_slots(slots: Tensor, tokens: int) -> None:
    """Refuse another number of slots than of tokens: a kernel would read past the end of one of them.

    Raises:
        ValueError: with both numbers.
    """
    if slots.dim() != 1 or slots.shape[0] != tokens:
        raise ValueError(f"slots {list(slots.shape)} for {tokens} tokens; give one slot a token, -1 to skip it")


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write each token's key and value into its slot; a token with a negative slot is skipped.

    Args:
        k: ``[tokens, num_kv_heads, head_dim]`` in the cache's dtype.
        v: like ``k``.
        k_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``, contiguous; written.
        v_cache: like ``k_cache``; written.
        slots: ``[tokens]`` int64, each below ``num_blocks * block_size``; -1 skips the token. A slot must
            not occur twice.

    Raises:
        ValueError: there are not as many slots as tokens.
    """
    check_slots(slots, k.shape[0])
    _write_kv(k, v, k_cache, v_cache, slots)
