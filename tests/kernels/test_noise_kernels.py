from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from naive_formulas import naive_bits

from mainspring.kernels.noise import gumbel_from_bits, gumbel_noise, mix, random_bits, row_keys

I32 = st.integers(-(2**31), 2**31 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)


def bits_of(seed: int, choice: int, position: int, count: int = 4096) -> torch.Tensor:
    keys = row_keys(torch.tensor([seed]), torch.tensor([choice]), torch.tensor([position]))
    ids = torch.arange(count, dtype=torch.int32)
    return random_bits(keys[0].unsqueeze(1), keys[1].unsqueeze(1), ids)[0]


def ones(bits: torch.Tensor) -> torch.Tensor:
    """How often each of the 32 bits is set."""
    return torch.stack([((bits >> place) & 1).double().mean() for place in range(32)])


@given(seed=I64, choice=I32, position=I32, token_id=st.integers(0, 2**20))
def test_the_hash_is_the_one_written_down(seed: int, choice: int, position: int, token_id: int) -> None:
    keys = row_keys(
        torch.tensor([seed]),
        torch.tensor([choice], dtype=torch.int32),
        torch.tensor([position], dtype=torch.int32),
    )
    got = random_bits(*keys, torch.tensor([token_id], dtype=torch.int32))
    assert got.item() & 0xFFFFFFFF == naive_bits(seed, choice, position, token_id)


def test_mix_is_a_bijection_and_so_no_two_ids_of_a_row_share_their_bits() -> None:
    assert mix(torch.arange(200_000, dtype=torch.int32)).unique().numel() == 200_000
    assert bits_of(7, 0, 3, 200_000).unique().numel() == 200_000


def test_every_part_of_the_key_enters_in_every_bit() -> None:
    base = bits_of(5, 0, 9)
    changed = [bits_of(5 ^ (1 << bit), 0, 9) for bit in range(63)]
    changed += [bits_of(5 - 2**63, 0, 9), bits_of(5, 1, 9), bits_of(5, 0, 10), bits_of(9, 0, 5)]
    for other in changed:
        # 4096 flips of a fair coin: 0.5 +- 0.0078; five standard deviations.
        assert float((ones(base ^ other) - 0.5).abs().max()) < 0.04


def test_neighbouring_ids_and_positions_are_uncorrelated() -> None:
    rows = torch.stack([bits_of(1, 0, position, 2048) for position in range(64)])
    for shifted in (rows[1:] ^ rows[:-1], rows[:, 1:] ^ rows[:, :-1], rows[1:, 1:] ^ rows[:-1, :-1]):
        assert float((ones(shifted) - 0.5).abs().max()) < 0.01
    assert float((ones(rows) - 0.5).abs().max()) < 0.01


def test_noise_is_finite_at_both_ends() -> None:
    ends = torch.tensor([0, 1, -1, -2, 2**31 - 1, -(2**31)], dtype=torch.int32)
    noise = gumbel_from_bits(ends)
    assert bool(noise.isfinite().all())
    assert 22 < float(noise[0]) < 23 and -3 < float(noise[2]) < -2


def test_gumbel_from_bits_equals_the_formula() -> None:
    bits = torch.cat((mix(torch.arange(50_000, dtype=torch.int32)), torch.arange(0, 2**27, 2**13).int()))
    v = ((bits.long() & 0xFFFFFFFF).float().clamp(min=0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    right = -torch.log(-torch.log1p(-v.double()))
    torch.testing.assert_close(gumbel_from_bits(bits).double(), right, rtol=2e-5, atol=2e-5)


def test_noise_is_gumbel_distributed() -> None:
    noise = (
        gumbel_noise(torch.arange(8), torch.zeros(8), torch.arange(8), torch.arange(25_000).int()).double().flatten()
    )
    n = noise.numel()
    # Kolmogorov-Smirnov against exp(-exp(-x)); 1.95 / sqrt(n) is the 0.1% point.
    right = torch.exp(-torch.exp(-noise.sort().values))
    steps = torch.arange(1, n + 1).double() / n
    assert float((right - steps).abs().max()) < 1.95 / n**0.5
