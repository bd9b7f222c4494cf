"""Small inputs with known right answers on the embedded model, in fp32 on the CPU."""

from __future__ import annotations

import pytest

from mainspring import LLM, SamplingParams

ALPHABET = "Here is the English alphabet: ABC"
ALPHABET_IDS = [33203, 23960, 57, 58, 59, 34519, 62, 7627]
FRANCE = "The capital of France is"
FRANCE_IDS = [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33]
EMOJI = [{"role": "user", "content": "Repeat this emoji three times: 😊"}]
EMOJI_IDS = [10813, 230, 249] * 3


def test_known_completions(smollm2: LLM) -> None:
    for prompt, expected in ((ALPHABET, ALPHABET_IDS), (FRANCE, FRANCE_IDS)):
        params = SamplingParams(temperature=0.0, max_tokens=len(expected))
        assert smollm2.generate(prompt, params)[0].outputs[0].token_ids == expected


def test_a_chat_answer_ends_with_the_end_token(smollm2: LLM) -> None:
    output = smollm2.chat([{"role": "user", "content": "Hi"}], SamplingParams(temperature=0.0, max_tokens=50))[0]
    choice = output.outputs[0]
    assert len(output.prompt_token_ids) == 31
    assert len(choice.token_ids) == 10
    assert choice.token_ids[-1] == 2
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
    assert "<|im_end|>" not in choice.text


@pytest.mark.parametrize("max_tokens", [9, 8])
def test_streamed_pieces_of_many_token_characters_join_to_the_whole_text(smollm2: LLM, max_tokens: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    texts = [output.outputs[0].text for output in smollm2.stream_chat(EMOJI, params)]
    whole = smollm2.chat(EMOJI, params)[0].outputs[0]
    assert whole.token_ids == EMOJI_IDS[:max_tokens]
    assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:], strict=False))
    assert texts[-1] == whole.text
    assert all("\ufffd" not in text for text in texts[:-1])
    if max_tokens == 9:
        assert whole.text == "🌟🌟🌟"


@pytest.mark.parametrize(("stop", "text"), [("FG", "DE"), ("DE", ""), (["zz", "I"], "DEFGH"), ("FGHI", "DE")])
def test_a_stop_string_inside_or_across_tokens_is_cut_from_the_text(
    smollm2: LLM, stop: str | list[str], text: str
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, stop=stop)
    choice = smollm2.generate(ALPHABET, params)[0].outputs[0]
    assert (choice.text, choice.finish_reason) == (text, "stop")
    assert choice.stop_reason in ([stop] if isinstance(stop, str) else stop)
    texts = [output.outputs[0].text for output in smollm2.stream(ALPHABET, params)]
    assert texts[-1] == text
    assert all(text.startswith(piece) for piece in texts)


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6])
def test_a_tiny_temperature_is_greedy(smollm2: LLM, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=8)
    assert smollm2.generate(ALPHABET, params)[0].outputs[0].token_ids == ALPHABET_IDS


def test_top_k_off_in_each_spelling_and_filters_that_leave_one(smollm2: LLM) -> None:
    def run(**options: object) -> list[int]:
        params = SamplingParams(temperature=1.0, seed=7, max_tokens=8, **options)
        return list(smollm2.generate(ALPHABET, params)[0].outputs[0].token_ids)

    assert run(top_k=0) == run(top_k=-1) == run()
    assert run() != ALPHABET_IDS
    assert run(top_k=1) == run(top_p=0.0001) == ALPHABET_IDS


def test_a_small_pool_gives_the_same_answers_and_frees_all_blocks(smollm2: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    prompts = [ALPHABET, FRANCE, "Once upon a time", "Water boils at"]
    expected = [output.outputs[0].token_ids for output in smollm2.generate(prompts, params)]
    with LLM("smollm2", device="cpu", dtype="float32", max_model_len=512, num_gpu_blocks_override=10) as small:
        outputs = small.generate(prompts, params)
        assert small.core.scheduler.num_preemptions > 0
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert small.core.scheduler.pool.num_free == 10


def test_a_prompt_of_whole_blocks_is_answered_as_without_a_prefix_cache(smollm2: LLM) -> None:
    prompt = {"prompt_token_ids": (smollm2.core.tokenizer(ALPHABET)["input_ids"] * 8)[:32]}
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with LLM("smollm2", device="cpu", dtype="float32", max_model_len=512, enable_prefix_caching=False) as plain:
        expected = plain.generate(prompt, params)[0].outputs[0].token_ids
    runs = [smollm2.generate(prompt, params)[0] for _ in range(3)] + smollm2.generate([prompt] * 2, params)
    assert all(run.outputs[0].token_ids == expected for run in runs)
    assert all(16 <= run.num_cached_tokens < 32 for run in runs[1:])
