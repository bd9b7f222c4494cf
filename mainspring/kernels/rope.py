"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), in the half-split form of Llama."""

from __future__ import annotations

import torch
from torch import Tensor

from mainspring.kernels.library import register


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
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def apply_rope_reference(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """What :func:`apply_rope` computes, in plain torch: the table in x's dtype, as Hugging Face does it."""
    cos, sin = cos_sin[positions].to(q.dtype).unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


_apply_rope = register(
    "apply_rope(Tensor q, Tensor k, Tensor cos_sin, Tensor positions) -> (Tensor, Tensor)",
    cpu=apply_rope_reference,
    cuda="mainspring.kernels.triton.rope:apply_rope",
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
