"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), in the half-split form of Llama."""

from __future__ import annotations

import torch
from torch import Tensor

from mainspring.kernels.kv_cache import check_slots, write_kv_reference
from mainspring.kernels.library import register
from mainspring.kernels.norm import rms_norm_reference


def rope_table(inv_freq: Tensor, max_positions: int, attention_scaling: float = 1.0) -> Tensor:
    """Tabulate the rotation of every position.

    Args:
        inv_freq: ``[head_dim / 2]``, radians per position.
        max_positions: how many positions, from 0.
        attention_scaling: factor on cosine and sine (yarn and longrope use one).

    Returns:
        ``[max_positions, head_dim]`` fp32 on the device of ``inv_freq``: the cosines in the first half of a
        row, the sines in the second.
    """
    positions = torch.arange(max_positions, dtype=torch.float32, device=inv_freq.device)
    angles = torch.outer(positions, inv_freq.float())
    return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(attention_scaling)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def apply_rope_reference(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """What :func:`apply_rope` computes, in plain torch: in fp32, rounded once."""
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def rope_and_cache_reference(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """What :func:`rope_and_cache` computes, in plain torch."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    q_and_k, v = qkv.view(qkv.shape[0], -1, head_dim).split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    if q_weight is not None and k_weight is not None:
        q, k = q_and_k.split((num_heads, num_kv_heads), dim=1)
        q, k = rms_norm_reference(q, q_weight, eps), rms_norm_reference(k, k_weight, eps)
        q_and_k = torch.cat((q, k), dim=1)
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    q, k = _rotate(q_and_k, cos, sin).split((num_heads, num_kv_heads), dim=1)
    write_kv_reference(k, v, k_cache, v_cache, slots)
    return q.contiguous()


_apply_rope = register(
    "apply_rope(Tensor q, Tensor k, Tensor cos_sin, Tensor positions) -> (Tensor, Tensor)",
    cpu=apply_rope_reference,
    cuda="mainspring.kernels.triton.rope:apply_rope",
)
_rope_and_cache = register(
    "rope_and_cache(Tensor qkv, Tensor cos_sin, Tensor positions, Tensor slots, Tensor(a!) k_cache, "
    "Tensor(b!) v_cache, Tensor? q_weight=None, Tensor? k_weight=None, float eps=0.0) -> Tensor",
    cpu=rope_and_cache_reference,
    cuda="mainspring.kernels.triton.rope:rope_and_cache",
)


def apply_rope(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions.

    Args:
        q: ``[tokens, num_heads, head_dim]``; may be a view with any token stride.
        k: ``[tokens, num_kv_heads, head_dim]``; likewise.
        cos_sin: ``[max_positions, head_dim]`` fp32 from :func:`rope_table`.
        positions: ``[tokens]`` int32 or int64, each within the table.

    Returns:
        The rotated ``(q, k)``, new and contiguous.
    """
    rotated_q, rotated_k = _apply_rope(q, k, cos_sin, positions)
    return rotated_q, rotated_k


def rope_and_cache(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Normalise (where weights are given) and rotate queries and keys; write keys and values to the cache.

    One kernel for what lies between the QKV product and attention.

    Args:
        qkv: ``[tokens, (num_heads + 2 * num_kv_heads) * head_dim]``: queries, keys, values.
        cos_sin: ``[max_positions, head_dim]`` fp32 from :func:`rope_table`.
        positions: ``[tokens]`` int32 or int64, each within the table.
        slots: ``[tokens]`` int64; -1 skips the token's key and value.
        k_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``, contiguous; written.
        v_cache: like ``k_cache``; written.
        q_weight: ``[head_dim]``, weight of an RMS norm over each query head before the rotation, or None.
        k_weight: likewise for key heads; both are given or neither.
        eps: of the norms.

    Returns:
        The queries, ``[tokens, num_heads, head_dim]``, new.

    Raises:
        ValueError: one norm weight is given without the other.
    """
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight and k_weight go together: give both or neither")
    check_slots(slots, qkv.shape[0])
    q: Tensor = _rope_and_cache(qkv, cos_sin, positions, slots, k_cache, v_cache, q_weight, k_weight, eps)
    return q
