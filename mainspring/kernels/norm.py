"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor

from mainspring.kernels.library import register


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What :func:`rms_norm` computes, in plain torch: statistics in fp32, the weight in x's dtype."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).to(x.dtype) * weight


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """What :func:`add_rms_norm` computes, in plain torch."""
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


_rms_norm = register(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    cpu=rms_norm_reference,
    cuda="mainspring.kernels.triton.norm:rms_norm",
)
_add_rms_norm = register(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    cpu=add_rms_norm_reference,
    cuda="mainspring.kernels.triton.norm:add_rms_norm",
)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension of ``x`` to unit root mean square and scale it by ``weight``.

    Args:
        x: ``[..., n]`` in fp32, bf16 or fp16.
        weight: ``[n]`` in the dtype of ``x``.
        eps: added to the mean square.

    Returns:
        A new tensor like ``x``: ``weight * (x / sqrt(mean(x^2) + eps)).to(x.dtype)``, as Hugging Face's
        Llama does it.
    """
    out: Tensor = _rms_norm(x, weight, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add a residual and normalise the sum.

    Args:
        x: ``[..., n]``, what a block added.
        residual: like ``x``, what it is added to.
        weight: ``[n]``.
        eps: added to the mean square.

    Returns:
        ``(rms_norm(x + residual), x + residual)``, both new and in the dtype of ``x``.
    """
    normed, total = _add_rms_norm(x, residual, weight, eps)
    return normed, total
