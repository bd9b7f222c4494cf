"""A request that makes no sense is refused as it comes, with a clear error; those that run do not notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mainspring import LLM, SamplingParams
from mainspring.engine.errors import RequestError, SettingsError

MakeLLM = Callable[..., LLM]
PROMPT = {"prompt_token_ids": [11, 45, 200, 31, 8]}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def ids(*token_ids: Any) -> dict[str, Any]:
    return {"prompt_token_ids": list(token_ids)}


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda llm: llm.generate(ids(*[5.5] * 40), GREEDY), "prompt_token_ids must be made of whole numbers"),
        (lambda llm: llm.generate(ids("a"), GREEDY), "whole numbers"),
        (lambda llm: llm.generate(ids(None), GREEDY), "whole numbers"),
        (lambda llm: llm.generate(ids([5, 6]), GREEDY), "whole numbers"),
        (lambda llm: llm.generate({"prompt_token_ids": None}, GREEDY), "whole numbers"),
        (lambda llm: llm.generate(ids(True), GREEDY), "prompt_token_ids must be made of .*: True is a boolean"),
        (lambda llm: llm.generate(ids(5, np.True_), GREEDY), "whole numbers: .*True.* is a boolean"),
        (lambda llm: llm.generate(ids(torch.tensor(True)), GREEDY), "whole numbers: .*True.* is a boolean"),
        (lambda llm: llm.generate({"prompt_token_ids": torch.tensor([True, False])}, GREEDY), "True is a boolean"),
        (lambda llm: llm.generate({"prompt_token_ids": np.array([[5, 6]])}, GREEDY), "whole numbers"),
        (lambda llm: llm.generate({"prompt_token_ids": b"ab"}, GREEDY), "whole numbers: b'ab' is bytes; give a list"),
        (lambda llm: llm.generate(PROMPT, GREEDY, priority=[True]), "priority must be made of whole numbers: True is"),
        (lambda llm: llm.generate(5, GREEDY), "prompts is 5"),
        (lambda llm: llm.generate(PROMPT, GREEDY, priority=[None]), "priority must be made of whole numbers"),
        (lambda llm: llm.generate([PROMPT] * 2, GREEDY, priority=["a", 1]), "priority"),
        (lambda llm: llm.generate(PROMPT, GREEDY, priority=3), "priority is 3"),
        (lambda llm: llm.generate(PROMPT, {"temperature": 0}), "sampling_params is"),
        (lambda llm: llm.generate([PROMPT], [None]), "sampling_params is"),
        (lambda llm: llm.stream(PROMPT, {"temperature": 0}), "sampling_params is"),
    ],
)
def test_what_is_no_request_is_refused_and_the_running_ones_go_on(
    make_tiny: MakeLLM, ask: Callable[[LLM], object], message: str
) -> None:
    llm = make_tiny()
    expected = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    running = llm.stream(PROMPT, GREEDY)
    next(running)
    with pytest.raises(RequestError, match=message):
        ask(llm)
    assert list(running)[-1].outputs[0].token_ids == expected
    assert not llm.core.has_work()
    assert llm.core.scheduler.pool.num_free == llm.core.memory.num_blocks


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 1 << 40),
        ("min_tokens", 1 << 40),
        ("temperature", 1e300),
        ("temperature", 10**400),
        ("repetition_penalty", 1e300),
    ],
)
def test_a_number_that_the_device_cannot_hold_is_refused_when_given(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is "):
        SamplingParams(max_tokens=None, **{name: value})


@pytest.mark.parametrize("name", ["top_k", "min_tokens"])
def test_the_largest_number_that_is_taken_runs(make_tiny: MakeLLM, name: str) -> None:
    llm = make_tiny(max_model_len=32)
    params = SamplingParams(max_tokens=None, ignore_eos=True, **{name: (1 << 31) - 1})
    assert len(llm.generate(PROMPT, params)[0].outputs[0].token_ids) == 27


def test_token_ids_of_another_library_are_taken(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    expected = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    for kind in (np.array, torch.tensor, tuple):
        given = {"prompt_token_ids": kind(PROMPT["prompt_token_ids"])}
        assert llm.generate(given, GREEDY)[0].outputs[0].token_ids == expected


def test_text_that_is_not_unicode_is_refused(smollm2: LLM) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        smollm2.generate("ab\udcffc", GREEDY)
    with pytest.raises(RequestError, match="character"):
        smollm2.chat([{"role": "user", "content": "\ud800"}], GREEDY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_memory_utilization": "much"}, "gpu_memory_utilization is 'much'"),
        ({"cudagraph_capture_sizes": 5}, "cudagraph_capture_sizes is 5"),
        ({"enforce_eager": "no"}, "enforce_eager is 'no'"),
        ({"enable_prefix_caching": None}, "enable_prefix_caching is None"),
        ({"seed": 1 << 70}, "seed is"),
        ({"max_num_seqs": 1 << 60}, "max_num_seqs is"),
        ({"block_size": 1 << 31}, "block_size is"),
        ({"block_size": (1 << 31) - 1}, "lower block_size"),
        ({"num_gpu_blocks_override": (1 << 31) - 1}, "num_gpu_blocks_override"),
        ({"device": 3}, "device 3"),
    ],
)
def test_settings_of_a_wrong_kind_or_size_are_refused(
    make_tiny: MakeLLM, options: dict[str, object], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        make_tiny(**options)
