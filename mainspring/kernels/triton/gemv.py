"""Matrix-vector product on the vector units, for 1 to 8 rows of any float dtype.

A program owns ``block_n`` rows of W at a time and walks K in chunks of ``block_k``. The first ``prefetch``
chunks are in registers before the program waits for the kernel before it. With ``programs`` below the
number of tiles, a program takes several tiles, and fetches the first chunks of the next one while it
finishes this one.
"""

# Inside of kernels a name may hold tuples of any length.
# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from mainspring.kernels.triton.gemv_common import (
    decode_tile,
    launch,
    load_tile,
    pdl_launch_dependents,
    pdl_wait,
    scale_rows,
    silu,
)
from mainspring.kernels.triton.gemv_plan import LaunchPlan


@triton.jit
def weight_rows(tile, N: tl.constexpr, BLOCK_N: tl.constexpr, PAIRED: tl.constexpr):
    """Which rows of W a tile holds: consecutive ones, or alternately a gate row and its up row."""
    local = tl.arange(0, BLOCK_N)
    if PAIRED:
        return tile * (BLOCK_N // 2) + local // 2 + (local % 2) * (N // 2)
    else:
        return tile * BLOCK_N + local


@triton.jit
def rows_exist(tile, N: tl.constexpr, BLOCK_N: tl.constexpr, PAIRED: tl.constexpr):
    """Which of a tile's rows are inside W; none of them for a tile beyond the last."""
    local = tl.arange(0, BLOCK_N)
    if PAIRED:
        return tile * (BLOCK_N // 2) + local // 2 < N // 2
    else:
        return tile * BLOCK_N + local < N


@triton.jit
def fetch_chunk(
    w_ptr, tile, k0, stride_w,
    N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PAIRED: tl.constexpr, MAY_END: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """One [BLOCK_N, BLOCK_K] chunk of W as stored; zeros outside of it. MAY_END: the tile may be beyond the
    last.
    """
    rows = weight_rows(tile, N, BLOCK_N, PAIRED)
    columns = k0 + tl.arange(0, BLOCK_K)
    offsets = rows.to(tl.int64)[:, None] * stride_w + columns[None, :]
    ragged_n: tl.constexpr = N % BLOCK_N != 0
    ragged_k: tl.constexpr = K % BLOCK_K != 0
    mask = rows_exist(tile, N, BLOCK_N, PAIRED)[:, None] & (columns[None, :] < K)
    return load_tile(w_ptr, offsets, mask, ragged_n or ragged_k or MAY_END, EVICT)


@triton.jit
def read_gain(norm_ptr, k0, K: tl.constexpr, BLOCK_K: tl.constexpr, PROLOGUE: tl.constexpr):
    """RMSNorm's weight for a chunk, [1, BLOCK_K]; it never changes, so it may be read before the wait."""
    if PROLOGUE == 1:
        columns = (k0 + tl.arange(0, BLOCK_K))[None, :]
        return tl.load(norm_ptr + columns, mask=columns < K, other=0.0)
    else:
        return 0


@triton.jit
def read_x(x_ptr, gain, row, k0, stride_x, K: tl.constexpr, BLOCK_K: tl.constexpr, PROLOGUE: tl.constexpr):
    """A [1, BLOCK_K] chunk of the prepared input in fp32, and the chunk before RMSNorm's weight."""
    columns = (k0 + tl.arange(0, BLOCK_K))[None, :]
    mask = columns < K
    base = x_ptr + row * stride_x
    x = tl.load(base + columns, mask=mask, other=0.0).to(tl.float32)
    if PROLOGUE == 1:
        return x * gain.to(tl.float32), x
    elif PROLOGUE == 2:
        up = tl.load(base + K + columns, mask=mask, other=0.0).to(tl.float32)
        return silu(x) * up, x
    else:
        return x, x


@triton.jit
def read_beside(
    tile, row, bias_ptr, residual_ptr, stride_residual,
    N: tl.constexpr, BLOCK_N: tl.constexpr, PAIRED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """What is added to a tile's sums for one row of x; read before them so as not to wait for it after."""
    rows = weight_rows(tile, N, BLOCK_N, PAIRED)
    row_mask = rows_exist(tile, N, BLOCK_N, PAIRED)
    addition = tl.zeros([BLOCK_N], tl.float32)
    if HAS_BIAS:
        addition += tl.load(bias_ptr + rows, mask=row_mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        addition += tl.load(residual_ptr + row * stride_residual + rows, mask=row_mask, other=0.0).to(tl.float32)
    return addition


@triton.jit
def finish_tile(
    sums, squares, additions, best_value, best_index, tile,
    scale_ptr, y_ptr, stride_y, eps,
    out_type: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr,
    BLOCK_N: tl.constexpr, PROLOGUE: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """Add up a tile's products over K and store them, or keep the best of each row of x."""
    rows = weight_rows(tile, N, BLOCK_N, EPILOGUE == 1)
    row_mask = rows_exist(tile, N, BLOCK_N, EPILOGUE == 1)
    new_value = ()
    new_index = ()
    for m in tl.static_range(M):
        total = tl.sum(sums[m], axis=1)
        if PROLOGUE == 1:
            mean = tl.sum(tl.sum(squares[m], axis=1), axis=0) / K
            total = total * (1.0 / tl.sqrt(mean + eps))
        total = scale_rows(total, scale_ptr, rows, row_mask, KIND) + additions[m]
        if EPILOGUE == 1:
            outputs = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            gate, up = tl.split(tl.reshape(total, [BLOCK_N // 2, 2]))
            tl.store(y_ptr + m * stride_y + outputs, (silu(gate) * up).to(out_type), mask=outputs < N // 2)
        elif EPILOGUE == 2:
            value = tl.where(row_mask, total.to(out_type).to(tl.float32), float("-inf"))
            top = tl.max(value, axis=0)
            where = tl.min(tl.where(value == top, rows, 0x7FFFFFFF), axis=0)
            better = top > best_value[m]
            new_value = new_value + (tl.where(better, top, best_value[m]),)
            new_index = new_index + (tl.where(better, where, best_index[m]),)
        else:
            tl.store(y_ptr + m * stride_y + rows, total.to(out_type), mask=row_mask)
    if EPILOGUE == 2:
        return new_value, new_index
    else:
        return best_value, best_index


@triton.jit
def _gemv_kernel(
    x_ptr, w_ptr, scale_ptr, y_ptr, index_ptr, bias_ptr, residual_ptr, norm_ptr,
    stride_x, stride_w, stride_y, stride_residual, eps,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PREFETCH: tl.constexpr, PROGRAMS: tl.constexpr,
    PROLOGUE: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    INNER: tl.constexpr, EVICT: tl.constexpr, PDL: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    PAIRED: tl.constexpr = EPILOGUE == 1
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    DEPTH: tl.constexpr = PREFETCH if PREFETCH < CHUNKS else CHUNKS
    ROUNDS: tl.constexpr = (TILES + PROGRAMS - 1) // PROGRAMS
    VECTOR: tl.constexpr = 8 if INNER else 1
    pid = tl.program_id(0)

    ahead = ()
    for c in tl.static_range(DEPTH):
        ahead = ahead + (fetch_chunk(w_ptr, pid, c * BLOCK_K, stride_w, N, K, BLOCK_N, BLOCK_K, PAIRED, False, EVICT),)
    gains = ()
    for c in tl.static_range(CHUNKS):
        gains = gains + (read_gain(norm_ptr, c * BLOCK_K, K, BLOCK_K, PROLOGUE),)
    pdl_launch_dependents(PDL)
    pdl_wait(PDL and WAIT)

    best_value = ()
    best_index = ()
    for _m in tl.static_range(M):
        best_value = best_value + (float("-inf") + tl.zeros([], tl.float32),)
        best_index = best_index + (0x7FFFFFFF + tl.zeros([], tl.int32),)

    for turn in tl.range(ROUNDS, num_stages=1):
        tile = pid + turn * PROGRAMS
        sums = ()
        squares = ()
        additions = ()
        for m in tl.static_range(M):
            additions = additions + (
                read_beside(
                    tile,
                    m,
                    bias_ptr,
                    residual_ptr,
                    stride_residual,
                    N,
                    BLOCK_N,
                    PAIRED,
                    HAS_BIAS,
                    HAS_RESIDUAL,
                ),
            )
            sums = sums + (tl.zeros([BLOCK_N, BLOCK_K // VECTOR], tl.float32),)
            squares = squares + (tl.zeros([1, BLOCK_K], tl.float32),)
        for c in tl.static_range(CHUNKS):
            stored = ahead[0]
            if c + DEPTH < CHUNKS:
                following = fetch_chunk(
                    w_ptr, tile, (c + DEPTH) * BLOCK_K, stride_w,
                    N, K, BLOCK_N, BLOCK_K, PAIRED, ROUNDS * PROGRAMS != TILES, EVICT,
                )  # fmt: skip
            elif ROUNDS > 1:
                following = fetch_chunk(
                    w_ptr, tile + PROGRAMS, (c + DEPTH - CHUNKS) * BLOCK_K, stride_w,
                    N, K, BLOCK_N, BLOCK_K, PAIRED, True, EVICT,
                )  # fmt: skip
            else:
                following = stored
            ahead = ahead[1:] + (following,)
            w = decode_tile(stored, KIND, tl.float32)
            new_sums = ()
            new_squares = ()
            for m in tl.static_range(M):
                prepared, plain = read_x(x_ptr, gains[c], m, c * BLOCK_K, stride_x, K, BLOCK_K, PROLOGUE)
                product = w * prepared
                if INNER:
                    product = tl.sum(tl.reshape(product, [BLOCK_N, BLOCK_K // VECTOR, VECTOR]), axis=2)
                new_sums = new_sums + (sums[m] + product,)
                if PROLOGUE == 1:
                    new_squares = new_squares + (squares[m] + plain * plain,)
                else:
                    new_squares = new_squares + (squares[m],)
            sums = new_sums
            squares = new_squares
        best_value, best_index = finish_tile(
            sums, squares, additions, best_value, best_index, tile,
            scale_ptr, y_ptr, stride_y, eps, x_ptr.dtype.element_ty,
            M, N, K, KIND, BLOCK_N, PROLOGUE, EPILOGUE,
        )  # fmt: skip

    if EPILOGUE == 2:
        for m in tl.static_range(M):
            tl.store(y_ptr + m * stride_y + pid, best_value[m])
            tl.store(index_ptr + m * stride_y + pid, best_index[m])


def launch_gemv(plan: LaunchPlan, arguments: tuple[Any, ...]) -> None:
    """Run the vector kernel as ``plan`` says; ``skinny_matmul`` prepares the arguments."""
    tile = plan.tile
    constants = {
        **plan.constants,
        "PREFETCH": tile.prefetch,
        "PROGRAMS": plan.programs,
        "INNER": tile.inner,
    }
    launch(_gemv_kernel, plan.programs, arguments, constants,
           warps=tile.warps, pdl=plan.pdl, compile_only=plan.compile_only)  # fmt: skip
