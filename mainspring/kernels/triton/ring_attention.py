"""Paged decode attention whose keys and values wait in a ring of shared-memory buffers (Gluon).

What ``decode_attention`` computes with ``FUSED`` and ``SETTLED``, for bf16 and fp16 and head sizes that are powers of
two. Keys and values are copied to shared memory asynchronously and hold no registers on the way: ``STAGES - 1`` chunks
are under way at any time, the first of them from before the wait, while the QKV product in front still runs. Keys and
columns are the rows of both products and query heads their columns: of those the matrix units take as few as 8, so that
a few heads waste little.
"""

# Inside of kernels a name may hold tuples of any length.
# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_LOG2_E = gl.constexpr(1.4426950408889634)

# Renamed after Triton 3.6.
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.constexpr_function
def lanes_along(size, per_thread):
    """Lanes of a warp that share a row of ``size`` elements, ``per_thread`` each."""
    return min(32, size // per_thread)


@gluon.jit
def _chunk_start(chunk, split, num_splits, MIN_SPLIT: gl.constexpr, BLOCK_N: gl.constexpr):
    """The first key of a split's chunk: splits take runs of ``MIN_SPLIT`` keys in turn."""
    RUNS: gl.constexpr = MIN_SPLIT // BLOCK_N
    return ((chunk // RUNS) * num_splits + split) * MIN_SPLIT + (chunk % RUNS) * BLOCK_N


@gluon.jit
def _start_chunk(
    k_buffer, v_buffer, k_cache_ptr, v_cache_ptr, block, key, present, kv_head, columns,
    NUM_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Begin to copy the keys and values of ``key`` [BLOCK_N]; zeros where none is present, whatever lies there."""
    entry = ((block.to(gl.int64) * BLOCK_SIZE + key % BLOCK_SIZE) * NUM_KV_HEADS + kv_head) * HEAD_DIM
    at = entry[:, None] + columns[None, :]
    copy_async(k_buffer, k_cache_ptr + at, mask=present[:, None])
    copy_async(v_buffer, v_cache_ptr + at, mask=present[:, None])
    async_copy.commit_group()


@gluon.jit
def _rotate(x, partner, gain, partner_gain, cos, sin, eps, HEAD_DIM: gl.constexpr, NORM: gl.constexpr):
    """Heads [H, HEAD_DIM], normalised (where NORM) and rotated, rounded as separate steps are.

    ``partner`` holds at each column the one that it is rotated with, half a head away; ``sin`` is negative in the
    first half.
    """
    dtype: gl.constexpr = x.dtype
    wide = x.to(gl.float32)
    other = partner.to(gl.float32)
    if NORM:
        scale = (1.0 / gl.sqrt_rn(gl.sum(wide * wide, 1) / HEAD_DIM + eps))[:, None]
        wide = ((wide * scale).to(dtype).to(gl.float32) * gain).to(dtype).to(gl.float32)
        other = ((other * scale).to(dtype).to(gl.float32) * partner_gain).to(dtype).to(gl.float32)
    return (wide * cos + other * sin).to(dtype)


@gluon.jit
def _combine(
    partial_ptr, lse_ptr, out_ptr, head, used, num_splits, out_dtype: gl.constexpr,
    HEADS_PER_KV: gl.constexpr, HEAD_DIM: gl.constexpr, GROUP: gl.constexpr, BLOCK_S: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Put the first ``used`` splits of the heads from ``head`` on together and store them.

    Loads go past the first-level cache, which may hold what stood there before the other programs wrote.
    """
    PER_THREAD: gl.constexpr = 4 if HEAD_DIM <= 128 else 8
    ALONG: gl.constexpr = lanes_along(HEAD_DIM, PER_THREAD)
    cube: gl.constexpr = gl.BlockedLayout([1, 1, PER_THREAD], [32 // ALONG, 1, ALONG], [WARPS, 1, 1], [2, 1, 0])
    flat: gl.constexpr = gl.SliceLayout(2, cube)
    splits = gl.arange(0, BLOCK_S, layout=gl.SliceLayout(1, flat))
    group = gl.arange(0, GROUP, layout=gl.SliceLayout(0, flat))
    columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, gl.SliceLayout(0, cube)))
    in_group = (group < HEADS_PER_KV)[None, :]
    highest = gl.full([GROUP], -1.0e38, gl.float32, gl.SliceLayout(0, flat))
    total = gl.zeros([GROUP], gl.float32, gl.SliceLayout(0, flat))
    combined = gl.zeros([GROUP, HEAD_DIM], gl.float32, gl.SliceLayout(0, cube))
    for start in range(0, used, BLOCK_S):
        there = (start + splits < used)[:, None] & in_group
        place = (head + group)[None, :] * num_splits + (start + splits)[:, None]
        lse = gl.load(lse_ptr + place, mask=there, other=float("-inf"), cache_modifier=".cg")
        part = gl.load(
            partial_ptr + place[:, :, None] * HEAD_DIM + columns[None, :][None, :, :],
            mask=there[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        higher = gl.maximum(highest, gl.max(lse, 0))
        weights = gl.exp2(lse - higher[None, :])
        kept = gl.exp2(highest - higher)
        total = total * kept + gl.sum(weights, 0)
        spread = gl.convert_layout(kept, gl.SliceLayout(1, gl.SliceLayout(0, cube)))
        combined = combined * spread[:, None] + gl.sum(part * weights[:, :, None], 0)
        highest = higher
    divisor = gl.convert_layout(gl.where(total > 0.0, total, 1.0), gl.SliceLayout(1, gl.SliceLayout(0, cube)))
    rows = gl.arange(0, GROUP, layout=gl.SliceLayout(1, gl.SliceLayout(0, cube)))
    target = out_ptr + (head + rows)[:, None] * HEAD_DIM + columns[None, :]
    gl.store(target, (combined / divisor[:, None]).to(out_dtype), mask=(rows < HEADS_PER_KV)[:, None])


@gluon.jit(do_not_specialize=["window", "num_splits"])
def ring_attention_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    seq_lens_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    arrivals_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    q_weight_ptr,
    k_weight_ptr,
    scale,
    eps,
    window,
    num_splits,
    q_row_stride,
    q_head_stride,
    table_stride,
    NORM: gl.constexpr,
    WINDOWED: gl.constexpr,
    HEADS_PER_KV: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    SPLIT: gl.constexpr,
    MIN_SPLIT: gl.constexpr,
    BLOCK_H: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_S: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """See the head of this file; the arguments are those of ``decode_attention``'s kernel."""
    HALF: gl.constexpr = HEAD_DIM // 2
    RUNS: gl.constexpr = MIN_SPLIT // BLOCK_N
    ALONG: gl.constexpr = lanes_along(HEAD_DIM, 8)
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    copying: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ALONG, ALONG], [WARPS, 1], [1, 0])
    units: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, units, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, units, 2)
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    row = gl.program_id(0).to(gl.int64)
    kv_head = gl.program_id(1)
    # The last splits come first: most have no keys, and are gone before the others need their place.
    split = num_splits - 1 - gl.program_id(2)
    if PDL != 0:
        gdc_launch_dependents()
    length = gl.load(seq_lens_ptr + row)
    position = gl.load(positions_ptr + row).to(gl.int64)
    slot = gl.load(slots_ptr + row).to(gl.int64)
    table_ptr = block_tables_ptr + row * table_stride
    first = length * 0
    if WINDOWED:
        first = gl.maximum(length - window, 0)
    # Keys in the cache; the row's last one is not there yet, and belongs to the first split.
    count = gl.maximum(length - first - 1, 0)
    used = gl.maximum(gl.minimum(gl.cdiv(count, MIN_SPLIT), num_splits), gl.minimum(length, 1))
    # An empty row is written by its first split, as zeros.
    if (split < used) | (split == 0):
        ring_k = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], swizzled)
        ring_v = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], swizzled)
        run = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, copying))
        columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, copying))
        for stage in gl.static_range(STAGES - 1):
            index = _chunk_start(stage, split, num_splits, MIN_SPLIT, BLOCK_N) + run
            block = gl.load(table_ptr + (first + index) // BLOCK_SIZE, mask=index < count, other=0)
            _start_chunk(
                ring_k.index(stage), ring_v.index(stage), k_cache_ptr, v_cache_ptr, block, first + index,
                index < count, kv_head, columns, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE,
            )  # fmt: skip
        index = _chunk_start(STAGES - 1, split, num_splits, MIN_SPLIT, BLOCK_N) + run
        block = gl.load(table_ptr + (first + index) // BLOCK_SIZE, mask=index < count, other=0)
        chunks = 0
        if split * MIN_SPLIT < count:
            before = gl.cdiv(gl.cdiv(count, MIN_SPLIT) - split, num_splits) - 1
            in_last = count - (before * num_splits + split) * MIN_SPLIT
            chunks = before * RUNS + gl.minimum(gl.cdiv(in_last, BLOCK_N), RUNS)
        partners = (columns + HALF) % HEAD_DIM
        angle = cos_sin_ptr + position * HEAD_DIM + columns % HALF
        cos = gl.load(angle)[None, :]
        sin = gl.load(angle + HALF)
        sin = gl.where(columns < HALF, -sin, sin)[None, :]
        q_gain = cos
        q_partner_gain = cos
        k_gain = cos
        k_partner_gain = cos
        if NORM:
            q_gain = gl.load(q_weight_ptr + columns).to(gl.float32)[None, :]
            q_partner_gain = gl.load(q_weight_ptr + partners).to(gl.float32)[None, :]
            k_gain = gl.load(k_weight_ptr + columns).to(gl.float32)[None, :]
            k_partner_gain = gl.load(k_weight_ptr + partners).to(gl.float32)[None, :]
        if PDL == 1:
            gdc_wait()
        group = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, copying))
        in_group = (group < HEADS_PER_KV)[:, None]
        q_row = q_ptr + row * q_row_stride
        heads = q_row + (kv_head * HEADS_PER_KV + group)[:, None] * q_head_stride
        q = gl.load(heads + columns[None, :], mask=in_group, other=0.0)
        partner = gl.load(heads + partners[None, :], mask=in_group, other=0.0)
        # The new key and value: heads behind the query heads in each row of the product.
        key_head = q_row + (NUM_KV_HEADS * HEADS_PER_KV + kv_head) * q_head_stride
        owned = columns + split * HEAD_DIM < HEAD_DIM
        k_new = gl.load(key_head + columns, mask=owned, other=0.0)[None, :]
        k_partner = gl.load(key_head + partners, mask=owned, other=0.0)[None, :]
        v_new = gl.load(key_head + NUM_KV_HEADS * q_head_stride + columns, mask=owned, other=0.0)
        q = _rotate(q, partner, q_gain, q_partner_gain, cos, sin, eps, HEAD_DIM, NORM)
        queries = gl.convert_layout(gl.permute(q, (1, 0)), right)
        highest = gl.full([BLOCK_H], float("-inf"), gl.float32, gl.SliceLayout(0, units))
        total = gl.zeros([BLOCK_H], gl.float32, gl.SliceLayout(0, units))
        attended = gl.zeros([HEAD_DIM, BLOCK_H], gl.float32, units)
        place = 0
        for chunk in range(chunks):
            async_copy.wait_group(STAGES - 2)
            free = gl.where(place == 0, STAGES - 1, place - 1)
            _start_chunk(
                ring_k.index(free), ring_v.index(free), k_cache_ptr, v_cache_ptr, block, first + index,
                index < count, kv_head, columns, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE,
            )  # fmt: skip
            index = _chunk_start(chunk + STAGES, split, num_splits, MIN_SPLIT, BLOCK_N) + run
            block = gl.load(table_ptr + (first + index) // BLOCK_SIZE, mask=index < count, other=0)
            keys = ring_k.index(place).load(left)
            scores = mma_v2(keys, queries, gl.zeros([BLOCK_N, BLOCK_H], gl.float32, units)) * (scale * _LOG2_E)
            here = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, units))
            present = _chunk_start(chunk, split, num_splits, MIN_SPLIT, BLOCK_N) + here < count
            scores = gl.where(present[:, None], scores, float("-inf"))
            higher = gl.maximum(highest, gl.max(scores, 0))
            weights = gl.exp2(scores - higher[None, :])
            kept = gl.exp2(highest - higher)
            total = total * kept + gl.sum(weights, 0)
            values = ring_v.index(place).permute((1, 0)).load(left)
            attended = mma_v2(values, gl.convert_layout(weights.to(dtype), right), attended * kept[None, :])
            highest = higher
            place = gl.where(place + 1 < STAGES, place + 1, 0)
        async_copy.wait_group(0)
        if (split == 0) & (length > 0):
            k_turned = _rotate(k_new, k_partner, k_gain, k_partner_gain, cos, sin, eps, HEAD_DIM, NORM)
            entry = (slot * NUM_KV_HEADS + kv_head) * HEAD_DIM + columns
            written = columns.to(gl.int64) * 0 + slot >= 0
            gl.store(k_cache_ptr + entry[None, :], k_turned, mask=written[None, :])
            gl.store(v_cache_ptr + entry, v_new, mask=written)
            score = gl.sum(q.to(gl.float32) * k_turned.to(gl.float32), 1) * (scale * _LOG2_E)
            score = gl.convert_layout(score, gl.SliceLayout(0, units))
            higher = gl.maximum(highest, score)
            kept = gl.exp2(highest - higher)
            weight = gl.exp2(score - higher)
            total = total * kept + weight
            v_column = gl.convert_layout(v_new, gl.SliceLayout(1, units)).to(gl.float32)
            attended = attended * kept[None, :] + v_column[:, None] * weight[None, :]
            highest = higher
        attended = attended / gl.where(total > 0.0, total, 1.0)[None, :]
        seen = gl.convert_layout(gl.permute(attended, (1, 0)), copying)
        head = row * (NUM_KV_HEADS * HEADS_PER_KV) + kv_head * HEADS_PER_KV
        target = out_ptr + (head + group)[:, None] * HEAD_DIM + columns[None, :]
        if SPLIT:
            if used > 1:
                beside = gl.arange(0, BLOCK_H, layout=gl.SliceLayout(0, units))
                gl.store(
                    partial_ptr + ((head + group) * num_splits + split)[:, None] * HEAD_DIM + columns[None, :],
                    seen,
                    mask=in_group,
                )
                gl.store(
                    lse_ptr + (head + beside) * num_splits + split,
                    highest + gl.log2(total),
                    mask=beside < HEADS_PER_KV,
                )
                # All of the program's stores come before its arrival, and all arrivals before the last one's loads.
                gl.thread_barrier()
                arrivals = arrivals_ptr + row * NUM_KV_HEADS + kv_head
                if gl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == used - 1:
                    gl.thread_barrier()
                    gl.store(arrivals, 0)
                    _combine(
                        partial_ptr, lse_ptr, out_ptr, head, used, num_splits, dtype,
                        HEADS_PER_KV, HEAD_DIM, GROUP, BLOCK_S, WARPS,
                    )  # fmt: skip
            else:
                gl.store(target, seen.to(dtype), mask=in_group)
        else:
            gl.store(target, seen.to(dtype), mask=in_group)
