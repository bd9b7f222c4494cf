"""Skinny matrix product on the matrix units with the weights straight from memory into their registers
(Gluon).

For 1 to 16 rows of bf16 or fp16. Triton would carry each weight tile through shared memory to reach the
layout that the matrix units want. Here W is loaded in that layout: the sum over K may be taken in any
order, so lanes hold runs of 8 neighbouring elements (16 bytes) of both operands and the instruction's K
indices are matched run by run. Each warp owns a slice of K (``split_k`` warps) of all the tile's rows; the
slices meet once, through shared memory, at the end. What remains after the wait is to read x, multiply, and
that one exchange.
"""

# Inside of kernels a name may hold tuples of any length.
# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mainspring.kernels.triton.gemv_common import Prologue, launch
from mainspring.kernels.triton.gemv_plan import LaunchPlan


@gluon.constexpr_function
def next_power(value):
    """The least power of two that is not below ``value``."""
    return 1 << (value - 1).bit_length()


REINTERPRET_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def as_chunks(room, SPLIT_K: gl.constexpr, BLOCK_K: gl.constexpr):
    """Shared memory [LENGTH] seen as [LENGTH / BLOCK_K, SPLIT_K, 1, BLOCK_K / SPLIT_K]."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    shape: gl.constexpr = [room.shape[0] // BLOCK_K, SPLIT_K, 1, BLOCK_K // SPLIT_K]
    if REINTERPRET_IS_PUBLIC:
        return room.reinterpret(room.dtype, shape, layout)
    else:
        return room._reinterpret(room.dtype, shape, layout)


@gluon.jit
def silu(v):
    """v * sigmoid(v), fp32."""
    return v / (1.0 + gl.exp(-v))


@gluon.jit
def tile_rows(tile, local, N: gl.constexpr, BLOCK_N: gl.constexpr, PAIRED: gl.constexpr):
    """Rows of W for the places ``local`` of a tile: consecutive ones, or alternately a gate row and its up
    row.
    """
    if PAIRED:
        return tile * (BLOCK_N // 2) + local // 2 + (local % 2) * (N // 2)
    else:
        return tile * BLOCK_N + local


@gluon.jit
def tile_rows_exist(tile, local, N: gl.constexpr, BLOCK_N: gl.constexpr, PAIRED: gl.constexpr):
    """Which places of a tile hold a row of W; none in a tile beyond the last."""
    if PAIRED:
        return tile * (BLOCK_N // 2) + local // 2 < N // 2
    else:
        return tile * BLOCK_N + local < N


@gluon.jit
def fetch_weights(
    w_ptr, tile, k0, stride_w, layout: gl.constexpr,
    N: gl.constexpr, K: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, SPLIT_K: gl.constexpr,
    PAIRED: gl.constexpr, MAY_END: gl.constexpr, EVICT: gl.constexpr,
):  # fmt: skip
    """A chunk of W as [SPLIT_K, BLOCK_K / SPLIT_K, BLOCK_N], the right-hand operand; zeros outside of W."""
    SLICE: gl.constexpr = BLOCK_K // SPLIT_K
    part = gl.arange(0, SPLIT_K, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    inside = gl.arange(0, SLICE, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    local = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    columns = k0 + part * SLICE + inside
    rows = tile_rows(tile, local, N, BLOCK_N, PAIRED)
    pointers = w_ptr + rows.to(gl.int64) * stride_w + columns
    if MAY_END or N % BLOCK_N != 0 or K % BLOCK_K != 0:
        mask = tile_rows_exist(tile, local, N, BLOCK_N, PAIRED) & (columns < K)
        return gl.load(pointers, mask=mask, other=0.0, eviction_policy=EVICT)
    else:
        return gl.load(pointers, eviction_policy=EVICT)


@gluon.jit
def read_gain(
    norm_ptr, k0, layout: gl.constexpr, K: gl.constexpr, BLOCK_K: gl.constexpr, SPLIT_K: gl.constexpr,
    PROLOGUE: gl.constexpr,
):  # fmt: skip
    """RMSNorm's weight for a chunk, [SPLIT_K, 1, BLOCK_K / SPLIT_K]; it never changes, so it may be read
    early.
    """
    SLICE: gl.constexpr = BLOCK_K // SPLIT_K
    part = gl.arange(0, SPLIT_K, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    inside = gl.arange(0, SLICE, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    columns = k0 + part * SLICE + inside
    if PROLOGUE == 1:
        return gl.load(norm_ptr + columns, mask=columns < K, other=0.0)
    else:
        return 0


@gluon.jit
def read_x(
    x_ptr, gain, k0, stride_x, count, layout: gl.constexpr,
    K: gl.constexpr, ROWS: gl.constexpr, BLOCK_K: gl.constexpr, SPLIT_K: gl.constexpr,
    PROLOGUE: gl.constexpr,
):  # fmt: skip
    """A chunk of x as [SPLIT_K, ROWS, BLOCK_K / SPLIT_K], and its squares before RMSNorm's weight."""
    SLICE: gl.constexpr = BLOCK_K // SPLIT_K
    part = gl.arange(0, SPLIT_K, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    inside = gl.arange(0, SLICE, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    columns = k0 + part * SLICE + inside
    pointers = x_ptr + rows * stride_x + columns
    mask = (columns < K) & (rows < count)
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    stored = gl.load(pointers, mask=mask, other=0.0)
    if PROLOGUE == 1:
        x = stored.to(gl.float32)
        return (x * gain.to(gl.float32)).to(dtype), x * x
    elif PROLOGUE == 2:
        up = gl.load(pointers + K, mask=mask, other=0.0).to(gl.float32)
        return (silu(stored.to(gl.float32)) * up).to(dtype), 0
    else:
        return stored, 0


@gluon.jit
def read_flat(pointer, layout: gl.constexpr, K: gl.constexpr, LENGTH: gl.constexpr):
    """K elements as [LENGTH], zeros behind them."""
    columns = gl.arange(0, LENGTH, layout=layout)
    return gl.load(pointer + columns, mask=columns < K, other=0.0)


@gluon.jit
def stage_x(
    staged, x_ptr, gain, eps, layout: gl.constexpr,
    K: gl.constexpr, LENGTH: gl.constexpr, PROLOGUE: gl.constexpr,
):  # fmt: skip
    """Put the one row of x, prepared, into shared memory [LENGTH]; returns RMSNorm's factor (1 without the
    norm).
    """
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    x = read_flat(x_ptr, layout, K, LENGTH)
    scale = 1.0
    if PROLOGUE == 1:
        wide = x.to(gl.float32)
        staged.store((wide * gain.to(gl.float32)).to(dtype))
        scale = 1.0 / gl.sqrt(gl.sum(wide * wide, axis=0) / K + eps)
    elif PROLOGUE == 2:
        up = read_flat(x_ptr + K, layout, K, LENGTH).to(gl.float32)
        staged.store((silu(x.to(gl.float32)) * up).to(dtype))
    else:
        staged.store(x)
    return scale


@gluon.jit
def read_beside(
    tile, gather: gl.constexpr, scale_ptr, bias_ptr, residual_ptr, stride_residual, count,
    N: gl.constexpr, KIND: gl.constexpr, PADDED: gl.constexpr, BLOCK_N: gl.constexpr,
    PAIRED: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """What a tile's sums are multiplied with and what is added to them; read before the sums so as not to
    wait after.
    """
    layout: gl.constexpr = gl.SliceLayout(0, gather)
    batch = gl.arange(0, PADDED, layout=gl.SliceLayout(1, layout))[:, None]
    local = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))[None, :]
    rows = tile_rows(tile, local, N, BLOCK_N, PAIRED)
    exists = tile_rows_exist(tile, local, N, BLOCK_N, PAIRED)
    factor = gl.full([1, BLOCK_N], 1.0, gl.float32, layout)
    if KIND == 1:
        factor = gl.load(scale_ptr + rows, mask=exists, other=0.0)
    addition = gl.zeros([PADDED, BLOCK_N], gl.float32, layout)
    if HAS_BIAS:
        addition += gl.load(bias_ptr + rows, mask=exists, other=0.0).to(gl.float32)
    if HAS_RESIDUAL:
        offsets = batch * stride_residual + rows
        addition += gl.load(residual_ptr + offsets, mask=(batch < count) & exists, other=0.0).to(gl.float32)
    return factor, addition


@gluon.jit
def finish_tile(
    acc, scale, factor, addition, best_value, best_index, tile, gather: gl.constexpr,
    y_ptr, stride_y, count, out_type: gl.constexpr,
    N: gl.constexpr, PADDED: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGED: gl.constexpr, PROLOGUE: gl.constexpr, EPILOGUE: gl.constexpr,
):  # fmt: skip
    """Add up the warps' slices of a tile and store them, or keep the best of each row of x."""
    PAIRED: gl.constexpr = EPILOGUE == 1
    total = gl.sum(gl.convert_layout(acc, gather), axis=0)
    layout: gl.constexpr = total.type.layout
    batch = gl.arange(0, PADDED, layout=gl.SliceLayout(1, layout))
    local = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
    rows = tile_rows(tile, local, N, BLOCK_N, PAIRED)
    exists = tile_rows_exist(tile, local, N, BLOCK_N, PAIRED)
    if PROLOGUE == 1:
        if not STAGED:
            scale = gl.convert_layout(scale, gl.SliceLayout(1, layout))[:, None]
        total = total * scale
    total = total * factor + addition
    if EPILOGUE == 1:
        gate, up = gl.split(gl.reshape(total, [PADDED, BLOCK_N // 2, 2]))
        out = silu(gate) * up
        half: gl.constexpr = out.type.layout
        batch2 = gl.arange(0, PADDED, layout=gl.SliceLayout(1, half))[:, None]
        outputs = (tile * (BLOCK_N // 2) + gl.arange(0, BLOCK_N // 2, layout=gl.SliceLayout(0, half)))[None, :]
        keep = (batch2 < count) & (outputs < N // 2)
        gl.store(y_ptr + batch2 * stride_y + outputs, out.to(out_type), mask=keep)
        return best_value, best_index
    elif EPILOGUE == 2:
        value = gl.where(exists[None, :], total.to(out_type).to(gl.float32), float("-inf"))
        top = gl.max(value, axis=1)
        wide = gl.zeros_like(value).to(gl.int32) + rows[None, :]
        where = gl.min(gl.where(value == top[:, None], wide, 0x7FFFFFFF), axis=1)
        better = top > best_value
        return gl.where(better, top, best_value), gl.where(better, where, best_index)
    else:
        keep = (batch[:, None] < count) & exists[None, :]
        gl.store(y_ptr + batch[:, None] * stride_y + rows[None, :], total.to(out_type), mask=keep)
        return best_value, best_index


@gluon.jit(do_not_specialize=["count"])
def _mma_kernel(
    x_ptr, w_ptr, scale_ptr, y_ptr, index_ptr, bias_ptr, residual_ptr, norm_ptr,
    stride_x, stride_w, stride_y, stride_residual, eps, count,
    M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, PREFETCH: gl.constexpr, PROGRAMS: gl.constexpr,
    SPLIT_K: gl.constexpr, WARPS: gl.constexpr, STAGED: gl.constexpr,
    PROLOGUE: gl.constexpr, EPILOGUE: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    EVICT: gl.constexpr, PDL: gl.constexpr, WAIT: gl.constexpr,
):  # fmt: skip
    PADDED: gl.constexpr = 16
    PAIRED: gl.constexpr = EPILOGUE == 1
    TILES: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    CHUNKS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    DEPTH: gl.constexpr = PREFETCH if PREFETCH < CHUNKS else CHUNKS
    ROUNDS: gl.constexpr = (TILES + PROGRAMS - 1) // PROGRAMS
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    # One row is read once and repeated: the rows of a product do not mix, so what stands in unused ones is
    # no matter.
    ROWS: gl.constexpr = 1 if M == 1 else PADDED
    SLICE: gl.constexpr = BLOCK_K // SPLIT_K
    SUMS: gl.constexpr = CHUNKS if CHUNKS < 4 else 4
    LENGTH: gl.constexpr = BLOCK_K * next_power(CHUNKS)
    PER_THREAD: gl.constexpr = LENGTH // WARPS // 32
    flat: gl.constexpr = gl.BlockedLayout([PER_THREAD if PER_THREAD < 8 else 8], [32], [WARPS], [0])
    units: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[SPLIT_K, 1, WARPS // SPLIT_K], instr_shape=[1, 16, 8]
    )
    left: gl.constexpr = gl.DotOperandLayout(0, units, 8)
    right: gl.constexpr = gl.DotOperandLayout(1, units, 8)
    # Where the warps' slices meet: all slices of an element in one thread, gate and up side by side.
    ACROSS: gl.constexpr = BLOCK_N // 2 if PAIRED else BLOCK_N
    gather: gl.constexpr = gl.BlockedLayout(
        [SPLIT_K, 1, BLOCK_N // ACROSS],
        [1, 32 // ACROSS if ACROSS < 32 else 1, ACROSS if ACROSS < 32 else 32],
        [1, WARPS, 1],
        [2, 1, 0],
    )
    pid = gl.program_id(0)

    ahead = ()
    for c in gl.static_range(DEPTH):
        ahead = ahead + (
            fetch_weights(
                w_ptr,
                pid,
                c * BLOCK_K,
                stride_w,
                right,
                N,
                K,
                BLOCK_N,
                BLOCK_K,
                SPLIT_K,
                PAIRED,
                False,
                EVICT,
            ),
        )
    gain = 0
    if STAGED and PROLOGUE == 1:
        gain = read_flat(norm_ptr, flat, K, LENGTH)
    if PDL:
        gdc_launch_dependents()
        if WAIT:
            gdc_wait()

    if STAGED:
        # All of x goes to shared memory once, spread over the program's threads, and the norm is taken on
        # the way.
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        room = gl.allocate_shared_memory(dtype, [LENGTH], plain)
        row_scale = stage_x(room, x_ptr, gain, eps, flat, K, LENGTH, PROLOGUE)
        staged = as_chunks(room, SPLIT_K, BLOCK_K)

    best_value = gl.full([PADDED], float("-inf"), gl.float32, gl.SliceLayout(1, gl.SliceLayout(0, gather)))
    best_index = gl.full([PADDED], 0x7FFFFFFF, gl.int32, gl.SliceLayout(1, gl.SliceLayout(0, gather)))
    for turn in range(ROUNDS):
        tile = pid + turn * PROGRAMS
        factor, addition = read_beside(
            tile, gather, scale_ptr, bias_ptr, residual_ptr, stride_residual, count,
            N, KIND, PADDED, BLOCK_N, PAIRED, HAS_BIAS, HAS_RESIDUAL,
        )  # fmt: skip
        sums = ()
        for _c in gl.static_range(SUMS):
            sums = sums + (gl.zeros([SPLIT_K, PADDED, BLOCK_N], gl.float32, units),)
        squares = gl.zeros([SPLIT_K, ROWS], gl.float32, gl.SliceLayout(2, left))
        for c in gl.static_range(CHUNKS):
            stored = ahead[0]
            if c + DEPTH < CHUNKS:
                following = fetch_weights(
                    w_ptr, tile, (c + DEPTH) * BLOCK_K, stride_w, right,
                    N, K, BLOCK_N, BLOCK_K, SPLIT_K, PAIRED, ROUNDS * PROGRAMS != TILES, EVICT,
                )  # fmt: skip
            elif ROUNDS > 1:
                following = fetch_weights(
                    w_ptr, tile + PROGRAMS, (c + DEPTH - CHUNKS) * BLOCK_K, stride_w, right,
                    N, K, BLOCK_N, BLOCK_K, SPLIT_K, PAIRED, True, EVICT,
                )  # fmt: skip
            else:
                following = stored
            ahead = ahead[1:] + (following,)
            if STAGED:
                x = staged.index(c).load(left)
            else:
                chunk_gain = read_gain(norm_ptr, c * BLOCK_K, left, K, BLOCK_K, SPLIT_K, PROLOGUE)
                x, chunk_squares = read_x(
                    x_ptr, chunk_gain, c * BLOCK_K, stride_x, count, left, K, ROWS, BLOCK_K, SPLIT_K, PROLOGUE
                )
                if PROLOGUE == 1:
                    squares += gl.sum(chunk_squares, axis=2)
            if M == 1:
                x = x.broadcast_to([SPLIT_K, PADDED, SLICE])
            if KIND == 1:
                stored = stored.to(gl.float32)
            # Neighbouring chunks add to different sums: a product need not wait for the one before.
            sums = sums[1:] + (mma_v2(x, stored.to(dtype), sums[0]),)
        acc = sums[0]
        for c in gl.static_range(1, SUMS):
            acc += sums[c]
        if STAGED:  # noqa: SIM108 - one branch only exists
            scale = row_scale
        else:
            scale = 1.0 / gl.sqrt(gl.sum(squares, axis=0) / K + eps)
        best_value, best_index = finish_tile(
            acc, scale, factor, addition, best_value, best_index, tile, gather,
            y_ptr, stride_y, count, dtype, N, PADDED, BLOCK_N, STAGED, PROLOGUE, EPILOGUE,
        )  # fmt: skip

    if EPILOGUE == 2:
        batch = gl.arange(0, PADDED, layout=gl.SliceLayout(1, gl.SliceLayout(0, gather)))
        gl.store(y_ptr + batch * stride_y + pid, best_value, mask=batch < count)
        gl.store(index_ptr + batch * stride_y + pid, best_index, mask=batch < count)


def one_or_many(rows: int) -> int:
    """The constant ``M``: 1, or 16 for every other number of rows, which then share one compiled kernel."""
    return 1 if rows == 1 else 16


def launch_mma(plan: LaunchPlan, arguments: tuple[Any, ...]) -> None:
    """Run the Gluon kernel as ``plan`` says; ``skinny_matmul`` prepares the arguments."""
    tile = plan.tile
    constants = {
        **plan.constants,
        "M": one_or_many(plan.rows),
        "PREFETCH": tile.prefetch,
        "PROGRAMS": plan.programs,
        "SPLIT_K": tile.split_k,
        "WARPS": tile.warps,
        "STAGED": plan.rows == 1 and (tile.inner or plan.prologue != Prologue.PLAIN),
    }
    launch(_mma_kernel, plan.programs, (*arguments, plan.rows), constants,
           warps=tile.warps, pdl=plan.pdl, compile_only=plan.compile_only)  # fmt: skip
