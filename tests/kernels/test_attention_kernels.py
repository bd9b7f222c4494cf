from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_formulas import PagedCase, assert_close, naive_decode, naive_prefill, paged_case

from mainspring.kernels import (
    decode_attention,
    decode_cpu,
    prefill_attention,
    rope_and_cache,
)
from mainspring.kernels.attention import rope_and_decode_attention
from mainspring.kernels.decode_cpu import PIECE, prepare_decode_attention

BLOCK = 16
EDGES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def slot_of(case: PagedCase, row: int, position: int) -> int:
    return int(case.block_tables[row, position // BLOCK]) * BLOCK + position % BLOCK


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 1, 20])
@pytest.mark.parametrize("scattered", [True, False])
def test_decode_equals_the_formula_at_edge_lengths(dtype: torch.dtype, window: int, scattered: bool) -> None:
    case = paged_case(EDGES, block_size=BLOCK, kv_heads=2, head_dim=64, dtype=dtype, scattered=scattered)
    q = torch.randn(len(EDGES), 6, 64).to(dtype)
    out = decode_attention(q, case.k_cache, case.v_cache, case.block_tables, case.seq_lens, 0.125, window)
    assert out.dtype == dtype
    assert_close(out, naive_decode(q, case, 0.125, window))


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=5),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    head_dim=st.sampled_from([16, 64, 80, 96, 128, 256]),
    block_size=st.sampled_from([1, 8, 16]),
    window=st.integers(0, 40),
    seed=st.integers(0, 99),
)
def test_decode_equals_the_formula(
    lengths: list[int], kv_heads: int, group: int, head_dim: int, block_size: int, window: int, seed: int
) -> None:
    case = paged_case(
        lengths, block_size=block_size, kv_heads=kv_heads, head_dim=head_dim, dtype=torch.float32, seed=seed
    )
    q = torch.randn(len(lengths), kv_heads * group, head_dim, generator=torch.Generator().manual_seed(seed))
    scale = head_dim**-0.5
    out = decode_attention(q, case.k_cache, case.v_cache, case.block_tables, case.seq_lens, scale, window)
    assert_close(out, naive_decode(q, case, scale, window))


def test_a_row_without_keys_is_zeros_and_not_nan() -> None:
    case = paged_case([0, 3, 0], block_size=4, kv_heads=1, head_dim=16, dtype=torch.float32)
    q = torch.full((3, 2, 16), torch.nan)
    q[1] = 1.0
    out = decode_attention(q, case.k_cache, case.v_cache, case.block_tables, case.seq_lens, 1.0)
    assert torch.equal(out[[0, 2]], torch.zeros(2, 2, 16))
    assert bool(out[1].isfinite().all())


def test_decode_of_a_row_does_not_depend_on_its_company() -> None:
    lengths = [33, 1, 200, 0, 16, 77]
    case = paged_case(lengths, block_size=BLOCK, kv_heads=3, head_dim=64, dtype=torch.float32)
    q = torch.randn(len(lengths), 9, 64)
    together = decode_attention(q, case.k_cache, case.v_cache, case.block_tables, case.seq_lens, 0.125)
    for row in range(len(lengths)):
        one = slice(row, row + 1)
        alone = decode_attention(
            q[one], case.k_cache, case.v_cache, case.block_tables[one, :13], case.seq_lens[one], 0.125
        )
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("scattered", [True, False])
def test_decode_takes_strided_queries(scattered: bool) -> None:
    case = paged_case([20, 9], block_size=8, kv_heads=2, head_dim=16, dtype=torch.float32, scattered=scattered)
    qkv = torch.randn(2, 8 * 16)
    q = qkv[:, : 4 * 16].view(2, 4, 16)
    out = decode_attention(q, case.k_cache, case.v_cache, case.block_tables, case.seq_lens, 0.25)
    assert_close(out, naive_decode(q, case, 0.25, 0))


PREFILL = [
    ([16], [16]),
    ([17, 1, 5], [17, 1, 5]),
    ([40, 16, 33], [7, 1, 16]),
    ([20, 30], [0, 30]),
    ([80], [33]),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("lengths", "counts"), PREFILL)
@pytest.mark.parametrize("window", [0, 1, 10])
def test_prefill_equals_the_formula(dtype: torch.dtype, lengths: list[int], counts: list[int], window: int) -> None:
    case = paged_case(lengths, block_size=BLOCK, kv_heads=2, head_dim=32, dtype=dtype)
    q = torch.randn(sum(counts), 4, 32).to(dtype)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    out = prefill_attention(q, case.k_cache, case.v_cache, case.block_tables, starts, case.seq_lens, 0.2, window)
    assert_close(out, naive_prefill(q, case, counts, 0.2, window))


@settings(max_examples=20)
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), min_size=1, max_size=4),
    block_size=st.sampled_from([4, 16]),
    window=st.integers(0, 30),
)
def test_prefill_with_a_cached_prefix_equals_the_formula(
    rows: list[tuple[int, int]], block_size: int, window: int
) -> None:
    counts = [count for _, count in rows]
    lengths = [context + count for context, count in rows]
    case = paged_case(lengths, block_size=block_size, kv_heads=1, head_dim=16, dtype=torch.float32)
    q = torch.randn(sum(counts), 3, 16)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    out = prefill_attention(q, case.k_cache, case.v_cache, case.block_tables, starts, case.seq_lens, 0.25, window)
    assert_close(out, naive_prefill(q, case, counts, 0.25, window))


