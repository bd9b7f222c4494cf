"""Sizes of launches. Triton's own functions serve kernels too, which costs 8 us a call on the host."""

from __future__ import annotations


def next_power_of_2(n: int) -> int:
    """The least power of two that is >= ``n``, which is at least 1."""
    return 1 << (n - 1).bit_length()


def cdiv(n: int, by: int) -> int:
    """``n / by``, rounded up."""
    return -(-n // by)
