"""The embedded model gives the known ids, from its own tokenizer and weights."""

from __future__ import annotations

from typing import Any

import pytest

from mainspring.models.loader import load_config
from mainspring.models.source import ModelSource

ALPHABET = ("Here is the English alphabet: ABC", [33203, 23960, 57, 58, 59, 34519, 62, 7627])
CAPITAL = (
    "The capital of France is",
    [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33],
)
EMOJI = [10813, 230, 249]


def test_digits_are_cut_one_by_one(smollm2_tokenizer: Any) -> None:
    assert smollm2_tokenizer.encode("Steps:\n\n1. a") == [21831, 42, 1116, 33, 30, 253]
    assert smollm2_tokenizer.encode("a  1") == [81, 256, 33]


def test_the_chat_template_gives_31_ids_for_hi(smollm2_tokenizer: Any) -> None:
    ids = smollm2_tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )
    assert len(ids) == 31
    assert smollm2_tokenizer.convert_ids_to_tokens(ids[:1]) == ["<|im_start|>"]


def test_the_configuration_follows_from_the_metadata(smollm2_source: ModelSource) -> None:
    config = load_config(smollm2_source)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.rope.theta == 1e5
    assert config.tie_word_embeddings
    assert (config.vocab_size, config.eos_token_ids, config.bos_token_id) == (49152, (2,), 1)


@pytest.mark.parametrize(("prompt", "expected"), [ALPHABET, CAPITAL])
def test_greedy_ids_are_the_known_ones(
    prompt: str, expected: list[int], smollm2: Any, smollm2_tokenizer: Any, paged_run: Any
) -> None:
    ids = paged_run(smollm2).greedy(smollm2_tokenizer.encode(prompt), len(expected))
    assert ids == expected


def test_a_short_chat_ends_at_its_tenth_token(smollm2: Any, smollm2_tokenizer: Any, paged_run: Any) -> None:
    prompt = smollm2_tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )
    assert paged_run(smollm2).greedy(prompt, 10)[-1] in smollm2.config.eos_token_ids


def test_an_emoji_over_three_tokens(smollm2: Any, smollm2_tokenizer: Any, paged_run: Any) -> None:
    prompt = smollm2_tokenizer.apply_chat_template(
        [{"role": "user", "content": "Repeat this emoji three times: 😊"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    ids = paged_run(smollm2, capacity=96).greedy(prompt, 9)
    assert ids == EMOJI * 3
    assert smollm2_tokenizer.decode(ids) == "🌟🌟🌟"
