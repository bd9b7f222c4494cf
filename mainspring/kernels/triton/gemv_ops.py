"""The skinny products as functions, with the torch references that specify them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from mainspring.kernels.triton.gemv import launch_gemv
from mainspring.kernels.triton.gemv_common import (
    Epilogue,
    Prologue,
    WeightKind,
    WeightOperand,
    interpreting,
    launch,
    pdl_launch_dependents,
    pdl_supported,
    pdl_wait,
)
from mainspring.kernels.triton.gemv_plan import LaunchPlan, Tile
from mainspring.kernels.triton.skinny import launch_skinny

Launch = Callable[[LaunchPlan, tuple[Any, ...]], None]


ROW_LIMITS = {"vector": 8, "dot": 64, "mma": 16, "ring": 16}
"""The most rows that each kernel takes."""


@cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 4 where there is none (the interpreter)."""
    if device.type != "cuda":
        return 4
    return _multiprocessors(torch.cuda.current_device() if device.index is None else device.index)


def reference_matmul(
    x: torch.Tensor,
    weight: WeightOperand,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    prologue: Prologue = Prologue.PLAIN,
    epilogue: Epilogue = Epilogue.PLAIN,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """What ``skinny_matmul`` computes, in ``dtype`` throughout (fp64 is the specification).

    Returns [M, N], [M, N / 2] for ``SWIGLU``, or the indices [M] int64 for ``ARGMAX`` (without rounding the
    values).
    """
    value = x.to(dtype)
    if prologue == Prologue.NORM:
        if norm_weight is None:
            raise ValueError("prologue NORM needs norm_weight")
        value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * norm_weight.to(dtype)
    elif prologue == Prologue.SILU:
        gate, up = value.chunk(2, dim=-1)
        value = torch.nn.functional.silu(gate) * up
    out = value @ weight.dequantised(dtype).T
    if bias is not None:
        out = out + bias.to(dtype)
    if epilogue == Epilogue.ARGMAX:
        return out.argmax(dim=-1)
    if epilogue == Epilogue.SWIGLU:
        gate, up = out.chunk(2, dim=-1)
        out = torch.nn.functional.silu(gate) * up
    if residual is not None:
        out = out + residual.to(dtype)
    return out


def check_units(x: torch.Tensor, weight: WeightOperand, tile: Tile) -> None:
    """Refuse what the Gluon kernels cannot do, in time to say why."""
    if x.device.type != "cuda" or interpreting():
        raise ValueError(f"the {tile.kernel} kernel runs on CUDA devices only; use vector or dot")
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"the {tile.kernel} kernel multiplies bfloat16 and float16, got {x.dtype}; use vector")
    across = tile.warps // tile.split_k
    least = max(32 * tile.warps, (32 if tile.kernel == "mma" else 64) * tile.split_k)
    if across < 1 or tile.block_n < 8 * across or tile.block_k < least:
        raise ValueError(
            f"the {tile.kernel} kernel needs split_k <= warps, block_n >= 8 * warps / split_k and "
            f"block_k >= {least}, got {tile.short()}"
        )
    # Copies to shared memory are of 16 bytes, and the compiler must be able to see that they may be.
    stride, address = weight.tensor.stride(0), weight.tensor.data_ptr()
    if tile.kernel == "ring" and (weight.columns % 16 or stride % 16 or address % 16):
        raise ValueError(
            f"the ring kernel needs K and the weight's row stride to be multiples of 16 and its address one of 16 "
            f"bytes, got K={weight.columns}, stride {stride}, address {address:#x}; use mma"
        )


