"""Triton kernels of :mod:`mainspring.kernels.norm`: one program a row, statistics in fp32."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mainspring.kernels.triton import pdl
from mainspring.kernels.triton.pdl import pdl_launch_dependents, pdl_wait
from mainspring.kernels.triton.sizes import next_power_of_2


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    eps,
    size,
    inner_rows,
    x_outer_stride,
    x_inner_stride,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    start = (row // inner_rows) * x_outer_stride + (row % inner_rows) * x_inner_stride
    x = tl.load(x_ptr + start + columns, mask=inside, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row * size + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row * size + columns, x, mask=inside)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 0) / size + eps)
    normed = (wide * scale).to(x.dtype).to(tl.float32)
    tl.store(out_ptr + row * size + columns, (normed * weight).to(x.dtype), mask=inside)


def _warps(block: int) -> int:
    return min(max(block // 256, 1), 16)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See :func:`mainspring.kernels.norm.rms_norm`."""
    size = x.shape[-1]
    if x.dim() != 3 or x.stride(-1) != 1:
        x = x.contiguous()
        outer_stride, inner_stride, inner_rows = size, 0, 1
    else:
        outer_stride, inner_stride, inner_rows = x.stride(0), x.stride(1), x.shape[1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = out.numel() // size
    if rows:
        block = next_power_of_2(size)
        _rms_norm_kernel[(rows,)](
            x, x, weight, out, out, eps, size, inner_rows, outer_stride, inner_stride,
            ADD=False, BLOCK=block, num_warps=_warps(block), **pdl.options(pdl.mode(x.device)),
        )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See :func:`mainspring.kernels.norm.add_rms_norm`."""
    size = x.shape[-1]
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    rows = x.numel() // size
    if rows:
        block = next_power_of_2(size)
        _rms_norm_kernel[(rows,)](
            x, residual, weight, out, total, eps, size, 1, size, 0,
            ADD=True, BLOCK=block, num_warps=_warps(block), **pdl.options(pdl.mode(x.device)),
        )  # fmt: skip
    return out, total
