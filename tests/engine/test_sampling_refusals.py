"""What cannot be served is refused, with value, limit and way out; and what a request without parameters gets."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling_helpers import PROMPT, greedy, ids

from mainspring import LLM, SamplingParams
from mainspring.engine.errors import RequestError, SettingsError
from mainspring.engine.samplers import FULL

MakeLLM = Callable[..., LLM]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"logprobs": 21}, "logprobs 21 asks for 21 tokens > max_logprobs 20; ask for fewer, or make the engine with"),
        ({"logprobs": -1}, "logprobs -1 asks for 256 tokens > max_logprobs 20"),
        ({"prompt_logprobs": 30}, "prompt_logprobs 30 asks for 30 tokens > max_logprobs 20"),
        ({"logit_bias": {256: 1.0}}, r"token id in logit_bias 256 is outside the vocabulary of 256 \(0 to 255\)"),
        ({"logit_bias": {i: 1.0 for i in range(301)}}, "outside the vocabulary"),
        ({"allowed_token_ids": [3, 999]}, "token id in allowed_token_ids 999 is outside the vocabulary"),
        ({"bad_words": ["x"]}, "bad_words needs a tokenizer"),
        ({"stop": "x"}, "stop needs a tokenizer"),
        (
            {"allowed_token_ids": [2], "min_tokens": 3, "ignore_eos": False},
            "all 1 allowed_token_ids are ruled out by bad_words, or by min_tokens 3",
        ),
    ],
)
def test_what_the_engine_cannot_serve_is_refused(make_tiny: MakeLLM, options: dict[str, Any], said: str) -> None:
    llm = make_tiny()
    with pytest.raises(RequestError, match=said):
        llm.generate(PROMPT, greedy(**options))
    assert not llm.core.has_work()
    assert llm.core.runner.logits_state.active == 0


@pytest.mark.parametrize("value", [-2, True, 1.5])
def test_max_logprobs_is_a_count(tiny_folder: Path, value: Any) -> None:
    with pytest.raises(SettingsError, match="max_logprobs is"):
        LLM(str(tiny_folder), max_logprobs=value)


def test_a_bias_wider_than_its_buffer_is_refused(smollm2: LLM) -> None:
    with pytest.raises(RequestError, match="logit_bias has 301 entries > 300, the width of the step's bias buffer"):
        smollm2.generate("Hello", greedy(logit_bias={token: 1.0 for token in range(301)}))


def test_bad_words_wider_or_longer_than_their_buffer_are_refused(smollm2: LLM) -> None:
    with pytest.raises(RequestError, match=r"bad_words come to \d+ token sequences > 64"):
        smollm2.generate("Hello", greedy(bad_words=[f"word{number}" for number in range(40)]))
    with pytest.raises(RequestError, match=r"bad word 'one two .* tokens long > 8"):
        smollm2.generate("Hello", greedy(bad_words=["one two three four five six seven eight nine"]))
    with pytest.raises(RequestError, match="ruled out by bad_words"):
        smollm2.generate("Hello", greedy(bad_words=["a"], allowed_token_ids=[81]))


def test_no_memory_for_a_kind_refuses_the_request_and_the_engine_goes_on(
    make_tiny: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_tiny()
    expected = ids(llm.generate(PROMPT, greedy())[0])
    buffers = llm.core.runner.buffers
    allocate = buffers.allocate

    def refuse(name: str, *arguments: Any) -> torch.Tensor:
        if name.endswith("bias_values"):
            raise torch.OutOfMemoryError("none left")
        return allocate(name, *arguments)

    monkeypatch.setattr(buffers, "allocate", refuse)
    before = set(buffers)
    with pytest.raises(RequestError, match=r"no memory for .*LOGIT_BIAS.*: 21600 bytes for 8 seats; lower max"):
        llm.generate(PROMPT, greedy(logit_bias={3: 1.0}))
    assert set(buffers) == before
    monkeypatch.undo()
    assert ids(llm.generate(PROMPT, greedy())[0]) == expected
    assert set(ids(llm.generate(PROMPT, greedy(logit_bias={3: 100.0}))[0])) == {3}


@pytest.fixture
def make_with_defaults(tiny_folder: Path, tmp_path: Path, make_tiny: MakeLLM) -> Callable[..., LLM]:
    def make(stated: dict[str, Any], **options: Any) -> LLM:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        shutil.copy(tiny_folder / "config.json", folder)
        (folder / "generation_config.json").write_text(json.dumps(stated))
        return LLM(
            str(folder), load_format="dummy", skip_tokenizer_init=True, device="cpu", kv_cache_memory=8 << 20, **options
        )

    return make


STATED = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "repetition_penalty": 1.05,
    "max_new_tokens": 33,
    "eos_token_id": [2, 7],
    "do_sample": True,
    "pad_token_id": None,
}


def test_a_request_without_parameters_gets_the_models_defaults(make_with_defaults: Callable[..., LLM]) -> None:
    with make_with_defaults(STATED) as llm:
        params = llm.get_default_sampling_params()
        assert params == llm.default_params()
        assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0.6, 20, 0.95, 1.05)
        assert params.max_tokens == 33
        assert llm.core.config.eos_token_ids == (2, 7)
        output = llm.generate(PROMPT)[0].outputs[0]
        assert len(output.token_ids) == 33 or output.token_ids[-1] in (2, 7)
        assert llm.core.runner.runners[FULL].counters.replays.total() > 0
        assert len(ids(llm.generate(PROMPT, greedy(max_tokens=3))[0])) == 3, "given parameters stand for themselves"


def test_the_models_defaults_can_be_turned_off_but_not_its_end_ids(make_with_defaults: Callable[..., LLM]) -> None:
    with make_with_defaults(STATED, generation_config="vllm") as llm:
        assert llm.default_params() == SamplingParams()
        forced = llm.generate(PROMPT, SamplingParams(temperature=0.0, logit_bias={7: 100}, min_tokens=3))[0].outputs[0]
        assert len(forced.token_ids) == 4 and forced.token_ids[-1] == 7
        assert (forced.finish_reason, forced.stop_reason) == ("stop", None)


def test_a_default_that_cannot_be_is_an_error_with_its_file(make_with_defaults: Callable[..., LLM]) -> None:
    with pytest.raises(SettingsError, match=r"generation_config.json of .*top_p is 7; .*generation_config='vllm'"):
        make_with_defaults({"top_p": 7})
    make_with_defaults({"top_p": 7}, generation_config="vllm").close()