def make_plan(
    x: torch.Tensor,
    weight: WeightOperand,
    tile: Tile,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    prologue: Prologue = Prologue.PLAIN,
    epilogue: Epilogue = Epilogue.PLAIN,
    pdl: bool | None = None,
    wait: bool = True,
    compile_only: bool = False,
) -> LaunchPlan:
    """Check the operands against each other and say what the launch looks like.

    Raises:
        ValueError: naming the shape, dtype or setting that does not fit.
    """
    rows, k = x.shape[0], weight.columns
    wanted = 2 * k if prologue == Prologue.SILU else k
    if x.dim() != 2 or x.shape[1] != wanted or x.stride(1) != 1:
        raise ValueError(f"x must be [M, {wanted}] with contiguous rows, got {tuple(x.shape)} strides {x.stride()}")
    if weight.kind == WeightKind.DENSE and weight.tensor.dtype != x.dtype:
        raise ValueError(f"x is {x.dtype} and the dense weight {weight.tensor.dtype}; they must agree")
    limit = ROW_LIMITS[tile.kernel]
    if not 1 <= rows <= limit:
        raise ValueError(f"{rows} rows, but the {tile.kernel} kernel takes 1 to {limit}; use another kernel")
    if epilogue == Epilogue.SWIGLU and (weight.rows % 2 or tile.block_n < 2):
        raise ValueError(f"SWIGLU needs an even N and block_n >= 2, got N={weight.rows}, block_n={tile.block_n}")
    if residual is not None and epilogue != Epilogue.PLAIN:
        raise ValueError("a residual can be added by the PLAIN epilogue only")
    if tile.kernel == "dot" and (tile.block_n < 16 or tile.block_k // tile.split_k < 16):
        raise ValueError(f"the dot kernel needs block_n >= 16 and block_k / split_k >= 16, got {tile.short()}")
    if tile.kernel in ("mma", "ring"):
        check_units(x, weight, tile)
    supported = pdl_supported(x.device)
    return LaunchPlan(
        rows=rows,
        n=weight.rows,
        k=k,
        kind=weight.kind,
        prologue=prologue,
        epilogue=epilogue,
        has_bias=bias is not None,
        has_residual=residual is not None,
        tile=tile,
        multiprocessors=multiprocessors(x.device),
        pdl=supported if pdl is None else (pdl and supported),
        wait=wait,
        compile_only=compile_only,
    )


def _launcher(kernel: str) -> Launch:
    if kernel == "vector":
        return launch_gemv
    if kernel == "dot":
        return launch_skinny
    if kernel == "mma":
        from mainspring.kernels.triton.gemv_mma import launch_mma

        return launch_mma
    if kernel == "ring":
        from mainspring.kernels.triton.gemv_ring import launch_ring

        return launch_ring
    raise ValueError(f"no Triton kernel is called {kernel!r}")


def skinny_matmul(
    x: torch.Tensor,
    weight: WeightOperand,
    tile: Tile,
    *,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    prologue: Prologue = Prologue.PLAIN,
    epilogue: Epilogue = Epilogue.PLAIN,
    pdl: bool | None = None,
    wait: bool = True,
    compile_only: bool = False,
) -> torch.Tensor:
    """y = epilogue(prologue(x) @ W^T), sums in fp32.

    Args:
        x: [M, K], or [M, 2K] with prologue ``SILU``; bf16, fp16 or fp32.
        weight: [N, K].
        tile: how to cut it up, see ``choose_tile``.
        out: [M, N] or [M, N / 2] to write into; made when None.
        bias: [N], added to the product.
        residual: [M, N], added last; may be ``out`` itself.
        norm_weight: [K], for prologue ``NORM``.
        eps: of RMSNorm.
        prologue: applied to x by every program, in registers.
        epilogue: ``PLAIN`` or ``SWIGLU``; for ``ARGMAX`` call ``head_argmax``.
        pdl: programmatic dependent launch; None is "where the device can".
        wait: False removes the wait (for the test that needs it removed).
        compile_only: compile the kernel and launch nothing.

    Raises:
        ValueError: when operands or tile do not fit.
    """
    if epilogue == Epilogue.ARGMAX:
        raise ValueError("ARGMAX has two outputs: call head_argmax")
    plan = make_plan(
        x, weight, tile, bias=bias, residual=residual, prologue=prologue, epilogue=epilogue,
        pdl=pdl, wait=wait, compile_only=compile_only,
    )  # fmt: skip
    if out is None:
        columns = plan.n // 2 if epilogue == Epilogue.SWIGLU else plan.n
        out = torch.empty((plan.rows, columns), dtype=x.dtype, device=x.device)
    pointers = (
        x,
        weight.tensor,
        weight.tensor if weight.scales is None else weight.scales,
        out,
        out,
        x if bias is None else bias,
        x if residual is None else residual,
        x if norm_weight is None else norm_weight,
    )
    strides = (
        x.stride(0),
        weight.tensor.stride(0),
        out.stride(0),
        0 if residual is None else residual.stride(0),
    )
    _launcher(tile.kernel)(plan, (*pointers, *strides, eps))
    return out


@triton.jit
def _reduce_argmax_kernel(
    value_ptr, index_ptr, out_ptr, stride, count,
    BLOCK: tl.constexpr, PDL: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    pdl_launch_dependents(PDL)
    pdl_wait(PDL and WAIT)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(value_ptr + row * stride + at, mask=at < count, other=float("-inf"))
        index = tl.load(index_ptr + row * stride + at, mask=at < count, other=0x7FFFFFFF)
        better = (value > best) | ((value == best) & (index < where))
        best = tl.where(better, value, best)
        where = tl.where(better, index, where)
    top = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == top, where, 0x7FFFFFFF), axis=0)
    tl.store(out_ptr + row, winner)


