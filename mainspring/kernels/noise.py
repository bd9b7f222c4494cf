"""The random numbers of sampling: a hash of (seed, choice, position, token id), no state.

Why a hash: a token's random number must not depend on the row it sits in, on the batch, on padding or on how
often something was launched, so there is no generator to advance. Why this one: it must be the same function
bit for bit here and in Triton, with 32-bit multiplications, shifts and exclusive ors only. Its step is the
"lowbias32" finalizer (C. Wellons, "Prospecting for Hash Functions", 2018), near the least avalanche bias
that is known for two multiplications. The key of a row chains two lanes of it over the seed's halves, the
choice and the position: 64 bits in all, so that two draws of one machine's lifetime do not meet by chance.
One lane is added to the token id, the other mixed in afterwards. Within a row the map from id to 32 bits is a
bijection: no two ids get the same number. It is not a cryptographic generator.

The 32 bits x become v = max(x, 1/2) / 2^32, rounded to fp32 and kept in [2^-33, 1 - 2^-24]; the Gumbel
variable is -log(-log(1 - v)), between -2.82 and 22.9, never infinite. Small v, which make the large values
that decide a draw, keep all their bits.

Gumbel-max sampling: arg-max over ids of ``logit / temperature + gumbel`` is distributed as the softmax.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Constants of the hash, as unsigned 32-bit integers. The Triton kernels use the same ones.
MULTIPLIER_1 = 0x7FEB352D
MULTIPLIER_2 = 0x846CA68B
LANE_1 = 0x9E3779B9
LANE_2 = 0x6A09E667
STRIDE = 0x85EBCA6B

#: Below this v, -log(1 - v) is summed as a series, because 1 - v would lose its bits.
SERIES_BELOW = 1.0 / 128.0
#: The largest v: the fp32 just below 1.
LARGEST_V = 1.0 - 2.0**-24


def _signed(value: int) -> int:
    """The int32 with the same bits as an unsigned 32-bit integer."""
    return value - (1 << 32) if value >= 1 << 31 else value


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift int32 right, filling with zeros as for unsigned integers."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """Scramble int32 values (taken as unsigned, wrapping); a bijection."""
    x = x ^ _shifted(x, 16)
    x *= _signed(MULTIPLIER_1)
    x ^= _shifted(x, 15)
    x *= _signed(MULTIPLIER_2)
    x ^= _shifted(x, 16)
    return x


def row_keys(seeds: Tensor, choices: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Hash what identifies a draw into two 32-bit keys.

    Args:
        seeds: ``[batch]`` int64, all 64 bits count.
        choices: ``[batch]`` int32, which of a request's parallel answers.
        positions: ``[batch]`` int32 or int64 (its low 32 bits count), the absolute position drawn for.

    Returns:
        Two ``[batch]`` int32 tensors.
    """
    words = (
        seeds.long().to(torch.int32),
        (seeds.long() >> 32).to(torch.int32),
        choices.to(torch.int32),
        positions.to(torch.int32),
    )
    key_1 = torch.full_like(words[0], _signed(LANE_1))
    key_2 = torch.full_like(words[0], _signed(LANE_2))
    for word in words:
        key_1 = mix(key_1 ^ word)
        key_2 = mix(key_2 + word * _signed(STRIDE))
        key_1 = key_1 + _signed(LANE_1)
    return key_1, key_2


def random_bits(key_1: Tensor, key_2: Tensor, ids: Tensor) -> Tensor:
    """Return 32 random bits, as int32, for each token id.

    Args:
        key_1: int32, from :func:`row_keys`, of a shape that broadcasts against ``ids``.
        key_2: likewise.
        ids: int32 token ids.
    """
    return mix(mix(ids + key_1) ^ key_2)


def gumbel_from_bits(bits: Tensor) -> Tensor:
    """Turn 32 random bits (int32) into a standard Gumbel variable, fp32 and finite."""
    whole = bits.long().bitwise_and_(0xFFFFFFFF).to(torch.float32)
    v = whole.clamp_(min=0.5).mul_(2.0**-32).clamp_(max=LARGEST_V)
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3.0 + v * 0.25)))
    exponential = torch.where(v < SERIES_BELOW, series, (1.0 - v).log_().neg_())
    return exponential.log_().neg_()


def gumbel_noise(seeds: Tensor, choices: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Return the Gumbel noise of some token ids for every row, ``[batch, len(ids)]`` fp32.

    Args:
        seeds: as in :func:`row_keys`, like the next two.
        choices: likewise.
        positions: likewise.
        ids: ``[n]`` int32 token ids.
    """
    key_1, key_2 = row_keys(seeds, choices, positions)
    return gumbel_from_bits(random_bits(key_1.unsqueeze(1), key_2.unsqueeze(1), ids))
