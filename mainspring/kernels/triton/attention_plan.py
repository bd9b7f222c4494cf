"""How decode attention shares a row's keys out among programs. Nothing here depends on a length: it is recorded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Programs aimed at where the batch alone does not fill the device: two for each of an H200's 132 processors.
TARGET_PROGRAMS = 264
#: Up to this many programs before splitting, what counts is how soon one is done.
FEW_PROGRAMS = 64
#: From so many keys on, twice as many programs, each with half of the keys, are worth that more is put together.
LONG_ROW = 4096
#: The fewest keys worth a split of their own where the batch fills the device already.
LONG_SPLIT = 512
MAX_SPLITS = 128


@dataclass(frozen=True)
class SplitPlan:
    """How the keys of a launch are shared out; nothing here depends on a length.

    Args:
        splits: programs for each row and key head.
        min_split: keys of a run; the splits take runs in turn.
        block_n: keys a program works on at a time, a power of two; divides ``min_split``.
        warps: of a program.
        stages: chunks under way or worked on at a time, for the kernel with a ring of buffers; 0 is the other one.
    """

    splits: int
    min_split: int
    block_n: int
    warps: int = 4
    stages: int = 0


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def plan_splits(batch: int, num_kv_heads: int, max_keys: int, row_bytes: int, ring: bool) -> SplitPlan:
    """How to share out the keys: measured with ``benchmarks/sweep_attention.py`` on an H200.

    Args:
        batch: rows.
        num_kv_heads: key heads.
        max_keys: the most keys a row may have.
        row_bytes: bytes of one key's head.
        ring: whether the kernel with a ring of buffers can be had.
    """
    programs = batch * num_kv_heads
    block_n, warps, stages = (32, 2, 0) if row_bytes <= 256 else (max(16, 16384 // row_bytes), 4, 0)
    if programs >= TARGET_PROGRAMS:
        # The batch fills the device; a second split only keeps a few long rows from being waited for.
        wanted, smallest = 2, LONG_SPLIT
        if ring:
            block_n, warps, stages = 16, 1, 4
    elif programs > FEW_PROGRAMS:
        wanted, smallest = _ceil_div(2 * TARGET_PROGRAMS, programs), 64
        if ring:
            # Two stages, not more: a kernel that asks for much shared memory does not run beside products that use
            # the same memory as cache.
            block_n, warps, stages = 16, 1, 2
    else:
        target = TARGET_PROGRAMS * (2 if max_keys >= LONG_ROW else 1)
        wanted, smallest = min(_ceil_div(target, programs), MAX_SPLITS), block_n
    return SplitPlan(max(1, min(wanted, _ceil_div(max_keys, smallest))), smallest, block_n, warps, stages)


def ring_fits(dtype: torch.dtype, head_dim: int, heads_per_kv: int) -> bool:
    """Whether the kernel with a ring of buffers takes these heads."""
    return dtype in (torch.bfloat16, torch.float16) and head_dim in (64, 128, 256) and heads_per_kv <= 16