def reduce_argmax(
    values: torch.Tensor,
    indices: torch.Tensor,
    slots: int,
    out: torch.Tensor,
    *,
    pdl: bool,
    wait: bool = True,
    compile_only: bool = False,
) -> None:
    """The second stage of ``head_argmax``: out[m] = the index of the greatest of ``values[m, :slots]``.

    Args:
        values: [M, >= slots] fp32, and ``indices`` of the same strides, int32; of equal values the least
            index wins.
        slots: pairs that count.
        out: [M] int32.
        pdl: programmatic dependent launch.
        wait: False removes the wait (for the test that needs it removed).
        compile_only: compile the kernel and launch nothing.
    """
    launch(
        _reduce_argmax_kernel, out.shape[0], (values, indices, out, values.stride(0), slots),
        {"BLOCK": 64 if interpreting() else 1024, "PDL": pdl, "WAIT": wait},
        warps=4, pdl=pdl, compile_only=compile_only,
    )  # fmt: skip


def argmax_slots(plan: LaunchPlan) -> int:
    """Pairs of value and index that the first stage of ``head_argmax`` leaves for each row."""
    return plan.tiles if plan.tile.kernel == "dot" else plan.programs


def head_argmax(
    x: torch.Tensor,
    weight: WeightOperand,
    tile: Tile,
    *,
    out: torch.Tensor | None = None,
    workspace: tuple[torch.Tensor, torch.Tensor] | None = None,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    prologue: Prologue = Prologue.PLAIN,
    pdl: bool | None = None,
    wait: bool = True,
    compile_only: bool = False,
) -> torch.Tensor:
    """Index of the greatest element of each row of ``prologue(x) @ W^T``; the product is never stored.

    Values are rounded to x's dtype before they are compared, and of equal ones the first wins, so the
    answer is that of ``argmax`` over stored logits with the same sums.

    Args:
        out: [M] int32 to write into.
        workspace: (float32, int32) of at least [M, slots] each, see ``argmax_slots``; made when None.
        wait: False removes the first stage's wait (for the test that needs it removed).

    Returns:
        [M] int32.
    """
    plan = make_plan(
        x, weight, tile, bias=bias, prologue=prologue, epilogue=Epilogue.ARGMAX,
        pdl=pdl, wait=wait, compile_only=compile_only,
    )  # fmt: skip
    slots = argmax_slots(plan)
    if out is None:
        out = torch.empty(plan.rows, dtype=torch.int32, device=x.device)
    if workspace is None:
        workspace = (
            torch.empty((plan.rows, slots), dtype=torch.float32, device=x.device),
            torch.empty((plan.rows, slots), dtype=torch.int32, device=x.device),
        )
    values, indices = workspace
    if values.shape[1] < slots or values.stride() != indices.stride():
        raise ValueError(f"the workspace has {values.shape[1]} slots a row, the tile {tile.short()} needs {slots}")
    pointers = (
        x,
        weight.tensor,
        weight.tensor if weight.scales is None else weight.scales,
        values,
        indices,
        x if bias is None else bias,
        x,
        x if norm_weight is None else norm_weight,
    )
    strides = (x.stride(0), weight.tensor.stride(0), values.stride(0), 0)
    _launcher(tile.kernel)(plan, (*pointers, *strides, eps))
    reduce_argmax(values, indices, slots, out, pdl=plan.pdl, compile_only=compile_only)
    return out
