"""A request's tokens depend on the request alone: not on company, seat, preemption, prefix hits or launch mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mainspring import LLM, RequestOutput, SamplingParams
from mainspring.engine.model_runner import LaunchedStep
from mainspring.engine.plan import DecodePlan, PrefillPlan

MakeLLM = Callable[..., LLM]

PROMPT = {"prompt_token_ids": [11, 45, 200, 31, 8]}
OTHERS = [{"prompt_token_ids": [50 + i, 60, 70 + i]} for i in range(6)]
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=7, max_tokens=40, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def ids(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("params", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_alone_in_a_batch_of_seven_and_in_another_seat(
    make_tiny: MakeLLM, params: SamplingParams, prefix_caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_tiny(enable_prefix_caching=prefix_caching)
    seats = set()
    launch = llm.core.runner.launch

    def look(plan: PrefillPlan | DecodePlan) -> LaunchedStep:
        requests = plan.requests if isinstance(plan, DecodePlan) else ()
        seats.update(request.seat for request in requests if request.params is params)
        return launch(plan)

    monkeypatch.setattr(llm.core.runner, "launch", look)
    alone = ids(llm.generate(PROMPT, params)[0])
    assert len(set(alone)) > 5
    company = SamplingParams(temperature=1.1, seed=3, max_tokens=50, ignore_eos=True)
    for before in (0, 6, 3, 5):
        prompts = [*OTHERS[:before], PROMPT, *OTHERS[before:]]
        outputs = llm.generate(prompts, [*[company] * before, params, *[company] * (6 - before)])
        assert ids(outputs[before]) == alone
    assert len(seats) > 1, "every run had the same seat"


@pytest.mark.parametrize("params", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_after_a_preemption(make_tiny: MakeLLM, params: SamplingParams, prefix_caching: bool) -> None:
    large = make_tiny(enable_prefix_caching=prefix_caching)
    prompts = [PROMPT, *OTHERS[:3]]
    expected = [ids(output) for output in large.generate(prompts, params)]
    small = make_tiny(num_gpu_blocks_override=6, enable_prefix_caching=prefix_caching)
    outputs = small.generate(prompts, params)
    assert small.core.scheduler.num_preemptions > 0
    assert [ids(output) for output in outputs] == expected
    assert small.core.scheduler.pool.num_free == 6


def test_eager_and_recorded(make_tiny: MakeLLM) -> None:
    prompts = [PROMPT, *OTHERS]
    recorded = make_tiny()
    eager = make_tiny(enforce_eager=True)
    for params in (SAMPLED, GREEDY):
        expected = [ids(output) for output in recorded.generate(prompts, params)]
        assert [ids(output) for output in eager.generate(prompts, params)] == expected
    assert recorded.stats().eager_steps == {}
    assert eager.stats().eager_steps["enforce_eager"] == eager.stats().decode_steps
    assert eager.stats().rungs == {}


def test_each_row_uses_its_own_seed(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=20, ignore_eos=True) for seed in (1, 2, 3, 1)]
    outputs = [ids(output) for output in llm.generate([PROMPT] * 4, params)]
    assert outputs[0] == outputs[3]
    assert len({tuple(output) for output in outputs}) == 3


def test_a_replayed_step_draws_anew_at_each_position(make_tiny: MakeLLM) -> None:
    """A seed frozen into the recording would draw the same number for every token."""
    llm = make_tiny()
    params = SamplingParams(temperature=100.0, seed=5, max_tokens=60, ignore_eos=True)
    tokens = ids(llm.generate(PROMPT, params)[0])
    assert len(set(tokens)) > 40


def test_requests_without_a_seed_differ_and_the_engine_seed_repeats_them(
    make_tiny: MakeLLM, tiny_weights: Path
) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    greedy, runs = [], []
    for seed in (1, 1, 2):
        llm = make_tiny(seed=seed, model=str(tiny_weights), load_format="auto")
        greedy.append(ids(llm.generate(PROMPT, GREEDY)[0]))
        runs.append([ids(output) for output in llm.generate([PROMPT] * 3, params)])
    assert greedy[0] == greedy[1] == greedy[2]  # the same weights
    assert len({tuple(tokens) for tokens in runs[0]}) == 3
    assert runs[0] == runs[1] != runs[2]


def test_a_seed_given_after_the_recording_counts(make_tiny: MakeLLM) -> None:
    """Neither an earlier request's seed in the same seat nor torch's own generator enters."""
    llm = make_tiny()
    drawn = []
    for seed in (1, 2, 1):
        torch.manual_seed(len(drawn))
        drawn.append(ids(llm.generate(PROMPT, SamplingParams(temperature=1.0, seed=seed, max_tokens=20))[0]))
    assert drawn[0] == drawn[2] != drawn[1]


def test_choices_of_one_request_differ_and_repeat(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=20, ignore_eos=True)
    first, second = (llm.generate(PROMPT, params)[0].outputs for _ in range(2))
    assert [choice.index for choice in first] == [0, 1, 2]
    assert len({tuple(choice.token_ids) for choice in first}) == 3
    assert [choice.token_ids for choice in first] == [choice.token_ids for choice in second]


def test_long_prompts_in_chunks_give_what_one_chunk_gives(make_tiny: MakeLLM) -> None:
    prompts = [{"prompt_token_ids": [(7 * i + j) % 250 for j in range(150 + i)]} for i in range(3)]
    whole = make_tiny(max_num_batched_tokens=512).generate(prompts, GREEDY)
    chunked = make_tiny(max_num_batched_tokens=13).generate(prompts, GREEDY)
    assert [ids(output) for output in whole] == [ids(output) for output in chunked]


@pytest.mark.parametrize("params", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
def test_a_prefix_hit_alone_and_in_company_gives_the_tokens_of_a_cold_start(
    make_tiny: MakeLLM, params: SamplingParams
) -> None:
    shared = [(5 * i) % 250 for i in range(48)]
    prompts = [{"prompt_token_ids": [*shared, 7 + i]} for i in range(4)]
    cold = [ids(make_tiny(enable_prefix_caching=False).generate(prompt, params)[0]) for prompt in prompts]
    llm = make_tiny()
    assert ids(llm.generate(prompts[0], params)[0]) == cold[0]
    alone = llm.generate(prompts[1], params)[0]
    together = llm.generate(prompts, params)
    assert alone.num_cached_tokens == 48
    assert [output.num_cached_tokens for output in together] == [48] * 4
    assert ids(alone) == cold[1]
    assert [ids(output) for output in together] == cold
    stats = llm.stats()
    assert stats.prefix_hit_tokens == 5 * 48
    assert stats.prefix_queried_tokens == 6 * 49


def test_three_choices_are_what_three_requests_get(make_tiny: MakeLLM) -> None:
    """Draws that leave one token are the same for each choice; the prompt's blocks are shared, not computed thrice."""
    llm = make_tiny()
    prompt = {"prompt_token_ids": [(3 * i) % 250 for i in range(40)]}
    three = SamplingParams(temperature=1.0, top_k=1, n=3, max_tokens=20, ignore_eos=True)
    one = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    expected = [ids(output) for output in make_tiny().generate([prompt] * 3, one)]
    choices = llm.generate(prompt, three)[0].outputs
    assert [list(choice.token_ids) for choice in choices] == expected
    assert llm.stats().prefix_hit_tokens == 2 * 32
    assert llm.core.scheduler.pool.num_free == llm.core.memory.num_blocks


def test_a_drawn_choice_is_the_same_whoever_its_siblings_are(make_tiny: MakeLLM) -> None:
    """The first is what the request gets that asks for one; blocks shared, filled cold or hit change nothing."""
    prompt = {"prompt_token_ids": [(3 * i) % 250 for i in range(40)]}
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=20, ignore_eos=True)
    asked = {n: dataclasses.replace(params, n=n) for n in (1, 2, 3)}
    cold = {n: make_tiny(enable_prefix_caching=False).generate(prompt, asked[n])[0].outputs for n in (1, 2, 3)}
    tokens = [list(choice.token_ids) for choice in cold[3]]
    assert len({tuple(choice) for choice in tokens}) == 3
    for n in (1, 2):
        assert [list(choice.token_ids) for choice in cold[n]] == tokens[:n]
    llm = make_tiny()
    beside = llm.generate([prompt, PROMPT, prompt, prompt], [asked[3], SAMPLED, asked[1], asked[2]])
    assert [[list(choice.token_ids) for choice in output.outputs] for output in (beside[0], beside[2], beside[3])] == [
        tokens,
        tokens[:1],
        tokens[:2],
    ]