def test_prefill_of_a_padded_step_is_that_of_its_sequences() -> None:
    case = paged_case([37, 5], block_size=BLOCK, kv_heads=2, head_dim=32, dtype=torch.float32)
    q = torch.full((16, 4, 32), torch.nan)
    q[:9] = torch.randn(9, 4, 32)
    starts = torch.tensor([0, 4, 9, 9, 9], dtype=torch.int32)
    tables = torch.cat((case.block_tables, torch.full_like(case.block_tables, 1 << 20)))
    lens = torch.cat((case.seq_lens, torch.zeros_like(case.seq_lens)))
    out = prefill_attention(q, case.k_cache, case.v_cache, tables, starts, lens, 0.2)
    alone = prefill_attention(q[:9], case.k_cache, case.v_cache, case.block_tables, starts[:3], case.seq_lens, 0.2)
    assert torch.equal(out[:9], alone)
    assert not out[9:].any()


def test_prefill_of_one_token_is_decode() -> None:
    case = paged_case([37], block_size=BLOCK, kv_heads=2, head_dim=32, dtype=torch.float32)
    q = torch.randn(1, 4, 32)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    args = (case.k_cache, case.v_cache, case.block_tables)
    torch.testing.assert_close(
        prefill_attention(q, *args, starts, case.seq_lens, 0.2),
        decode_attention(q, *args, case.seq_lens, 0.2),
    )


def test_more_queries_than_keys_is_an_error_that_says_so() -> None:
    case = paged_case([2], block_size=4, kv_heads=1, head_dim=16, dtype=torch.float32)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match="3 queries but only 2 keys"):
        prefill_attention(
            torch.randn(3, 1, 16), case.k_cache, case.v_cache, case.block_tables, starts, case.seq_lens, 1.0
        )


def test_decode_of_long_and_short_rows_together_is_that_of_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys go through in pieces, several of a row, and pieces in slabs: none may show in the bits of a row."""
    lengths = [PIECE - 1, 700, 0, PIECE, PIECE + 1, 3 * PIECE, 1]
    case = paged_case(lengths, block_size=BLOCK, kv_heads=3, head_dim=64, dtype=torch.float32)
    q = torch.randn(len(lengths), 9, 64)

    def attend(rows: slice, window: int) -> torch.Tensor:
        return decode_attention(
            q[rows], case.k_cache, case.v_cache, case.block_tables[rows], case.seq_lens[rows], 0.125, window
        )

    for window in (0, 130):
        together = attend(slice(None), window)
        assert_close(together, naive_decode(q, case, 0.125, window))
        for row in range(len(lengths)):
            assert torch.equal(attend(slice(row, row + 1), window)[0], together[row])
        with monkeypatch.context() as patch:
            patch.setattr(decode_cpu, "SLAB_BYTES", 2 * 3 * PIECE * 64 * 4)
            assert torch.equal(attend(slice(None), window), together)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_and_decode_are_the_two_operations_that_they_stand_for(dtype: torch.dtype, norm: bool) -> None:
    case = paged_case([5, 70, 0], block_size=BLOCK, kv_heads=2, head_dim=32, dtype=dtype)
    qkv, cos_sin = torch.randn(3, 8 * 32).to(dtype), torch.randn(128, 32)
    positions, slots = torch.tensor([4, 69, 0]), torch.tensor([slot_of(case, 0, 4), slot_of(case, 1, 69), -1])
    weights = (torch.randn(32).to(dtype), torch.randn(32).to(dtype), 1e-5) if norm else ()
    caches = [(case.k_cache.clone(), case.v_cache.clone()) for _ in range(2)]
    both = rope_and_decode_attention(
        qkv, cos_sin, positions, slots, *caches[0], case.block_tables, case.seq_lens, 0.2, 0, *weights
    )
    q = rope_and_cache(qkv, cos_sin, positions, slots, *caches[1], *weights)
    apart = decode_attention(q, *caches[1], case.block_tables, case.seq_lens, 0.2)
    assert_close(both, apart.double(), dtype)
    for ours, theirs in zip(caches[0], caches[1], strict=True):
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


def test_decode_follows_tables_and_lengths_that_were_changed_in_place() -> None:
    """A recorded step asks again and again with the same tensors, and what they hold changes."""
    case = paged_case([40, 40], block_size=BLOCK, kv_heads=1, head_dim=16, dtype=torch.float32)
    q = torch.randn(2, 2, 16)
    run, (out,) = prepare_decode_attention(q, case.k_cache, case.v_cache, case.block_tables, case.seq_lens, 0.25)
    run()
    before = out.clone()
    case.block_tables.copy_(case.block_tables.flip(0).clone())
    run()
    case.keys.reverse()
    case.values.reverse()
    assert not torch.equal(out, before)
    assert_close(out, naive_decode(q, case, 0.25, 0))
    case.seq_lens.fill_(33)
    run()
    short = [entries[:33] for entries in (*case.keys, *case.values)]
    case.keys[:], case.values[:] = short[:2], short[2:]
    assert_close(out, naive_decode(q, case, 0.25, 0))
    case.seq_lens.zero_()
    run()
    assert torch.equal(out, torch.zeros_like(out))
