from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_formulas import naive_kept

from mainspring.kernels import greedy, mask_stop_ids, sample
from mainspring.kernels.filters import descending_order, filter_cut_reference, may_draw
from mainspring.kernels.sampling import greedy_reference, sample_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(logits: torch.Tensor, function: Any = sample, **settings: Any) -> torch.Tensor:
    """Sample with one value, or a list of one a row, for each setting."""
    batch = logits.shape[0]
    values = {
        "temperature": (1.0, torch.float32),
        "top_k": (0, torch.int32),
        "top_p": (1.0, torch.float32),
        "min_p": (0.0, torch.float32),
        "seeds": (0, torch.int64),
        "choices": (0, torch.int32),
        "positions": (0, torch.int32),
    }
    tensors = []
    for name, (default, dtype) in values.items():
        value = settings.pop(name, default)
        rows = list(value) if isinstance(value, list | range) else [value] * batch
        tensors.append(torch.tensor(rows, dtype=dtype))
    return function(logits, *tensors, **settings)


def test_greedy_takes_the_lowest_id_of_equal_ones() -> None:
    for dtype in DTYPES:
        logits = torch.zeros(3, 5000, dtype=dtype)
        logits[0, [4999, 77, 3000]] = 2.0
        logits[1, 4999] = 1.0
        assert greedy(logits).tolist() == [77, 4999, 0]
        assert draw(logits, temperature=0.0).tolist() == [77, 4999, 0]


@given(seed=st.integers(-(2**63), 2**63 - 1), choice=st.integers(0, 9), position=st.integers(0, 2**31 - 1))
@settings(max_examples=20)
def test_a_token_depends_on_seed_choice_and_position_and_not_on_row_or_batch(
    seed: int, choice: int, position: int
) -> None:
    logits = torch.randn(1, 300)
    settings = {"temperature": 0.9, "top_k": 50, "top_p": 0.95}
    alone = draw(logits, seeds=seed, choices=choice, positions=position, **settings)
    for batch, row in ((2, 1), (7, 0), (7, 3)):
        company = torch.randn(batch, 300) * 3
        company[row] = logits[0]
        parts = {"seeds": seed, "choices": choice, "positions": position}
        rows = {name: [11 + i for i in range(batch)] for name in parts}
        for name, value in parts.items():
            rows[name][row] = value
        temperature = [float(i % 2) for i in range(batch)]
        temperature[row] = 0.9
        assert draw(company, **rows, **(settings | {"temperature": temperature}))[row] == alone[0]


def test_each_row_uses_its_own_seed() -> None:
    logits = torch.zeros(64, 1000)
    assert draw(logits, seeds=range(64)).unique().numel() > 55
    assert draw(logits, seeds=0).unique().numel() == 1
    # The upper half of a seed, the choice and the position count as well.
    assert draw(logits, seeds=[i << 32 for i in range(64)]).unique().numel() > 55
    assert draw(logits, choices=range(64)).unique().numel() > 55
    assert draw(logits, positions=range(64)).unique().numel() > 55


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_those_of_the_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, 1.5, -torch.inf, 0.2])
    draws = 20_000
    for varied in ("positions", "seeds"):
        tokens = draw(logits.expand(draws, -1), sample_reference, temperature=temperature, **{varied: range(draws)})
        seen = torch.bincount(tokens, minlength=8).double()
        expected = torch.softmax(logits.double() / temperature, 0) * draws
        assert seen[6] == 0
        live = expected > 0
        chi_square = ((seen - expected)[live] ** 2 / expected[live]).sum()
        # Six degrees of freedom: 22.5 is the 0.1% point.
        assert float(chi_square) < 22.5


def test_frequencies_after_top_k_are_those_of_what_is_left() -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])
    tokens = draw(logits.expand(20_000, -1), sample_reference, top_k=3, positions=range(20_000))
    seen = torch.bincount(tokens, minlength=5).double()
    expected = torch.softmax(logits[:3].double(), 0) * 20_000
    assert seen[3:].sum() == 0
    # Two degrees of freedom: 13.8 is the 0.1% point.
    assert float(((seen[:3] - expected) ** 2 / expected).sum()) < 13.8


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6])
def test_a_tiny_temperature_is_the_arg_max(temperature: float) -> None:
    for scale in (1.0, 100.0):
        logits = torch.randn(50, 400) * scale
        logits[torch.arange(50), torch.arange(50)] = logits.amax() + 1.3
        assert torch.equal(draw(logits, temperature=temperature, positions=range(50)), torch.arange(50))


@pytest.mark.parametrize("dtype", DTYPES)
def test_top_k_1_and_a_tiny_top_p_are_the_arg_max_even_among_equals(dtype: torch.dtype) -> None:
    logits = torch.randint(-3, 4, (64, 30)).to(dtype)
    expected = greedy(logits)
    for filters in ({"top_k": 1}, {"top_p": 1e-4}, {"top_p": 0.0}):
        assert torch.equal(draw(logits, positions=range(64), **filters), expected)


