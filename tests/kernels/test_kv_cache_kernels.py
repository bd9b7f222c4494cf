from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mainspring.kernels import rope_and_cache, write_kv


def _bytes(x: torch.Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


@given(
    slots=st.lists(st.integers(0, 23), unique=True, max_size=12),
    skipped=st.sets(st.integers(0, 11)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_each_token_lands_in_its_slot_and_nothing_else_changes(
    slots: list[int], skipped: set[int], dtype: torch.dtype
) -> None:
    wanted = [-1 if index in skipped else slot for index, slot in enumerate(slots)]
    caches = [torch.randn(6, 4, 2, 8).to(dtype) for _ in range(2)]
    expected = [cache.clone().view(24, 2, 8) for cache in caches]
    sources = [torch.randn(len(slots), 2, 8).to(dtype) for _ in range(2)]
    for cache, source in zip(expected, sources, strict=True):
        for token, slot in enumerate(wanted):
            if slot >= 0:
                cache[slot] = source[token]
    write_kv(*sources, *caches, torch.tensor(wanted, dtype=torch.int64))
    for cache, right in zip(caches, expected, strict=True):
        assert _bytes(cache) == _bytes(right)


@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_slot_minus_one_leaves_every_byte_as_it_was(tokens: int) -> None:
    caches = [torch.randn(3, 4, 2, 8) for _ in range(2)]
    # The last slot and the null block in particular, whatever is in them.
    caches[0][-1, -1] = torch.nan
    before = [_bytes(cache) for cache in caches]
    poison = torch.full((tokens, 2, 8), torch.nan)
    write_kv(poison, poison, *caches, torch.full((tokens,), -1))
    assert [_bytes(cache) for cache in caches] == before


@pytest.mark.parametrize("padding", [1, 8])
def test_padding_beside_the_last_live_slot_leaves_it_alone(padding: int) -> None:
    caches = [torch.zeros(3, 4, 1, 8) for _ in range(2)]
    slots = torch.tensor([11, *[-1] * padding])
    k = torch.cat((torch.ones(1, 1, 8), torch.full((padding, 1, 8), torch.nan)))
    write_kv(k, k, *caches, slots)
    for cache in caches:
        assert bool((cache.view(12, 8)[11] == 1).all())
        assert bool((cache.view(12, 8)[:11] == 0).all())


def test_views_of_a_qkv_product_are_taken() -> None:
    qkv = torch.randn(6, 4 * 8)
    k, v = qkv[:, 16:24].view(6, 1, 8), qkv[:, 24:].view(6, 1, 8)
    k_cache, v_cache = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)
    write_kv(k, v, k_cache, v_cache, torch.arange(6))
    assert torch.equal(k_cache.view(8, 1, 8)[:6], k) and torch.equal(v_cache.view(8, 1, 8)[:6], v)


def test_a_slot_beyond_the_cache_is_an_error() -> None:
    cache = torch.zeros(2, 4, 1, 8)
    for tokens in (1, 8):
        with pytest.raises((IndexError, RuntimeError)):
            k = torch.zeros(tokens, 1, 8)
            write_kv(k, k, cache, cache.clone(), torch.full((tokens,), 8))


@pytest.mark.parametrize("count", [2, 4])
def test_another_number_of_slots_than_of_tokens_is_refused(count: int) -> None:
    cache = torch.zeros(4, 8, 2, 16)
    k = torch.ones(3, 2, 16)
    slots = torch.arange(8, 8 + count)
    with pytest.raises(ValueError, match=f"slots .{count}. for 3 tokens"):
        write_kv(k, k, cache, cache.clone(), slots)
    with pytest.raises(ValueError, match=f"slots .{count}. for 3 tokens"):
        rope_and_cache(torch.ones(3, 6 * 16), torch.ones(9, 16), torch.arange(3), slots, cache, cache.clone())
    assert not cache.any()
