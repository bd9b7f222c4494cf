"""Skinny matrix product on the matrix units, for 1 to 64 rows of bf16, fp16 or (exactly) fp32.

Rows of x are padded to 16 for the matrix units. The first ``prefetch`` chunks of W are in registers before
the wait; the rest go through Triton's software pipeline, which starts after it. ``split_k`` slices of each
chunk are separate products (a batched ``tl.dot``), so that several warps share a tile of few rows.
"""

# Inside of kernels a name may hold tuples of any length.
# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from mainspring.kernels.triton.gemv import fetch_chunk, rows_exist, weight_rows
from mainspring.kernels.triton.gemv_common import (
    decode_tile,
    interpreting,
    launch,
    pdl_launch_dependents,
    pdl_wait,
    scale_rows,
    silu,
)
from mainspring.kernels.triton.gemv_plan import LaunchPlan


@triton.jit
def read_rows(
    x_ptr, norm_ptr, k0, stride_x,
    M: tl.constexpr, K: tl.constexpr, PADDED: tl.constexpr, BLOCK_K: tl.constexpr, PROLOGUE: tl.constexpr,
):  # fmt: skip
    """A [PADDED, BLOCK_K] chunk of the prepared input in x's dtype, and RMSNorm's sums of squares."""
    rows = tl.arange(0, PADDED)[:, None]
    columns = k0 + tl.arange(0, BLOCK_K)[None, :]
    mask = (rows < M) & (columns < K)
    stored = tl.load(x_ptr + rows * stride_x + columns, mask=mask, other=0.0)
    if PROLOGUE == 1:
        x = stored.to(tl.float32)
        weight = tl.load(norm_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)
        return (x * weight).to(x_ptr.dtype.element_ty), tl.sum(x * x, axis=1)
    elif PROLOGUE == 2:
        up = tl.load(x_ptr + rows * stride_x + K + columns, mask=mask, other=0.0).to(tl.float32)
        return (silu(stored.to(tl.float32)) * up).to(x_ptr.dtype.element_ty), tl.zeros([PADDED], tl.float32)
    else:
        return stored, tl.zeros([PADDED], tl.float32)


