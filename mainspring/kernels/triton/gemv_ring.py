"""Skinny matrix product whose weights wait in a ring of shared-memory buffers (Gluon).

Like ``gemv_mma``, for 1 to 16 rows of bf16 or fp16, but what is fetched before the wait goes to shared
memory (``cp.async``) and holds no registers: ``stages`` chunks of ``block_n`` x ``block_k`` are under way
at any time, across the tiles that a program takes, and kernels of this kind fit on a multiprocessor beside
kernels of the other.
"""

# Inside of kernels a name may hold tuples of any length.
# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mainspring.kernels.triton.gemv_common import launch
from mainspring.kernels.triton.gemv_mma import (
    as_chunks,
    finish_tile,
    next_power,
    one_or_many,
    read_beside,
    read_flat,
    read_gain,
    read_x,
    stage_x,
    tile_rows,
    tile_rows_exist,
)
from mainspring.kernels.triton.gemv_plan import LaunchPlan

# Renamed after Triton 3.6.
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def start_copy(
    buffer, w_ptr, tile, k0, stride_w, layout: gl.constexpr,
    N: gl.constexpr, K: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, SPLIT_K: gl.constexpr,
    PAIRED: gl.constexpr, MAY_END: gl.constexpr, EVICT: gl.constexpr,
):  # fmt: skip
    """Begin to copy a chunk of W to ``buffer`` [SPLIT_K, BLOCK_N, BLOCK_K / SPLIT_K], as one group."""
    SLICE: gl.constexpr = BLOCK_K // SPLIT_K
    part = gl.arange(0, SPLIT_K, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    local = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    inside = gl.arange(0, SLICE, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    columns = k0 + part * SLICE + inside
    rows = tile_rows(tile, local, N, BLOCK_N, PAIRED)
    pointers = w_ptr + rows.to(gl.int64) * stride_w + columns
    if MAY_END or N % BLOCK_N != 0 or K % BLOCK_K != 0:
        mask = tile_rows_exist(tile, local, N, BLOCK_N, PAIRED) & (columns < K)
        copy_async(buffer, pointers, mask=mask, eviction_policy=EVICT)
    else:
        copy_async(buffer, pointers, eviction_policy=EVICT)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["count"])
def _ring_kernel(
    x_ptr, w_ptr, scale_ptr, y_ptr, index_ptr, bias_ptr, residual_ptr, norm_ptr,
    stride_x, stride_w, stride_y, stride_residual, eps, count,
    M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, PROGRAMS: gl.constexpr,
    SPLIT_K: gl.constexpr, WARPS: gl.constexpr, STAGED: gl.constexpr, PROLOGUE: gl.constexpr,
    EPILOGUE: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    EVICT: gl.constexpr, PDL: gl.constexpr, WAIT: gl.constexpr,
):  # fmt: skip
    PADDED: gl.constexpr = 16
    PAIRED: gl.constexpr = EPILOGUE == 1
    TILES: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    CHUNKS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    ROUNDS: gl.constexpr = (TILES + PROGRAMS - 1) // PROGRAMS
    DEPTH: gl.constexpr = STAGES if STAGES < CHUNKS * ROUNDS else CHUNKS * ROUNDS
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    ROWS: gl.constexpr = 1 if M == 1 else PADDED
    SLICE: gl.constexpr = BLOCK_K // SPLIT_K
    LENGTH: gl.constexpr = BLOCK_K * next_power(CHUNKS)
    PER_THREAD: gl.constexpr = LENGTH // WARPS // 32
    flat: gl.constexpr = gl.BlockedLayout([PER_THREAD if PER_THREAD < 8 else 8], [32], [WARPS], [0])
    ALONG: gl.constexpr = SLICE // 8 if SLICE < 256 else 32
    copying: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [1, 32 // ALONG, ALONG], [SPLIT_K, WARPS // SPLIT_K, 1], [2, 1, 0]
    )
    units: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[SPLIT_K, 1, WARPS // SPLIT_K], instr_shape=[1, 16, 8]
    )
    left: gl.constexpr = gl.DotOperandLayout(0, units, 8)
    right: gl.constexpr = gl.DotOperandLayout(1, units, 8)
    ACROSS: gl.constexpr = BLOCK_N // 2 if PAIRED else BLOCK_N
    gather: gl.constexpr = gl.BlockedLayout(
        [SPLIT_K, 1, BLOCK_N // ACROSS],
        [1, 32 // ACROSS if ACROSS < 32 else 1, ACROSS if ACROSS < 32 else 32],
        [1, WARPS, 1],
        [2, 1, 0],
    )
    # Eight lanes read 64 bytes of each of two neighbouring rows: swapping the halves of every second 128
    # bytes keeps them in different banks.
    ring_layout: gl.constexpr = gl.SwizzledSharedLayout(32, 1, 2, [2, 1, 0])
    ring = gl.allocate_shared_memory(w_ptr.dtype.element_ty, [DEPTH, SPLIT_K, BLOCK_N, SLICE], ring_layout)
    pid = gl.program_id(0)

    for s in gl.static_range(DEPTH):
        start_copy(
            ring.index(s), w_ptr, pid + (s // CHUNKS) * PROGRAMS, (s % CHUNKS) * BLOCK_K, stride_w, copying,
            N, K, BLOCK_N, BLOCK_K, SPLIT_K, PAIRED, s >= CHUNKS, EVICT,
        )  # fmt: skip
    gain = 0
    if STAGED and PROLOGUE == 1:
        gain = read_flat(norm_ptr, flat, K, LENGTH)
    if PDL:
        gdc_launch_dependents()
        if WAIT:
            gdc_wait()

    if STAGED:
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        room = gl.allocate_shared_memory(dtype, [LENGTH], plain)
        row_scale = stage_x(room, x_ptr, gain, eps, flat, K, LENGTH, PROLOGUE)
        staged = as_chunks(room, SPLIT_K, BLOCK_K)

    best_value = gl.full([PADDED], float("-inf"), gl.float32, gl.SliceLayout(1, gl.SliceLayout(0, gather)))
    best_index = gl.full([PADDED], 0x7FFFFFFF, gl.int32, gl.SliceLayout(1, gl.SliceLayout(0, gather)))
    place = 0
    for turn in range(ROUNDS):
        tile = pid + turn * PROGRAMS
        factor, addition = read_beside(
            tile, gather, scale_ptr, bias_ptr, residual_ptr, stride_residual, count,
            N, KIND, PADDED, BLOCK_N, PAIRED, HAS_BIAS, HAS_RESIDUAL,
        )  # fmt: skip
        acc = gl.zeros([SPLIT_K, PADDED, BLOCK_N], gl.float32, units)
        squares = gl.zeros([SPLIT_K, ROWS], gl.float32, gl.SliceLayout(2, left))
        for chunk in range(CHUNKS):
            async_copy.wait_group(DEPTH - 1)
            stored = ring.index(place).permute((0, 2, 1)).load(right)
            if DEPTH < CHUNKS * ROUNDS:
                ahead = chunk + DEPTH
                start_copy(
                    ring.index(place), w_ptr, tile + (ahead // CHUNKS) * PROGRAMS, (ahead % CHUNKS) * BLOCK_K,
                    stride_w, copying, N, K, BLOCK_N, BLOCK_K, SPLIT_K, PAIRED, True, EVICT,
                )  # fmt: skip
            else:
                async_copy.commit_group()
            place = gl.where(place + 1 < DEPTH, place + 1, 0)
            if STAGED:
                x = staged.index(chunk).load(left)
            else:
                chunk_gain = read_gain(norm_ptr, chunk * BLOCK_K, left, K, BLOCK_K, SPLIT_K, PROLOGUE)
                x, chunk_squares = read_x(
                    x_ptr, chunk_gain, chunk * BLOCK_K, stride_x, count, left, K, ROWS, BLOCK_K, SPLIT_K, PROLOGUE
                )
                if PROLOGUE == 1:
                    squares += gl.sum(chunk_squares, axis=2)
            if M == 1:
                x = x.broadcast_to([SPLIT_K, PADDED, SLICE])
            if KIND == 1:
                stored = stored.to(gl.float32)
            acc = mma_v2(x, stored.to(dtype), acc)
        if STAGED:  # noqa: SIM108 - one branch only exists
            scale = row_scale
        else:
            scale = 1.0 / gl.sqrt(gl.sum(squares, axis=0) / K + eps)
        best_value, best_index = finish_tile(
            acc, scale, factor, addition, best_value, best_index, tile, gather,
            y_ptr, stride_y, count, dtype, N, PADDED, BLOCK_N, STAGED, PROLOGUE, EPILOGUE,
        )  # fmt: skip
    async_copy.wait_group(0)

    if EPILOGUE == 2:
        batch = gl.arange(0, PADDED, layout=gl.SliceLayout(1, gl.SliceLayout(0, gather)))
        gl.store(y_ptr + batch * stride_y + pid, best_value, mask=batch < count)
        gl.store(index_ptr + batch * stride_y + pid, best_index, mask=batch < count)


def launch_ring(plan: LaunchPlan, arguments: tuple[Any, ...]) -> None:
    """Run the ring kernel as ``plan`` says; ``skinny_matmul`` prepares the arguments."""
    tile = plan.tile
    constants = {
        **plan.constants,
        "M": one_or_many(plan.rows),
        "STAGES": tile.stages,
        "PROGRAMS": plan.programs,
        "SPLIT_K": tile.split_k,
        "WARPS": tile.warps,
        "STAGED": plan.rows == 1,
    }
    launch(_ring_kernel, plan.programs, (*arguments, plan.rows), constants,
           warps=tile.warps, pdl=plan.pdl, compile_only=plan.compile_only)  # fmt: skip
