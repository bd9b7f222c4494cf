"""Log-probabilities of answers and prompts: log_softmax of the model's own logits, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from sampling_helpers import PROMPT, PROMPT_IDS, greedy, ids, trace

from mainspring import LLM, RequestOutput, SamplingParams
from mainspring.engine.outputs import Logprob

MakeLLM = Callable[..., LLM]
LONG = {"prompt_token_ids": [(7 * i) % 250 for i in range(70)]}


def check_position(told: Mapping[int, Logprob], logits: torch.Tensor, token: int, k: int) -> None:
    """``told`` has the token first, and the ``k`` most likely, with their values and ranks."""
    expected = torch.log_softmax(logits, dim=-1)
    top = expected.topk(k).indices.tolist()
    assert next(iter(told)) == token
    assert set(told) == {token, *top}
    for token_id, logprob in told.items():
        assert logprob.logprob == pytest.approx(float(expected[token_id]), abs=1e-5)
        assert logprob.rank == int((expected > expected[token_id]).sum()) + 1


@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 1.5, "seed": 3, "top_k": 40},
        {"temperature": 0.0, "repetition_penalty": 1.9, "logit_bias": {5: 4.0}},
    ],
    ids=["greedy", "sampled", "adjusted"],
)
def test_logprobs_are_of_the_models_own_logits(make_tiny: MakeLLM, k: int, options: dict[str, Any]) -> None:
    choice, logits = trace(make_tiny(), SamplingParams(logprobs=k, max_tokens=10, ignore_eos=True, **options))
    assert choice.logprobs is not None and len(choice.logprobs) == 10
    for told, row, token in zip(choice.logprobs, logits, choice.token_ids, strict=True):
        check_position(told, row, token, k)
    chosen = [told[token].logprob for told, token in zip(choice.logprobs, choice.token_ids, strict=True)]
    assert choice.cumulative_logprob == pytest.approx(sum(chosen))


def test_each_request_of_a_batch_gets_what_it_asked_for(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    params = [greedy(logprobs=k) if k is not None else greedy() for k in (None, 0, 3, 20)]
    choices = [output.outputs[0] for output in llm.generate([PROMPT] * 4, params)]
    assert (choices[0].logprobs, choices[0].cumulative_logprob) == (None, None)
    assert [len(choice.logprobs[0]) for choice in choices[1:] if choice.logprobs] == [1, 3, 20]
    assert len({choice.cumulative_logprob for choice in choices[1:]}) == 1


def test_logprobs_of_the_whole_vocabulary(make_tiny: MakeLLM) -> None:
    choice = make_tiny(max_logprobs=-1).generate(PROMPT, greedy(logprobs=-1, max_tokens=2))[0].outputs[0]
    assert choice.logprobs is not None
    assert len(choice.logprobs[0]) == 256
    assert sum(torch.tensor([each.logprob for each in choice.logprobs[0].values()]).exp()) == pytest.approx(1.0)


def test_logprobs_stay_through_a_preemption(make_tiny: MakeLLM) -> None:
    prompts = [{"prompt_token_ids": [50 + i, 60, 70 + i]} for i in range(4)]
    params = greedy(max_tokens=40, logprobs=2)
    expected = [output.outputs[0] for output in make_tiny().generate(prompts, params)]
    small = make_tiny(num_gpu_blocks_override=6)
    outputs = [output.outputs[0] for output in small.generate(prompts, params)]
    assert small.core.scheduler.num_preemptions > 0
    for ours, theirs in zip(outputs, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs is not None and theirs.logprobs is not None and len(ours.logprobs) == 40
        assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-4)


def prompt_ranks(output: RequestOutput) -> list[dict[int, int | None] | None]:
    assert output.prompt_logprobs is not None
    return [
        None if told is None else {token: each.rank for token, each in told.items()} for told in output.prompt_logprobs
    ]


def prompt_values(output: RequestOutput) -> list[float]:
    assert output.prompt_logprobs is not None
    return [each.logprob for told in output.prompt_logprobs for each in (told or {}).values()]


def assert_same_prompt_logprobs(output: RequestOutput, expected: RequestOutput) -> None:
    """Chunks and cached prefixes are products of other shapes, so that the last bits may differ."""
    assert prompt_ranks(output) == prompt_ranks(expected)
    assert prompt_values(output) == pytest.approx(prompt_values(expected), abs=1e-5)


def test_prompt_logprobs_are_the_next_tokens_of_each_prefix(make_tiny: MakeLLM) -> None:
    llm = make_tiny(enable_prefix_caching=False)
    output = llm.generate(PROMPT, greedy(prompt_logprobs=3, max_tokens=1))[0]
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(PROMPT_IDS)
    for position in range(1, len(PROMPT_IDS)):
        _, logits = trace(llm, greedy(max_tokens=1), PROMPT_IDS[:position])
        told = output.prompt_logprobs[position]
        assert told is not None
        check_position(told, logits[0], PROMPT_IDS[position], 3)


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 13}, {"max_num_seqs": 3}, {"enforce_eager": True}])
def test_prompt_logprobs_in_chunks_are_those_of_one_chunk(make_tiny: MakeLLM, options: dict[str, Any]) -> None:
    params = greedy(prompt_logprobs=2, max_tokens=3)
    whole = make_tiny().generate([LONG, PROMPT], params)
    pieces = make_tiny(**options).generate([LONG, PROMPT], params)
    for output, expected in zip(pieces, whole, strict=True):
        assert_same_prompt_logprobs(output, expected)
    assert [ids(output) for output in whole] == [ids(output) for output in pieces]


def test_a_cached_prompt_still_tells_its_logprobs(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    cold = llm.generate(LONG, greedy(prompt_logprobs=1))[0]
    warm = llm.generate(LONG, greedy(prompt_logprobs=1))[0]
    assert llm.generate(LONG, greedy())[0].num_cached_tokens == 64
    assert_same_prompt_logprobs(warm, cold)
    assert warm.num_cached_tokens == 0
    assert None not in warm.prompt_logprobs[1:]  # type: ignore[index]


def test_prompt_logprobs_with_several_answers_and_with_a_prompt_of_one_token(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    params = SamplingParams(n=3, temperature=1.0, seed=1, prompt_logprobs=1, max_tokens=4, ignore_eos=True)
    output = llm.generate(LONG, params)[0]
    assert_same_prompt_logprobs(output, llm.generate(LONG, greedy(prompt_logprobs=1))[0])
    assert llm.generate({"prompt_token_ids": [5]}, greedy(prompt_logprobs=1))[0].prompt_logprobs == [None]
    assert llm.generate(PROMPT, greedy())[0].prompt_logprobs is None


def test_prompt_logprobs_survive_preemptions(make_tiny: MakeLLM) -> None:
    prompts = [{"prompt_token_ids": [50 + i, *range(20), 70 + i]} for i in range(4)]
    params = greedy(prompt_logprobs=1, max_tokens=40)
    expected = make_tiny().generate(prompts, params)
    small = make_tiny(num_gpu_blocks_override=7, max_num_batched_tokens=16)
    outputs = small.generate(prompts, params)
    assert small.core.scheduler.num_preemptions > 0
    for output, cold in zip(outputs, expected, strict=True):
        assert_same_prompt_logprobs(output, cold)
    assert [ids(output) for output in outputs] == [ids(output) for output in expected]
