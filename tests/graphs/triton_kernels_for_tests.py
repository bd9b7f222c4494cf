"""Triton kernels that only tests use; a file of their own, since importing it needs Triton."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_rows(x_ptr, out_ptr, columns, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """One row a program, times ROWS: a kernel of its own for each value of that."""
    at = tl.arange(0, WIDTH)
    row = tl.program_id(0) * columns
    x = tl.load(x_ptr + row + at, mask=at < columns, other=0)
    tl.store(out_ptr + row + at, x * ROWS, mask=at < columns)
