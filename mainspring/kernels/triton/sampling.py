"""Triton kernels of :mod:`mainspring.kernels.sampling`: a pass over the logits in tiles, then one over tiles.

A tile is a fixed number of ids, whatever the batch, so a token does not depend on the rung it is drawn on.
Each tile scores its ids relative to its own highest logit, which keeps tiny temperatures exact; the second
kernel moves the tiles' winners to the row's highest.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mainspring.kernels.triton import pdl
from mainspring.kernels.triton.filters import filter_cut
from mainspring.kernels.triton.noise import gumbel_from_bits, random_bits
from mainspring.kernels.triton.pdl import pdl_launch_dependents, pdl_wait

_TILE = 2048


@triton.jit
def _tile_kernel(
    logits_ptr,
    temperature_ptr,
    seeds_ptr,
    choices_ptr,
    positions_ptr,
    cut_logit_ptr,
    cut_id_ptr,
    score_ptr,
    highest_ptr,
    id_ptr,
    vocab_size,
    row_stride,
    RANDOM: tl.constexpr,
    FILTERED: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    inside = ids < vocab_size
    logits = tl.load(logits_ptr + row * row_stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    highest = tl.max(logits, 0)
    scores = logits
    if RANDOM:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0.0:
            scores = tl.where(logits == highest, 0.0, (logits - highest) / temperature)
            bits = random_bits(tl.load(seeds_ptr + row), tl.load(choices_ptr + row), tl.load(positions_ptr + row), ids)
            scores += gumbel_from_bits(bits)
            if FILTERED:
                edge = tl.load(cut_logit_ptr + row)
                last = tl.load(cut_id_ptr + row)
                kept = (logits > edge) | ((logits == edge) & (ids <= last))
                scores = tl.where(kept, scores, float("-inf"))
            scores = tl.where(inside, scores, float("-inf"))
    best = tl.max(scores, 0)
    place = row * tl.num_programs(1) + tile
    tl.store(score_ptr + place, best)
    tl.store(highest_ptr + place, highest)
    # The lowest id of the best; the tile's first where nothing may be drawn (or all is NaN).
    winner = tl.min(tl.where((scores == best) & inside, ids, tile * TILE + TILE), 0)
    tl.store(id_ptr + place, tl.where(winner < tile * TILE + TILE, winner, tile * TILE))


@triton.jit
def _row_kernel(
    temperature_ptr,
    score_ptr,
    highest_ptr,
    id_ptr,
    out_ptr,
    num_tiles,
    RANDOM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, BLOCK)
    inside = tiles < num_tiles
    scores = tl.load(score_ptr + row * num_tiles + tiles, mask=inside, other=float("-inf"))
    if RANDOM:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0.0:
            highest = tl.load(highest_ptr + row * num_tiles + tiles, mask=inside, other=float("-inf"))
            top = tl.max(highest, 0)
            scores += tl.where(highest == top, 0.0, (highest - top) / temperature)
    best = tl.max(scores, 0)
    ids = tl.load(id_ptr + row * num_tiles + tiles, mask=inside, other=0)
    first = tl.min(tl.where((scores == best) & inside, tiles, BLOCK), 0)
    first = tl.where(first < BLOCK, first, 0)
    tl.store(out_ptr + row, tl.sum(tl.where(tiles == first, ids, 0), 0).to(tl.int64))


def _draw(
    logits: Tensor,
    temperature: Tensor | None,
    seeds: Tensor | None = None,
    choices: Tensor | None = None,
    positions: Tensor | None = None,
    cut: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    batch, vocab_size = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_tiles = triton.cdiv(vocab_size, _TILE)
    scores = logits.new_empty((batch, num_tiles), dtype=torch.float32)
    highest = torch.empty_like(scores)
    ids = logits.new_empty((batch, num_tiles), dtype=torch.int32)
    out = logits.new_empty((batch,), dtype=torch.int64)
    if not batch:
        return out
    random = temperature is not None
    dependence = pdl.options(pdl.mode(logits.device))
    cut_logit, cut_id = cut if cut is not None else (scores, ids)
    _tile_kernel[(batch, num_tiles)](
        logits, scores if temperature is None else temperature, seeds if random else ids,
        choices if random else ids, positions if random else ids, cut_logit, cut_id,
        scores, highest, ids, vocab_size, logits.stride(0),
        RANDOM=random, FILTERED=cut is not None, TILE=_TILE, num_warps=4, **dependence,
    )  # fmt: skip
    _row_kernel[(batch,)](
        scores if temperature is None else temperature, scores, highest, ids, out, num_tiles,
        RANDOM=random, BLOCK=triton.next_power_of_2(num_tiles), num_warps=1, **dependence,
    )  # fmt: skip
    return out


def greedy(logits: Tensor) -> Tensor:
    """See :func:`mainspring.kernels.sampling.greedy`."""
    return _draw(logits, None)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    choices: Tensor,
    positions: Tensor,
    filters: bool = True,
) -> Tensor:
    """See :func:`mainspring.kernels.sampling.sample`."""
    cut = filter_cut(logits, temperature, top_k, top_p, min_p) if filters else None
    return _draw(logits, temperature, seeds, choices, positions, cut)


@triton.jit
def _mask_stop_ids_kernel(
    logits_ptr, stop_ids_ptr, active_ptr, vocab_size, width, row_stride, stop_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    ids = tl.load(stop_ids_ptr + row * stop_stride + columns, mask=columns < width, other=-1)
    active = tl.load(active_ptr + row).to(tl.int32)
    valid = (ids >= 0) & (ids < vocab_size) & (columns * 0 + active != 0)
    minus_infinity = tl.full((BLOCK,), float("-inf"), tl.float32).to(logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row * row_stride + ids, minus_infinity, mask=valid)


def mask_stop_ids(logits: Tensor, stop_ids: Tensor, active: Tensor) -> None:
    """See :func:`mainspring.kernels.sampling.mask_stop_ids`."""
    batch, width = stop_ids.shape
    if not batch or not width:
        return
    if logits.stride(1) != 1:
        raise ValueError("mask_stop_ids needs logits whose rows are contiguous")
    stop_ids = stop_ids if stop_ids.stride(1) == 1 else stop_ids.contiguous()
    _mask_stop_ids_kernel[(batch,)](
        logits, stop_ids, active, logits.shape[1], width, logits.stride(0), stop_ids.stride(0),
        BLOCK=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