@triton.jit
def multiply(
    w, x, acc,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PADDED: tl.constexpr, SPLIT_K: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """acc + w @ x^T; with SPLIT_K > 1 acc is [SPLIT_K, BLOCK_N, PADDED], a sum for each slice of the chunk.

    WIDEN: multiply in fp32, for the interpreter, whose ``tl.dot`` takes the bits of bf16 for integers.
    """
    if WIDEN:
        w = w.to(tl.float32)
        x = x.to(tl.float32)
    if SPLIT_K == 1:
        return tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    else:
        w3 = tl.permute(tl.reshape(w, [BLOCK_N, SPLIT_K, BLOCK_K // SPLIT_K]), (1, 0, 2))
        x3 = tl.permute(tl.reshape(x, [PADDED, SPLIT_K, BLOCK_K // SPLIT_K]), (1, 2, 0))
        return tl.dot(w3, x3, acc, input_precision="ieee")


@triton.jit
def _skinny_kernel(
    x_ptr, w_ptr, scale_ptr, y_ptr, index_ptr, bias_ptr, residual_ptr, norm_ptr,
    stride_x, stride_w, stride_y, stride_residual, eps,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PREFETCH: tl.constexpr, SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr, PROLOGUE: tl.constexpr, EPILOGUE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    WIDEN: tl.constexpr, EVICT: tl.constexpr, PDL: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    PAIRED: tl.constexpr = EPILOGUE == 1
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    DEPTH: tl.constexpr = PREFETCH if PREFETCH < CHUNKS else CHUNKS
    dtype = x_ptr.dtype.element_ty
    tile = tl.program_id(0)

    ahead = ()
    for c in tl.static_range(DEPTH):
        ahead = ahead + (fetch_chunk(w_ptr, tile, c * BLOCK_K, stride_w, N, K, BLOCK_N, BLOCK_K, PAIRED, False, EVICT),)
    pdl_launch_dependents(PDL)
    pdl_wait(PDL and WAIT)

    if SPLIT_K == 1:
        acc = tl.zeros([BLOCK_N, PADDED], tl.float32)
    else:
        acc = tl.zeros([SPLIT_K, BLOCK_N, PADDED], tl.float32)
    squares = tl.zeros([PADDED], tl.float32)
    for c in tl.static_range(DEPTH):
        x, chunk_squares = read_rows(x_ptr, norm_ptr, c * BLOCK_K, stride_x, M, K, PADDED, BLOCK_K, PROLOGUE)
        squares += chunk_squares
        acc = multiply(decode_tile(ahead[c], KIND, dtype), x, acc, BLOCK_N, BLOCK_K, PADDED, SPLIT_K, WIDEN)
    if DEPTH < CHUNKS:
        for c in tl.range(DEPTH, CHUNKS, num_stages=STAGES):
            stored = fetch_chunk(w_ptr, tile, c * BLOCK_K, stride_w, N, K, BLOCK_N, BLOCK_K, PAIRED, False, EVICT)
            x, chunk_squares = read_rows(x_ptr, norm_ptr, c * BLOCK_K, stride_x, M, K, PADDED, BLOCK_K, PROLOGUE)
            squares += chunk_squares
            acc = multiply(decode_tile(stored, KIND, dtype), x, acc, BLOCK_N, BLOCK_K, PADDED, SPLIT_K, WIDEN)
    total = acc if SPLIT_K == 1 else tl.sum(acc, axis=0)

    rows = weight_rows(tile, N, BLOCK_N, PAIRED)
    row_mask = rows_exist(tile, N, BLOCK_N, PAIRED)
    batch = tl.arange(0, PADDED)
    if PROLOGUE == 1:
        total = total * (1.0 / tl.sqrt(squares / K + eps))[None, :]
    total = scale_rows(tl.trans(total), scale_ptr, rows[None, :], row_mask[None, :], KIND)
    if HAS_BIAS:
        total += tl.load(bias_ptr + rows, mask=row_mask, other=0.0).to(tl.float32)[None, :]
    if EPILOGUE == 1:
        outputs = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        gate, up = tl.split(tl.reshape(total, [PADDED, BLOCK_N // 2, 2]))
        keep = (batch[:, None] < M) & (outputs[None, :] < N // 2)
        tl.store(y_ptr + batch[:, None] * stride_y + outputs[None, :], (silu(gate) * up).to(dtype), mask=keep)
    elif EPILOGUE == 2:
        value = tl.where(row_mask[None, :], total.to(dtype).to(tl.float32), float("-inf"))
        top = tl.max(value, axis=1)
        where = tl.min(tl.where(value == top[:, None], rows[None, :], 0x7FFFFFFF), axis=1)
        tl.store(y_ptr + batch * stride_y + tile, top, mask=batch < M)
        tl.store(index_ptr + batch * stride_y + tile, where, mask=batch < M)
    else:
        keep = (batch[:, None] < M) & row_mask[None, :]
        if HAS_RESIDUAL:
            offsets = batch[:, None] * stride_residual + rows[None, :]
            total += tl.load(residual_ptr + offsets, mask=keep, other=0.0).to(tl.float32)
        tl.store(y_ptr + batch[:, None] * stride_y + rows[None, :], total.to(dtype), mask=keep)


def launch_skinny(plan: LaunchPlan, arguments: tuple[Any, ...]) -> None:
    """Run the matrix-unit kernel as ``plan`` says; ``skinny_matmul`` prepares the arguments."""
    tile = plan.tile
    constants = {
        **plan.constants,
        "PADDED": max(16, triton.next_power_of_2(plan.rows)),
        "PREFETCH": tile.prefetch,
        "SPLIT_K": tile.split_k,
        "STAGES": tile.stages,
        "WIDEN": interpreting(),
    }
    launch(_skinny_kernel, plan.tiles, arguments, constants,
           warps=tile.warps, pdl=plan.pdl, compile_only=plan.compile_only)  # fmt: skip
