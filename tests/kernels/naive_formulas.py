"""What the operations mean, in fp64 and element by element, and inputs with everything unowned poisoned."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Compare with an fp64 right answer as closely as the dtype allows; NaN is never close."""
    tolerance = TOLERANCE[dtype or actual.dtype]
    torch.testing.assert_close(actual.double().cpu(), expected.cpu(), rtol=tolerance, atol=tolerance)


def naive_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def naive_rope(x: Tensor, inv_freq: Tensor, positions: Tensor) -> Tensor:
    """Rotate each pair (i, i + half) of ``[tokens, heads, head_dim]`` as a complex number."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    angles = positions.double()[:, None] * inv_freq.double()
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


def naive_attention(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One query ``[heads, head_dim]`` over ``[n, kv_heads, head_dim]`` keys; zeros where there are none."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    per_kv = q.shape[0] // keys.shape[1]
    for head in range(q.shape[0]):
        if keys.shape[0]:
            k, v = keys[:, head // per_kv].double(), values[:, head // per_kv].double()
            out[head] = torch.softmax(k @ q[head].double() * scale, dim=0) @ v
    return out


@dataclass
class PagedCase:
    """A paged cache in which each row's keys are known; all else in it is NaN."""

    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    def to(self, device: str) -> PagedCase:
        moved = [t.to(device) for t in (self.k_cache, self.v_cache, self.block_tables, self.seq_lens)]
        return PagedCase(*moved, self.keys, self.values)


def paged_case(
    lengths: list[int],
    *,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    seed: int = 0,
    scattered: bool = True,
    extra_columns: int = 2,
) -> PagedCase:
    """Give each row its blocks; the null block, free blocks and slots beyond a length hold NaN.

    Table entries beyond a row's blocks are far outside the cache: whoever follows one fails.
    """
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // block_size) for length in lengths]
    num_blocks = 1 + sum(needed) + 3
    order = torch.randperm(num_blocks - 1, generator=generator) + 1
    if not scattered:
        order = torch.arange(1, num_blocks)
    shape = (num_blocks, block_size, kv_heads, head_dim)
    k_cache = torch.full(shape, torch.nan, dtype=dtype)
    v_cache = torch.full(shape, torch.nan, dtype=dtype)
    width = max([*needed, 1]) + extra_columns
    tables = torch.full((len(lengths), width), 10**8, dtype=torch.int32)
    keys, values = [], []
    used = 0
    for row, length in enumerate(lengths):
        blocks = order[used : used + needed[row]]
        used += needed[row]
        tables[row, : needed[row]] = blocks.int()
        k, v = (torch.randn(length, kv_heads, head_dim, generator=generator).to(dtype) for _ in range(2))
        position = torch.arange(length)
        k_cache[blocks[position // block_size], position % block_size] = k
        v_cache[blocks[position // block_size], position % block_size] = v
        keys.append(k)
        values.append(v)
    return PagedCase(k_cache, v_cache, tables, torch.tensor(lengths, dtype=torch.int32), keys, values)


def naive_decode(q: Tensor, case: PagedCase, scale: float, window: int) -> Tensor:
    q = q.cpu()
    start = -window if window else 0
    return torch.stack(
        [naive_attention(q[row], case.keys[row][start:], case.values[row][start:], scale) for row in range(q.shape[0])]
    )


def naive_prefill(q: Tensor, case: PagedCase, counts: list[int], scale: float, window: int) -> Tensor:
    q = q.cpu()
    out = []
    token = 0
    for row, count in enumerate(counts):
        length = case.keys[row].shape[0]
        for stop in range(length - count + 1, length + 1):
            start = max(0, stop - window) if window else 0
            keys, values = case.keys[row][start:stop], case.values[row][start:stop]
            out.append(naive_attention(q[token], keys, values, scale))
            token += 1
    return torch.stack(out) if out else q.double()


def naive_bits(seed: int, choice: int, position: int, token_id: int) -> int:
    """The hash in Python's unbounded integers."""
    word = 0xFFFFFFFF

    def mix(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & word
        x = ((x ^ (x >> 15)) * 0x846CA68B) & word
        return x ^ (x >> 16)

    key_1, key_2 = 0x9E3779B9, 0x6A09E667
    for part in (seed & word, (seed >> 32) & word, choice & word, position & word):
        key_1 = (mix(key_1 ^ part) + 0x9E3779B9) & word
        key_2 = mix((key_2 + part * 0x85EBCA6B) & word)
    return mix(mix((token_id + key_1) & word) ^ key_2)


def naive_kept(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The ids that may be drawn, by the definition: order, min-p, top-k, top-p."""
    import math

    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weight = [math.exp((value - max(logits)) / temperature) for value in logits]
    kept = [i for i in order if weight[i] >= min_p]
    if top_k > 0:
        kept = kept[:top_k]
    total = sum(weight[i] for i in kept)
    if top_p < 1:
        mass = 0.0
        count = 0
        while count < len(kept) and (count == 0 or mass < top_p * total):
            mass += weight[kept[count]]
            count += 1
        kept = kept[:count]
    return set(kept)
