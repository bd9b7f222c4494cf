from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from mainspring.kernels import mask_stop_ids
from mainspring.kernels.sampling_extras import (
    add_logit_bias,
    apply_penalties,
    bad_word_endings,
    mask_not_allowed,
    token_logprobs,
)


@given(
    repetition=st.sampled_from([0.5, 1.0, 1.3]),
    presence=st.sampled_from([-1.0, 0.0, 0.6]),
    frequency=st.sampled_from([-0.2, 0.0, 0.4]),
    seed=st.integers(0, 50),
)
def test_penalties_equal_the_formula(repetition: float, presence: float, frequency: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 12, generator=generator)
    counts = torch.randint(0, 4, (1, 12), generator=generator) * torch.randint(0, 2, (1, 12))
    prompt = torch.rand(1, 12, generator=generator) < 0.3
    expected = []
    for value, count, asked in zip(logits[0].tolist(), counts[0].tolist(), prompt[0].tolist(), strict=True):
        if count or asked:
            value = value / repetition if value > 0 else value * repetition
        expected.append(value - frequency * count - (presence if count else 0.0))
    row = [torch.tensor([value]) for value in (repetition, presence, frequency)]
    apply_penalties(logits, counts, prompt, *row)
    torch.testing.assert_close(logits[0], torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_penalties_that_are_off_change_nothing_even_of_masked_logits() -> None:
    logits = torch.tensor([[1.0, -torch.inf, -2.0]])
    before = logits.clone()
    apply_penalties(
        logits, torch.ones(1, 3).int(), torch.ones(1, 3).bool(), torch.ones(1), torch.zeros(1), torch.zeros(1)
    )
    assert torch.equal(logits, before)


def test_each_row_has_its_own_penalties() -> None:
    logits = torch.ones(2, 2)
    counts = torch.tensor([[1, 0], [1, 0]])
    apply_penalties(logits, counts, counts > 5, torch.tensor([1.0, 2.0]), torch.tensor([0.25, 0.0]), torch.zeros(2))
    assert logits.tolist() == [[0.75, 1.0], [0.5, 1.0]]


def test_bias_is_added_to_its_ids_and_empty_entries_touch_nothing() -> None:
    logits = torch.zeros(2, 5)
    ids = torch.tensor([[2, -1, 0], [-1, -1, 7]], dtype=torch.int32)
    add_logit_bias(logits, ids, torch.tensor([[100.0, 9.0, -1.5], [9.0, 9.0, 9.0]]))
    assert logits.tolist() == [[-1.5, 0, 100, 0, 0], [0, 0, 0, 0, 0]]


def test_only_allowed_ids_are_left_in_rows_that_ask() -> None:
    logits = torch.zeros(2, 3)
    allowed = torch.tensor([[True, False, True]] * 2)
    mask_not_allowed(logits, allowed, torch.tensor([True, False]))
    assert logits.tolist() == [[0, -torch.inf, 0], [0, 0, 0]]


def test_bad_words_are_stopped_at_their_last_token() -> None:
    # Forbidden: "5", "1 2 6", and "2 7"; the answers end with "1 2", "2", and nothing.
    words = torch.tensor([[[-1, -1, 5], [1, 2, 6], [-1, 2, 7], [-1, -1, -1]]] * 3)
    recent = torch.tensor([[1, 2], [-2, 2], [-2, -2]])
    endings = bad_word_endings(words, recent)
    assert endings.tolist() == [[5, 6, 7, -1], [5, -1, 7, -1], [5, -1, -1, -1]]
    logits = torch.zeros(3, 8)
    mask_stop_ids(logits, endings, torch.ones(3, dtype=torch.bool))
    assert (logits == -torch.inf).sum(dim=1).tolist() == [3, 2, 1]


def test_logprobs_are_those_of_the_softmax() -> None:
    logits = torch.randn(4, 50) * 3
    tokens = torch.tensor([0, 7, 49, 20])
    got = token_logprobs(logits, tokens, 5)
    expected = torch.log(torch.softmax(logits.double(), -1))
    for row in range(4):
        value = expected[row, tokens[row]]
        torch.testing.assert_close(got.chosen[row].double(), value, rtol=1e-5, atol=1e-5)
        assert got.rank[row] == 1 + int((expected[row] > value).sum())
        order = expected[row].sort(descending=True)
        assert got.top_ids[row].tolist() == order.indices[:5].tolist()
        torch.testing.assert_close(got.top_values[row].double(), order.values[:5], rtol=1e-5, atol=1e-5)


def test_the_most_likely_token_has_rank_1_and_k_may_be_0() -> None:
    got = token_logprobs(torch.tensor([[1.0, 5.0, 2.0]]), torch.tensor([1]), 0)
    assert got.rank.tolist() == [1] and got.top_ids.shape == (1, 0)
