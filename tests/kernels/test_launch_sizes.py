"""The sizes of launches are Triton's."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")


def test_sizes_are_those_that_triton_gives() -> None:
    from mainspring.kernels.triton.sizes import cdiv, next_power_of_2

    for n in [*range(1, 300), 1023, 1024, 1025, 151_936, 1 << 20, (1 << 31) + 1]:
        assert next_power_of_2(n) == triton.next_power_of_2(n)
        for by in (1, 3, 64, 1024):
            assert cdiv(n, by) == triton.cdiv(n, by)
