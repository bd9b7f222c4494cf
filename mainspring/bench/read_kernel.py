"""A kernel that does nothing but read: a grid-stride sum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _sum_by_program(source, sums, elements, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    stride = tl.num_programs(0) * BLOCK
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(program * BLOCK, elements, stride):
        total += tl.load(source + start + offsets)
    tl.store(sums + program, tl.sum(total, axis=0))


def sum_by_program(source: torch.Tensor, sums: torch.Tensor, block: int, warps: int) -> None:
    """Read ``source`` int32 ``[elements]`` once with ``len(sums)`` programs, each leaving its sum (modulo 2^32).

    ``elements`` must be a multiple of ``block`` and below 2^30 + 2^29, so that offsets stay within 32 bits. Raises
    ``ValueError`` where it is not.
    """
    elements = source.numel()
    if elements % block or elements > 3 << 29:
        raise ValueError(f"{elements} elements; give a multiple of {block} of at most {3 << 29}")
    _sum_by_program[(sums.numel(),)](source, sums, elements, BLOCK=block, num_warps=warps)
