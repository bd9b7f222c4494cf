"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv 1910.07467)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from mainspring.kernels.library import Prepared, register


class Normalisation:
    """What :func:`rms_norm` computes, for a given weight: statistics in fp32, the weight in the dtype of what comes."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._part = weight, 1 / weight.shape[0]
        self._eps = torch.full((), eps, dtype=torch.float32, device=weight.device)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Write the norm of ``x`` ``[..., n]`` into ``out``."""
        wide = x if x.dtype == torch.float32 else x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, length, length, value=self._part).rsqrt_()
        if wide is x:
            torch.mul(wide, scale, out=out).mul_(self._weight)
        else:
            torch.mul((wide * scale).to(x.dtype), self._weight, out=out)


def prepare_rms_norm(x: Tensor, weight: Tensor, eps: float, out: Sequence[Tensor] | None = None) -> Prepared:
    """:func:`rms_norm` in plain torch."""
    (normed,) = out or (torch.empty(x.shape, dtype=x.dtype, device=x.device),)
    return partial(Normalisation(weight, eps), x, normed), (normed,)


def prepare_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Sequence[Tensor] | None = None
) -> Prepared:
    """:func:`add_rms_norm` in plain torch."""
    normed, total = out or (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    normalise = Normalisation(weight, eps)

    def run() -> None:
        torch.add(x, residual, out=total)
        normalise(total, normed)

    return run, (normed, total)


_rms_norm = register(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    prepare=prepare_rms_norm,
    cuda="mainspring.kernels.triton.norm:rms_norm",
)
_add_rms_norm = register(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    prepare=prepare_add_rms_norm,
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
