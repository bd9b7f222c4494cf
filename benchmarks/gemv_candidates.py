"""Which tiles are worth trying for a skinny product, the likely ones first.

Each function takes N, K, the rows of x and how many tiles to give at most (of each of its kinds).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import triton

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mainspring.kernels.triton.gemv_plan import Tile  # noqa: E402


def vector_candidates(n: int, k: int, rows: int, most: int) -> Iterator[Tile]:
    """Vector tiles worth trying: 16 to 96 registers of weights a thread, at most four rows."""
    if rows > 4:
        return
    choices = []
    for block_k in (256, 512, 1024, 2048):
        if block_k > triton.next_power_of_2(k):
            continue
        chunks = -(-k // block_k)
        for block_n in (2, 4, 8, 16):
            for warps in (1, 2, 4, 8):
                for prefetch in sorted({1, 2, 4, chunks}):
                    if prefetch > chunks or chunks > 16:
                        continue
                    each = block_n * block_k * prefetch // (32 * warps)
                    if not 16 <= each <= 192 or block_n * block_k // (32 * warps) < 8:
                        continue
                    waste = abs(each - 64) / 64 + (0.5 if block_k != 256 * warps else 0.0)
                    waste += 0.3 * (n // block_n < 128)
                    choices.append((waste, Tile("vector", block_n, block_k, warps, prefetch)))
    choices.sort(key=lambda pair: pair[0])
    for _, tile in choices[:most]:
        yield tile
    for _, tile in choices[: most // 4]:
        yield replace(tile, inner=False)
    if n > 16384:
        for per_sm in (2, 4, 8):
            for _, tile in choices[: most // 4]:
                yield replace(tile, per_sm=per_sm)


def dot_candidates(n: int, k: int, rows: int, most: int) -> Iterator[Tile]:
    """``tl.dot`` tiles worth trying, the ones with enough programs first."""
    choices = []
    for block_n in (16, 32, 64):
        for block_k in (128, 256, 512):
            for split in (1, 2, 4):
                for warps in (4, 8):
                    for prefetch in (1, 2, 4):
                        each = block_n * block_k * prefetch // (32 * warps)
                        if block_k > k or not 16 <= each <= 128 or split * (block_n // 16) > 2 * warps:
                            continue
                        waste = abs(each - 48) / 48 + 0.5 * (n // block_n < 128) + 0.2 * (split == 1) * (block_n == 16)
                        choices.append((waste, Tile("dot", block_n, block_k, warps, prefetch, split_k=split)))
    choices.sort(key=lambda pair: pair[0])
    for _, tile in choices[:most]:
        yield tile


def mma_candidates(n: int, k: int, rows: int, most: int) -> Iterator[Tile]:
    """Gluon tiles worth trying: 16 to 96 registers of weights a thread, and a round number of programs."""
    if rows > 16:
        return
    choices = []
    for block_k in (256, 512, 1024, 2048, 4096):
        chunks = -(-k // block_k)
        if block_k > triton.next_power_of_2(k) or chunks > 32:
            continue
        for block_n in (8, 16, 32, 64) if rows > 4 else (8, 16, 32):
            for warps in (2, 4, 8, 16):
                for split in (warps, warps // 2, warps // 4):
                    for prefetch in sorted({1, 2, 4, chunks}):
                        if split < 1 or prefetch > chunks or block_n < 8 * (warps // split) or block_k < 32 * warps:
                            continue
                        registers = block_n * block_k * prefetch // (64 * warps)
                        if not 8 <= registers <= 96:
                            continue
                        programs = n / block_n / 132
                        waves = -(-programs // 1)
                        waste = abs(registers - 40) / 40 + (1 - programs / waves) + 0.3 * (split != warps)
                        waste += 0.5 * (prefetch < chunks and chunks * registers // prefetch <= 96)
                        waste += 0.4 * (block_k > 128 * warps)
                        choices.append((waste, Tile("mma", block_n, block_k, warps, prefetch, split_k=split)))
    choices.sort(key=lambda pair: pair[0])
    for _, tile in choices[:most]:
        yield replace(tile, inner=False)
    if rows == 1:
        for _, tile in choices[: most // 2]:
            yield tile
    if n > 16384:
        for per_sm in (2, 4):
            for _, tile in choices[: most // 4]:
                yield replace(tile, per_sm=per_sm, inner=rows == 1)


def ring_candidates(n: int, k: int, rows: int, most: int) -> Iterator[Tile]:
    """Gluon tiles with the weights in shared memory: all of a tile at once, or a ring under several tiles."""
    if rows > 16:
        return
    choices = []
    for block_k in (256, 512, 1024, 2048):
        chunks = -(-k // block_k)
        if block_k > triton.next_power_of_2(k):
            continue
        for block_n in (8, 16, 32):
            for warps in (4, 8):
                chunk = 2 * block_n * block_k
                if block_n < 8 or block_k < 64 * warps or not 16 <= chunk // (64 * warps) <= 256:
                    continue
                if chunks <= 4 and chunks * chunk <= 65536:
                    programs = n / block_n / 132
                    waste = 1 - programs / -(-programs // 1) + abs(chunks * chunk / 32768 - 1) / 4
                    choices.append((waste, Tile("ring", block_n, block_k, warps, stages=chunks, split_k=warps)))
                for per_sm, room in ((1, 98304), (2, 98304), (1, 196608), (2, 196608), (3, 196608)):
                    turns = n / block_n / (132 * per_sm)
                    stages = room // per_sm // chunk
                    if turns < 1.5 or not 2 <= stages <= 12:
                        continue
                    waste = 0.1 + 1 - turns / -(-turns // 1) + abs(stages - 6) / 12 + 0.1 * abs(per_sm - 2)
                    tile = Tile("ring", block_n, block_k, warps, per_sm=per_sm, stages=min(stages, 8), split_k=warps)
                    choices.append((waste, tile))
    choices.sort(key=lambda pair: pair[0])
    for _, tile in choices[:most]:
        yield tile


CANDIDATES = {
    "mma": mma_candidates,
    "ring": ring_candidates,
    "vector": vector_candidates,
    "dot": dot_candidates,
}