def test_settings_that_are_off_change_nothing() -> None:
    logits = torch.randn(64, 100)
    plain = draw(logits, positions=range(64), filters=False)
    off = {"top_k": [0, -1, 100, 10**6], "top_p": [1.0, 1.5], "min_p": [0.0, -0.5]}
    for name, values in off.items():
        for value in values:
            for function in (sample, sample_reference):
                assert torch.equal(draw(logits, function, positions=range(64), **{name: value}), plain)


@settings(max_examples=60)
@given(
    values=st.lists(st.integers(-6, 6), min_size=1, max_size=40),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.integers(-1, 45),
    top_p=st.sampled_from([0.0, 1e-4, 0.13, 0.5, 0.77, 0.951, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.3, 0.999, 1.0]),
)
def test_what_may_be_drawn_is_the_definition(
    values: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.tensor([values], dtype=torch.float32) / 4
    one = [torch.tensor([value]) for value in (temperature, top_k, top_p, min_p)]
    kept = may_draw(logits, *filter_cut_reference(logits, *one))[0]
    expected = naive_kept(logits[0].tolist(), one[0].item(), top_k, one[2].item(), one[3].item())
    assert set(kept.nonzero().flatten().tolist()) == expected


@settings(max_examples=25)
@given(data=st.data())
def test_the_quick_path_draws_what_the_reference_draws(data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, 5))
    dtype = data.draw(st.sampled_from(DTYPES))
    logits = (torch.randn(batch, data.draw(st.sampled_from([1, 9, 200, 900]))) * 3).to(dtype)
    if data.draw(st.booleans()):
        logits = logits.round()

    def rows(strategy: st.SearchStrategy[Any]) -> list[Any]:
        return data.draw(st.lists(strategy, min_size=batch, max_size=batch))

    settings = {
        "temperature": rows(st.sampled_from([0.0, 1e-6, 0.7, 1.0, 5.0])),
        "top_k": rows(st.sampled_from([-1, 0, 1, 5, 50])),
        "top_p": rows(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        "min_p": rows(st.sampled_from([0.0, 0.05, 1.0])),
        "seeds": rows(st.integers(-(2**63), 2**63 - 1)),
        "positions": rows(st.integers(0, 10_000)),
    }
    assert torch.equal(draw(logits, **settings), draw(logits, function=sample_reference, **settings))


@pytest.mark.parametrize("vocab", [40, 40_000])
def test_the_order_is_that_of_a_stable_sort(vocab: int) -> None:
    logits = torch.randn(2, vocab)
    logits[1] = torch.randint(-3, 4, (vocab,)) / 2
    logits[0, [3, 20, 30]] = torch.tensor([-torch.inf, torch.inf, -torch.inf])
    logits[1, 5::9] *= -0.0
    ordered, ids = descending_order(logits)
    right = torch.sort(logits, dim=-1, descending=True, stable=True)
    assert torch.equal(ids, right.indices) and torch.equal(ordered, right.values)


def test_masked_logits_are_never_drawn_and_a_row_of_nothing_else_is_harmless() -> None:
    logits = torch.full((40, 20), -torch.inf)
    logits[:, 3] = -5.0
    for filters in ({}, {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.2}, {"temperature": 0.0}):
        assert bool((draw(logits, positions=range(40), **filters) == 3).all())
        nothing = draw(torch.full((2, 20), -torch.inf), **filters)
        assert bool(((nothing >= 0) & (nothing < 20)).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_stop_ids_are_masked_in_active_rows_only(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 10).to(dtype)
    expected = logits.clone()
    expected[0, [0, 9]] = -torch.inf
    stop_ids = torch.tensor([[0, 9, -1], [1, 2, 3], [-1, -1, -1]], dtype=torch.int32)
    mask_stop_ids(logits, stop_ids, torch.tensor([True, False, True]))
    assert torch.equal(logits, expected)


def test_stop_ids_outside_the_vocabulary_touch_nothing() -> None:
    logits = torch.randn(2, 10)
    before = logits.clone()
    mask_stop_ids(logits, torch.tensor([[-1, 10], [-7, 999]], dtype=torch.int32), torch.tensor([True, True]))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"top_k": 200}, {"top_p": 0.9}, {"min_p": 0.1}])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("width", [1, 300])
def test_a_row_that_is_not_finite_gives_an_id_and_leaves_the_others_alone(
    settings: dict[str, float], value: float, width: int
) -> None:
    logits = torch.randn(3, 300)
    expected = draw(logits, **settings)
    logits[1, 7 : 7 + width] = value
    tokens = draw(logits, **settings)
    assert 0 <= int(tokens[1]) < 300
    assert tokens[[0, 2]].tolist() == expected[[0, 2]].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_on_a_cpu_is_the_reference_with_ties_infinities_and_nans(dtype: torch.dtype) -> None:
    logits = torch.randn(6, 1001).to(dtype)
    logits[1, [900, 17, 500]] = 9.0
    logits[2].fill_(-torch.inf)
    logits[3, 400] = torch.inf
    logits[4, [30, 20]] = torch.nan
    logits[5, 3:] = -torch.inf
    wide = torch.zeros(6, 2002, dtype=dtype)
    wide[:, ::2] = logits
    for each in (logits, wide[:, ::2]):
        assert greedy(each).tolist() == greedy_reference(logits).tolist()
    assert greedy(logits)[1:5].tolist() == [17, 0, 400, 20]
