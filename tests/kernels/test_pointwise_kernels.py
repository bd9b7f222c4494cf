from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_formulas import assert_close, naive_rms_norm, naive_rope

from mainspring.kernels import add_rms_norm, apply_rope, rms_norm, rope_and_cache, rope_table, silu_and_mul

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@settings(max_examples=25)
@given(
    shape=st.lists(st.integers(1, 5), min_size=0, max_size=2),
    size=st.integers(1, 130),
    dtype=st.sampled_from(DTYPES),
    magnitude=st.sampled_from([1e-3, 1.0, 100.0]),
)
def test_rms_norm_equals_the_formula(shape: list[int], size: int, dtype: torch.dtype, magnitude: float) -> None:
    x = (torch.randn(*shape, size) * magnitude).to(dtype)
    weight = torch.randn(size).to(dtype)
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype
    assert_close(out, naive_rms_norm(x, weight, 1e-5))


def test_rms_norm_of_large_fp16_does_not_overflow() -> None:
    x = torch.full((2, 64), 6e4, dtype=torch.float16)
    assert_close(rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-6), torch.ones(2, 64).double())


def test_rms_norm_of_a_row_does_not_depend_on_its_company() -> None:
    x, weight = torch.randn(7, 576), torch.randn(576)
    together = rms_norm(x, weight, 1e-5)
    for row in range(7):
        assert torch.equal(rms_norm(x[row : row + 1], weight, 1e-5)[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_returns_the_norm_and_the_sum_and_writes_neither_argument(dtype: torch.dtype) -> None:
    x, residual = torch.randn(3, 40).to(dtype), torch.randn(3, 40).to(dtype)
    before = x.clone(), residual.clone()
    weight = torch.randn(40).to(dtype)
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, before[0] + before[1])
    assert_close(normed, naive_rms_norm(total, weight, 1e-5))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_rope_equals_complex_rotation(dtype: torch.dtype, head_dim: int) -> None:
    inv_freq = 1e4 ** (-torch.arange(0, head_dim, 2) / head_dim)
    positions = torch.tensor([0, 1, 7, 499])
    q, k = torch.randn(4, 6, head_dim).to(dtype), torch.randn(4, 2, head_dim).to(dtype)
    table = rope_table(inv_freq, 500)
    assert table.dtype == torch.float32 and table.shape == (500, head_dim)
    for index_dtype in (torch.int64, torch.int32):
        rotated_q, rotated_k = apply_rope(q, k, table, positions.to(index_dtype))
        # The table's angles are fp32: 499 radians are known to about 3e-5.
        tolerance = 1e-4 if dtype == torch.float32 else 3e-2
        for out, x in ((rotated_q, q), (rotated_k, k)):
            expected = naive_rope(x, inv_freq, positions)
            torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_rope_of_position_0_changes_nothing_and_attention_scaling_scales() -> None:
    table = rope_table(torch.rand(8), 3, attention_scaling=2.0)
    q, k = torch.randn(1, 2, 16), torch.randn(1, 1, 16)
    rotated_q, rotated_k = apply_rope(q, k, table, torch.tensor([0]))
    assert torch.equal(rotated_q, 2 * q) and torch.equal(rotated_k, 2 * k)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_equals_the_formula(dtype: torch.dtype) -> None:
    gate_up = (torch.randn(3, 2 * 37) * 4).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close(silu_and_mul(gate_up), gate / (1 + torch.exp(-gate)) * up)


def test_silu_of_a_very_negative_gate_is_zero_and_not_nan() -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 3.0, 2.0]])
    assert torch.equal(silu_and_mul(gate_up), torch.tensor([[0.0, 2e4]]))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_and_cache_is_norm_rope_and_write(dtype: torch.dtype, normed: bool) -> None:
    heads, kv_heads, head_dim, tokens = 4, 2, 16, 5
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).to(dtype)
    inv_freq = torch.rand(head_dim // 2)
    positions = torch.tensor([0, 3, 9, 1, 2])
    slots = torch.tensor([5, -1, 0, 11, 4])
    k_cache = torch.full((3, 4, kv_heads, head_dim), 7.0, dtype=dtype)
    v_cache = k_cache.clone()
    weights = [torch.randn(head_dim).to(dtype) for _ in range(2)] if normed else [None, None]
    q = rope_and_cache(qkv, rope_table(inv_freq, 10), positions, slots, k_cache, v_cache, *weights, 1e-6)

    split = qkv.view(tokens, -1, head_dim).double()
    expected_q, expected_k = split[:, :heads], split[:, heads : heads + kv_heads]
    if normed:
        expected_q = naive_rms_norm(expected_q, weights[0], 1e-6)
        expected_k = naive_rms_norm(expected_k, weights[1], 1e-6)
    assert_close(q, naive_rope(expected_q, inv_freq, positions))
    expected_k = naive_rope(expected_k, inv_freq, positions)
    k_flat, v_flat = k_cache.view(12, kv_heads, head_dim), v_cache.view(12, kv_heads, head_dim)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert_close(k_flat[slot], expected_k[token])
            assert torch.equal(v_flat[slot].double(), split[token, heads + kv_heads :])
    untouched = [slot for slot in range(12) if slot not in slots.tolist()]
    assert bool((k_flat[untouched] == 7).all()) and bool((v_flat[untouched] == 7).all())


def test_rope_and_cache_wants_both_norm_weights_or_neither() -> None:
    cache = torch.zeros(1, 1, 1, 4)
    slots = torch.tensor([0])
    with pytest.raises(ValueError, match="both or neither"):
        rope_and_cache(torch.zeros(1, 12), torch.zeros(1, 4), slots, slots, cache, cache, torch.ones(4))
