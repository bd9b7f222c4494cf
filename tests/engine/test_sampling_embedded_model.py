"""Sampling on the embedded model, in fp32 on the CPU: known right answers, and texts that need its tokenizer."""

from __future__ import annotations

import pytest
import torch
from sampling_helpers import greedy, ids, trace
from transformers import RepetitionPenaltyLogitsProcessor

from mainspring import LLM, SamplingParams

FRANCE = "The capital of France is"
FRANCE_IDS = [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33]


def test_a_biased_end_id_waits_for_min_tokens(smollm2: LLM) -> None:
    params = SamplingParams(temperature=0.0, logit_bias={2: 100}, min_tokens=4, max_tokens=32)
    tokens = ids(smollm2.generate("Hello", params)[0])
    assert len(tokens) == 5
    assert [index for index, token in enumerate(tokens) if token == 2] == [4]


def test_logprobs_have_text_and_the_values_of_log_softmax(smollm2: LLM) -> None:
    prompt = smollm2.core.tokenizer(FRANCE)["input_ids"]
    choice, logits = trace(smollm2, greedy(logprobs=3, max_tokens=5), prompt)
    assert list(choice.token_ids) == FRANCE_IDS[:5]
    assert choice.logprobs is not None
    for told, row, token in zip(choice.logprobs, logits, choice.token_ids, strict=True):
        expected = torch.log_softmax(row, dim=-1)
        assert len(told) == 3 and told[token].rank == 1
        for token_id, logprob in told.items():
            assert logprob.logprob == pytest.approx(float(expected[token_id]), abs=1e-4)
            assert logprob.decoded_token == smollm2.core.tokenizer.decode([token_id])
    assert choice.logprobs[0][7042].decoded_token == " Paris"
    silent = smollm2.generate(FRANCE, greedy(logprobs=1, max_tokens=1, detokenize=False))[0].outputs[0]
    assert silent.logprobs is not None and silent.logprobs[0][7042].decoded_token is None


def test_the_repetition_penalty_is_that_of_transformers_over_sixteen_tokens(smollm2: LLM) -> None:
    prompt = smollm2.core.tokenizer(FRANCE)["input_ids"]
    choice, logits = trace(smollm2, greedy(repetition_penalty=1.3, max_tokens=16), prompt)
    reference = RepetitionPenaltyLogitsProcessor(1.3)
    for index, (row, token) in enumerate(zip(logits, choice.token_ids, strict=True)):
        known = torch.tensor([prompt + list(choice.token_ids[:index])])
        assert token == int(reference(known, row.unsqueeze(0))[0].argmax())
    assert list(choice.token_ids) != FRANCE_IDS


def test_bad_words_are_not_written_with_or_without_a_space_before_them(smollm2: LLM) -> None:
    free = smollm2.generate(FRANCE, greedy(max_tokens=16))[0].outputs[0]
    assert "Paris" in free.text
    barred = smollm2.generate(FRANCE, greedy(max_tokens=16, bad_words=["Paris", "Lyon"]))[0].outputs[0]
    assert "Paris" not in barred.text and barred.text


def test_a_bad_word_of_several_tokens_bars_only_its_completion(smollm2: LLM) -> None:
    prompt = "Here is the English alphabet: ABC"
    free = list(smollm2.generate(prompt, greedy(max_tokens=8))[0].outputs[0].token_ids)
    text = smollm2.core.tokenizer.decode(free[:2])
    assert text == "DEFGH" and len(smollm2.core.tokenizer.encode(text)) > 1
    words = [tuple(smollm2.core.tokenizer.encode(spelling)) for spelling in (text, " " + text)]
    barred = list(smollm2.generate(prompt, greedy(max_tokens=8, bad_words=[text]))[0].outputs[0].token_ids)
    assert not any(tuple(barred[at : at + len(word)]) == word for word in words for at in range(8))
    if tuple(free[:2]) in words:
        assert barred[0] == free[0] and barred[1] != free[1]


def test_a_blank_bad_word_is_barred_as_it_is(smollm2: LLM) -> None:
    assert "\n" in smollm2.generate(FRANCE, greedy(max_tokens=3))[0].outputs[0].text
    barred = smollm2.generate(FRANCE, greedy(max_tokens=3, bad_words=["\n"]))[0].outputs[0]
    assert 198 not in barred.token_ids and barred.text.startswith(" Paris.")
