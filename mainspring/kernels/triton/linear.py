"""Products of few rows on a GPU: the skinny kernels where the table or the rule says so, ``torch`` otherwise."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from mainspring.kernels.linear import fused_linear_reference
from mainspring.kernels.triton.gemv_common import Epilogue, Prologue, WeightOperand
from mainspring.kernels.triton.gemv_ops import ROW_LIMITS, check_units, skinny_matmul
from mainspring.kernels.triton.gemv_plan import Tile
from mainspring.kernels.triton.gemv_tables import choose_tile


@cache
def _chosen_tile(n: int, k: int, rows: int, dtype: torch.dtype, device: torch.device) -> Tile:
    return choose_tile(n, k, rows, dtype, device)


def tile_for(x: Tensor, weight: Tensor) -> Tile:
    """The tile for ``x @ weight^T``; the library's where no kernel takes these operands.

    Args:
        x: ``[rows, k]``, or ``[rows, 2 k]`` of a gated product.
        weight: ``[n, k]``.
    """
    rows = x.shape[0]
    if rows == 0 or x.dim() != 2 or x.stride(1) != 1 or weight.stride(1) != 1 or x.dtype != weight.dtype:
        return Tile("library")
    tile = _chosen_tile(weight.shape[0], weight.shape[1], rows, x.dtype, x.device)
    if tile.kernel != "library" and rows > ROW_LIMITS[tile.kernel]:
        return Tile("library")
    if tile.kernel in ("mma", "ring"):
        try:
            check_units(x, WeightOperand.dense(weight), tile)
        except ValueError:
            return Tile("library")
    return tile


def fused_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    swiglu: bool = False,
    gated: bool = False,
) -> Tensor:
    """See :func:`mainspring.kernels.linear.fused_linear`."""
    tile = tile_for(x, weight)
    if tile.kernel == "library":
        return fused_linear_reference(x, weight, bias, norm_weight, eps, residual, swiglu, gated)
    prologue = Prologue.SILU if gated else Prologue.PLAIN if norm_weight is None else Prologue.NORM
    return skinny_matmul(
        x,
        WeightOperand.dense(weight),
        tile,
        bias=bias,
        residual=residual,
        norm_weight=norm_weight,
        eps=eps,
        prologue=prologue,
        epilogue=Epilogue.SWIGLU if swiglu else Epilogue.PLAIN,
    )


def linear_out(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """See :func:`mainspring.kernels.linear.linear`, with ``out``."""
    tile = tile_for(x, weight)
    if tile.kernel == "library" or out.stride(1) != 1:
        torch.addmm(bias, x, weight.t(), out=out) if bias is not None else torch.mm(x, weight.t(), out=out)
    else:
        skinny_matmul(x, WeightOperand.dense(weight), tile, bias=bias, out=out)
