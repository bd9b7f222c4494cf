"""The hash and the Gumbel noise of :mod:`mainspring.kernels.noise`, the same bits, as device functions."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from mainspring.kernels import noise

_MULTIPLIER_1 = tl.constexpr(noise.MULTIPLIER_1)
_MULTIPLIER_2 = tl.constexpr(noise.MULTIPLIER_2)
_LANE_1 = tl.constexpr(noise.LANE_1)
_LANE_2 = tl.constexpr(noise.LANE_2)
_STRIDE = tl.constexpr(noise.STRIDE)
_SERIES_BELOW = tl.constexpr(noise.SERIES_BELOW)
_LARGEST_V = tl.constexpr(noise.LARGEST_V)


@triton.jit
def mix(x):
    """Scramble uint32 values; see the reference."""
    x = x ^ (x >> 16)
    x = (x * _MULTIPLIER_1).to(tl.uint32)
    x = x ^ (x >> 15)
    x = (x * _MULTIPLIER_2).to(tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def absorb(key_1, key_2, word):
    """Chain one more uint32 word into both keys."""
    key_1 = (mix(key_1 ^ word) + _LANE_1).to(tl.uint32)
    key_2 = mix((key_2 + word * _STRIDE).to(tl.uint32))
    return key_1, key_2


@triton.jit
def random_bits(seed, choice, position, ids):
    """32 random bits, uint32, for each of the int32 ``ids``; the int64 seed and the rest are scalars."""
    zero = (seed * 0).to(tl.uint32)
    key_1 = zero + _LANE_1
    key_2 = zero + _LANE_2
    key_1, key_2 = absorb(key_1, key_2, zero + (seed & 0xFFFFFFFF).to(tl.uint32))
    key_1, key_2 = absorb(key_1, key_2, zero + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    key_1, key_2 = absorb(key_1, key_2, zero + (choice.to(tl.int64) & 0xFFFFFFFF).to(tl.uint32))
    key_1, key_2 = absorb(key_1, key_2, zero + (position.to(tl.int64) & 0xFFFFFFFF).to(tl.uint32))
    return mix(mix((ids.to(tl.uint32) + key_1).to(tl.uint32)) ^ key_2)


@triton.jit
def gumbel_from_bits(bits):
    """A standard Gumbel variable, fp32 and finite, from 32 random bits."""
    whole = tl.maximum(bits.to(tl.float32), 0.5)
    v = tl.minimum(whole * 2.3283064365386963e-10, _LARGEST_V)
    series = v * (1.0 + v * (0.5 + v * (0.3333333333333333 + v * 0.25)))
    exponential = tl.where(v < _SERIES_BELOW, series, -tl.log(1.0 - v))
    return -tl.log(exponential)
