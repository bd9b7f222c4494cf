"""Small inputs with known right answers on the embedded model, in fp32 on the CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from mainspring import LLM, SamplingParams
from mainspring.models.loader import load_config
from mainspring.models.source import resolve
from mainspring.models.tokenizer import load_tokenizer
from mainspring.models.weights.gguf import read_gguf

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


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The embedded model's weights as a Hugging Face folder, in fp32; a config.json is the test's to write."""
    source = resolve("smollm2")
    folder = tmp_path_factory.mktemp("smollm2-folder")
    save_file(dict(read_gguf(source.gguf, load_config(source))), folder / "model.safetensors")
    yield folder
    shutil.rmtree(folder)


def folder_answers(folder: Path, config: dict[str, object], prompts: dict[str, list[int]]) -> list[list[int]]:
    """Greedy ids from the folder, for prompts given with the ids that are right."""
    (folder / "config.json").write_text(json.dumps(config))
    ids = [load_tokenizer(resolve("smollm2"))(prompt)["input_ids"] for prompt in prompts]
    with LLM(str(folder), device="cpu", dtype="float32", max_model_len=128, skip_tokenizer_init=True) as llm:
        return [
            llm.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0.0, max_tokens=len(right)))[0]
            .outputs[0]
            .token_ids
            for prompt, right in zip(ids, prompts.values(), strict=True)
        ]


SMOLLM2_CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.slow
def test_both_spellings_of_the_rotation_give_the_known_ids(smollm2: LLM, checkpoint: Path) -> None:
    """24 tokens: with the default rotation the first 17 are the same, so that fewer would tell nothing."""
    params = SamplingParams(temperature=0.0, max_tokens=24)
    right = smollm2.generate(FRANCE, params)[0].outputs[0].token_ids
    assert right[: len(FRANCE_IDS)] == FRANCE_IDS
    theta = 100000.0
    for rope in ({"rope_theta": theta}, {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}):
        assert folder_answers(checkpoint, {**SMOLLM2_CONFIG, **rope}, {FRANCE: right}) == [right]
    [default] = folder_answers(checkpoint, SMOLLM2_CONFIG, {FRANCE: right})
    assert default[:17] == right[:17]
    assert default[17] != right[17]


@pytest.mark.slow
def test_a_redundant_head_beside_tied_embeddings_changes_nothing(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    with safe_open(weights, "pt") as file:
        names = list(file.keys())
        head = file.get_tensor("model.embed_tokens.weight")
    assert "lm_head.weight" not in names
    save_file({"lm_head.weight": head}, checkpoint / "head.safetensors")
    index = {"weight_map": dict.fromkeys(names, weights.name) | {"lm_head.weight": "head.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {**SMOLLM2_CONFIG, "rope_theta": 100000.0}
    assert folder_answers(checkpoint, config, {ALPHABET: ALPHABET_IDS}) == [ALPHABET_IDS]
