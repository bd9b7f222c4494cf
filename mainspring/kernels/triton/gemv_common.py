"""What the skinny matrix products share: the weight operand, the PDL switch and the operation they compute.

A *skinny* product is ``y[M, N] = x[M, K] @ W[N, K]^T`` with so few rows ``M`` that the time is the time it
takes to read ``W``. Programmatic dependent launch (PDL) lets such a kernel start while the one before it
still runs; it may then load weights, which nobody changes, but must wait before it reads an activation or
writes anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import triton
import triton.language as tl

from mainspring.kernels.triton.pdl import interpreting as interpreting
from mainspring.kernels.triton.pdl import pdl_launch_dependents as pdl_launch_dependents
from mainspring.kernels.triton.pdl import pdl_supported as pdl_supported
from mainspring.kernels.triton.pdl import pdl_wait as pdl_wait


class Prologue(IntEnum):
    """What happens to ``x`` before the product."""

    PLAIN = 0
    NORM = 1
    """RMSNorm over the K elements of each row, with ``norm_weight``."""
    SILU = 2
    """``x`` is [M, 2K]: ``silu(x[:, :K]) * x[:, K:]``."""


class Epilogue(IntEnum):
    """What happens to the product before it is stored."""

    PLAIN = 0
    """Stored, after ``+ bias`` and ``+ residual`` where they are given."""
    SWIGLU = 1
    """W holds gate rows, then as many up rows: ``silu(gate) * up`` is stored, [M, N / 2]."""
    ARGMAX = 2
    """Only the greatest value of each row and its index are kept, one pair a program."""


class WeightKind(IntEnum):
    """How the bytes of a weight become numbers."""

    DENSE = 0
    """One element a weight: bf16, fp16 or fp32."""
    ROW_SCALED = 1
    """One 8-bit element a weight (fp8 e4m3 or int8) and one fp32 factor a row, applied to the finished sum.
    """


@dataclass(frozen=True)
class WeightOperand:
    """A weight as a kernel reads it.

    Kernels fetch the stored tile before the wait (``load_tile``) and decode it where it is used
    (``decode_tile``), so a packed kind travels packed and a new kind needs a branch in those two functions
    only.

    Args:
        kind: how the bytes are to be read.
        tensor: [N, K], rows contiguous.
        scales: [N] fp32 for ``ROW_SCALED``, else None.

    Raises:
        ValueError: when shapes, strides or dtypes do not fit the kind.
    """

    kind: WeightKind
    tensor: torch.Tensor
    scales: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Check that tensor and scales fit the kind."""
        if self.tensor.dim() != 2 or self.tensor.stride(1) != 1:
            raise ValueError(
                f"a weight must be [N, K] with contiguous rows, got {tuple(self.tensor.shape)} and strides "
                f"{self.tensor.stride()}; call .contiguous() first"
            )
        if self.kind == WeightKind.DENSE:
            if self.tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
                raise ValueError(f"a dense weight is bfloat16, float16 or float32, got {self.tensor.dtype}")
            if self.scales is not None:
                raise ValueError("a dense weight has no scales; use WeightKind.ROW_SCALED")
        else:
            if self.tensor.dtype not in (torch.int8, torch.float8_e4m3fn):
                raise ValueError(f"a row-scaled weight is int8 or float8_e4m3fn, got {self.tensor.dtype}")
            if self.scales is None or self.scales.shape != (self.rows,) or self.scales.dtype != torch.float32:
                raise ValueError(f"a row-scaled weight needs float32 scales of shape ({self.rows},)")

    @property
    def rows(self) -> int:
        """N, the number of outputs."""
        return self.tensor.shape[0]

    @property
    def columns(self) -> int:
        """K, the number of inputs."""
        return self.tensor.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes a product reads of this weight."""
        scales = 0 if self.scales is None else self.scales.numel() * self.scales.element_size()
        return self.tensor.numel() * self.tensor.element_size() + scales

    @classmethod
    def dense(cls, tensor: torch.Tensor) -> WeightOperand:
        """A plain [N, K] weight."""
        return cls(WeightKind.DENSE, tensor)

    @classmethod
    def row_scaled(cls, tensor: torch.Tensor, dtype: torch.dtype = torch.int8) -> WeightOperand:
        """Quantise a [N, K] weight to 8 bits with one factor a row (round to nearest)."""
        limit = 127.0 if dtype == torch.int8 else 448.0
        scales = (tensor.float().abs().amax(dim=1) / limit).clamp_min(1e-12)
        scaled = tensor.float() / scales[:, None]
        stored = scaled.round().to(dtype) if dtype == torch.int8 else scaled.to(dtype)
        return cls(WeightKind.ROW_SCALED, stored.contiguous(), scales)

    def dequantised(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The [N, K] numbers this weight stands for."""
        values = self.tensor.to(dtype)
        return values if self.scales is None else values * self.scales.to(dtype)[:, None]


def launch(
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    *,
    warps: int,
    pdl: bool,
    compile_only: bool = False,
) -> None:
    """Start ``programs`` programs of a Triton or Gluon kernel, or only compile it."""
    options: dict[str, Any] = {"num_warps": warps, **constants}
    if pdl:
        options["launch_pdl"] = True
    if compile_only:
        kernel.warmup(*arguments, grid=(programs,), **options)
    else:
        kernel[(programs,)](*arguments, **options)


@triton.jit
def load_tile(w_ptr, offsets, mask, MASKED: tl.constexpr, EVICT: tl.constexpr):
    """Fetch a weight tile as it is stored. ``offsets`` are in elements of ``w_ptr``."""
    if MASKED:
        return tl.load(w_ptr + offsets, mask=mask, other=0, eviction_policy=EVICT)
    else:
        return tl.load(w_ptr + offsets, eviction_policy=EVICT)


@triton.jit
def decode_tile(stored, KIND: tl.constexpr, dtype: tl.constexpr):
    """Turn a fetched tile into numbers of ``dtype``, without the factors that ``scale_rows`` applies."""
    if KIND == 1:
        return stored.to(tl.float32).to(dtype)
    else:
        return stored.to(dtype)


@triton.jit
def scale_rows(total, scale_ptr, rows, row_mask, KIND: tl.constexpr):
    """Apply what a kind leaves for the finished sums; ``rows`` are the rows of W along the last axis of
    ``total``.
    """
    if KIND == 1:
        return total * tl.load(scale_ptr + rows, mask=row_mask, other=0.0)
    else:
        return total


@triton.jit
def silu(v):
    """v * sigmoid(v), fp32."""
    return v / (1.0 + tl.exp(-v))
