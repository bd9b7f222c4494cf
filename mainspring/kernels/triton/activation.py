"""Triton kernel of :mod:`mainspring.kernels.activation`."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mainspring.kernels.triton import pdl
from mainspring.kernels.triton.pdl import pdl_launch_dependents, pdl_wait
from mainspring.kernels.triton.sizes import cdiv

_BLOCK = 1024


@triton.jit
def _silu_and_mul_kernel(gate_up_ptr, out_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(gate_up_ptr + row * 2 * size + columns, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * size + size + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row * size + columns, (activated * up.to(tl.float32)).to(gate.dtype), mask=inside)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See :func:`mainspring.kernels.activation.silu_and_mul`."""
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], size))
    rows = out.numel() // size
    if rows:
        _silu_and_mul_kernel[(rows, cdiv(size, _BLOCK))](
            gate_up, out, size, BLOCK=_BLOCK, **pdl.options(pdl.mode(out.device))
        )
    return out
