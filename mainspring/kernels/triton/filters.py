"""Triton kernel of :mod:`mainspring.kernels.filters`: the cut of each row by searching it, without a sort.

One program a row, which leaves at once where the row uses no filter. Logits are searched as integer keys that
order as they do, two bits at a time: how many ids (or how much mass) lie at or above a key decides its next
bits. Counts and masses are integers, so nothing depends on the order of summation. A first pass over the row
finds a bound that surely holds the cut, and what lies above it, usually some hundreds of ids, is gathered
beside it; only where the distribution is so flat that too many lie there does the search go over the whole
row.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mainspring.kernels.filters import MASS_BITS

#: Ids read at a time, and the most that are gathered.
_TILE = 4096
_ONE = tl.constexpr(float(2**MASS_BITS))


@triton.jit
def _key(x):
    """Map fp32 to uint32 in the same order; zeros of both signs to the same."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)


@triton.jit
def _logit(key):
    """The inverse of :func:`_key`."""
    bits = tl.where((key >> 31) != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _scaled(x, highest, temperature):
    return tl.where(x == highest, 0.0, (x - highest) / temperature)


@triton.jit
def _mass(x, highest, temperature):
    return (tl.exp(_scaled(x, highest, temperature)) * _ONE).to(tl.int64)


@triton.jit
def _at_or_above(source_ptr, size, low, unit, highest, temperature, BY_MASS: tl.constexpr, TILE: tl.constexpr):
    """How many ids, or how much mass, have a key of at least ``low + j * unit``, for j = 0..3: int64 [4]."""
    edges = low + tl.arange(0, 4).to(tl.uint32) * unit
    totals = tl.zeros((4,), tl.int64)
    for start in range(0, size, TILE):
        place = start + tl.arange(0, TILE)
        x = tl.load(source_ptr + place, mask=place < size, other=float("-inf")).to(tl.float32)
        reached = (_key(x)[:, None] >= edges[None, :]) & (place < size)[:, None]
        if BY_MASS:
            totals += tl.sum(tl.where(reached, _mass(x, highest, temperature)[:, None], 0), 0)
        else:
            totals += tl.sum(reached.to(tl.int32), 0).to(tl.int64)
    return totals


@triton.jit
def _pick(values, index):
    return tl.sum(tl.where(tl.arange(0, 4) == index, values, 0), 0)


@triton.jit
def _highest_key_reaching(source_ptr, size, target, highest, temperature, BY_MASS: tl.constexpr, TILE: tl.constexpr):
    """The highest key at or above which lie at least ``target`` ids (or, as fp64, mass)."""
    low = (size * 0).to(tl.uint32)
    unit = low + 0x40000000
    for _ in range(0, 16):
        totals = _at_or_above(source_ptr, size, low, unit, highest, temperature, BY_MASS, TILE)
        enough = totals.to(tl.float64) >= target if BY_MASS else totals >= target
        digit = tl.maximum(tl.sum(enough.to(tl.int32), 0) - 1, 0)
        low += digit.to(tl.uint32) * unit
        unit = unit >> 2
    return low


@triton.jit
def _filter_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    scratch_ptr,
    cut_logit_ptr,
    cut_id_ptr,
    vocab_size,
    row_stride,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    limited = ((top_k > 0) & (top_k < vocab_size)) | (min_p > 0.0)
    by_mass = top_p < 1.0
    cut_logit = float("-inf")
    cut_id = vocab_size
    if (temperature > 0.0) & (limited | by_mass):
        logits_row = logits_ptr + row * row_stride
        scratch_row = scratch_ptr + row * TILE
        lanes = tl.arange(0, TILE)

        highest_lane = tl.full((TILE,), float("-inf"), tl.float32)
        for start in range(0, vocab_size, TILE):
            x = tl.load(logits_row + start + lanes, mask=start + lanes < vocab_size, other=float("-inf"))
            highest_lane = tl.maximum(highest_lane, x.to(tl.float32))
        highest = tl.max(highest_lane, 0)

        # Four bounds below the highest, e times 3, 7, 13 and 24 at this temperature: what lies above each.
        bound = tl.arange(0, 4)
        bounds = tl.where(bound == 0, -3.0, tl.where(bound == 1, -7.0, tl.where(bound == 2, -13.0, -24.0)))
        lowest = tl.log(tl.minimum(min_p, 1.0))
        counts = tl.zeros((4,), tl.int64)
        masses = tl.zeros((4,), tl.int64)
        likely = tl.zeros((TILE,), tl.int32)
        mass_lane = tl.zeros((TILE,), tl.int64)
        for start in range(0, vocab_size, TILE):
            inside = start + lanes < vocab_size
            x = tl.load(logits_row + start + lanes, mask=inside, other=float("-inf")).to(tl.float32)
            scaled = _scaled(x, highest, temperature)
            mass = tl.where(inside, _mass(x, highest, temperature), 0)
            above = (scaled[:, None] >= bounds[None, :]) & inside[:, None]
            counts += tl.sum(above.to(tl.int32), 0).to(tl.int64)
            masses += tl.sum(tl.where(above, mass[:, None], 0), 0)
            likely += ((scaled >= lowest) & inside).to(tl.int32)
            mass_lane += mass
        total = tl.sum(mass_lane, 0)
        wanted = tl.maximum(top_p.to(tl.float64) * total.to(tl.float64), 0.5)

        count = tl.zeros((), tl.int64) + vocab_size
        if min_p > 0.0:
            count = tl.sum(likely.to(tl.int64), 0)
        if top_k > 0:
            count = tl.minimum(count, top_k.to(tl.int64))
        count = tl.maximum(count, 1)

        # Gather what lies above the first bound that surely holds the cut, if it fits.
        holds = masses.to(tl.float64) >= wanted
        if limited:
            holds = counts >= count
        first = tl.min(tl.where(holds, bound, 4), 0)
        gathered = _pick(counts, first)
        source = logits_row
        size = tl.zeros((), tl.int32) + vocab_size
        if (first < 4) & (gathered <= TILE):
            least = tl.sum(tl.where(bound == first, bounds, 0.0), 0)
            filled = tl.zeros((), tl.int32)
            for start in range(0, vocab_size, TILE):
                inside = start + lanes < vocab_size
                raw = tl.load(logits_row + start + lanes, mask=inside, other=float("-inf"))
                wide = raw.to(tl.float32)
                above = (_scaled(wide, highest, temperature) >= least) & inside
                before = tl.cumsum(above.to(tl.int32), 0) - 1
                tl.store(scratch_row + filled + before, raw, mask=above)
                filled += tl.sum(above.to(tl.int32), 0)
            tl.debug_barrier()
            source = scratch_row
            size = filled

        key = tl.zeros((), tl.uint32)
        one = key + 1
        kept = tl.zeros((), tl.int64) + vocab_size
        if limited:
            key = _highest_key_reaching(source, size, count, highest, temperature, False, TILE)
            up_to = _at_or_above(source, size, key, one, highest, temperature, False, TILE)
            kept = count - _pick(up_to, 1)
            # top_p is of what is left.
            mass_to = _at_or_above(source, size, key, one, highest, temperature, True, TILE)
            total = _pick(mass_to, 1) + kept * _mass(_logit(key), highest, temperature)
            wanted = tl.maximum(top_p.to(tl.float64) * total.to(tl.float64), 0.5)
        if by_mass:
            key = _highest_key_reaching(source, size, wanted, highest, temperature, True, TILE)
            mass_to = _at_or_above(source, size, key, one, highest, temperature, True, TILE)
            each = tl.maximum(_mass(_logit(key), highest, temperature), 1)
            missing = tl.ceil(wanted).to(tl.int64) - _pick(mass_to, 1)
            kept = tl.maximum((missing + each - 1) // each, 1)
        cut_logit = _logit(key)

        # Of the ids equal to the cut, the first ones are kept: which is the last of them?
        seen = tl.zeros((), tl.int64)
        for start in range(0, vocab_size, TILE):
            inside = start + lanes < vocab_size
            x = tl.load(logits_row + start + lanes, mask=inside, other=float("-inf")).to(tl.float32)
            equal = ((x == cut_logit) & inside).to(tl.int32)
            number = seen + tl.cumsum(equal, 0).to(tl.int64)
            cut_id = tl.minimum(cut_id, tl.min(tl.where((number == kept) & (equal != 0), start + lanes, vocab_size), 0))
            seen += tl.sum(equal, 0).to(tl.int64)
    tl.store(cut_logit_ptr + row, cut_logit)
    tl.store(cut_id_ptr + row, cut_id)


def filter_cut(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """See :func:`mainspring.kernels.filters.filter_cut_reference`; rows that filter nothing keep all."""
    batch, vocab_size = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    cut_logit = logits.new_empty((batch,), dtype=torch.float32)
    cut_id = logits.new_empty((batch,), dtype=torch.int32)
    if batch:
        scratch = logits.new_empty((batch, _TILE))
        _filter_kernel[(batch,)](
            logits, temperature, top_k, top_p, min_p, scratch, cut_logit, cut_id, vocab_size,
            logits.stride(0), TILE=_TILE, num_warps=16,
        )  # fmt: skip
    return cut_logit, cut_id
