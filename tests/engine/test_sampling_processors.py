"""Python logits processors: called step by step, outside the recording, while other rows go on as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sampling_helpers import PROMPT, PROMPT_IDS, greedy, ids, trace

from mainspring import LLM, SamplingParams
from mainspring.engine.errors import RequestError

MakeLLM = Callable[..., LLM]
OTHERS = [{"prompt_token_ids": [50 + i, 60, 70 + i]} for i in range(3)]


def shift(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Depends on how many tokens there are: a step late or early would show."""
    return logits.roll(1 + len(token_ids))


def test_each_token_is_chosen_from_what_the_processors_return(make_tiny: MakeLLM) -> None:
    seen: list[list[int]] = []

    def note(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(list(token_ids))
        assert logits.shape == (256,) and logits.dtype == torch.float32
        logits[7] = 100.0
        return logits

    llm = make_tiny()
    output, logits = trace(llm, greedy(logits_processors=[note, shift], max_tokens=6))
    tokens = list(output.token_ids)
    assert seen == [tokens[:index] for index in range(6)]
    for index, (row, token) in enumerate(zip(logits, tokens, strict=True)):
        row[7] = 100.0
        assert token == int(shift(tokens[:index], row).argmax())
    assert llm.stats().eager_steps == {"logits_processors": 6}
    assert llm.stats().rungs == {1: 5}, "the model itself ran from its recording"


def test_a_processor_of_three_arguments_gets_the_prompt(make_tiny: MakeLLM) -> None:
    def repeat(prompt_ids: list[int], token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        wanted = prompt_ids[len(token_ids) % len(prompt_ids)]
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor([wanted]), 0.0)

    params = SamplingParams(temperature=1.0, max_tokens=len(PROMPT_IDS), ignore_eos=True, logits_processors=[repeat])
    assert ids(make_tiny().generate(PROMPT, params)[0]) == PROMPT_IDS


def test_min_tokens_penalties_and_logprobs_hold_beside_processors(make_tiny: MakeLLM) -> None:
    def want_the_end(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[2] += 1000.0
        return logits

    llm = make_tiny()
    params = SamplingParams(
        temperature=0.0,
        max_tokens=12,
        min_tokens=4,
        logits_processors=[want_the_end],
        frequency_penalty=2.0,
        logprobs=1,
    )
    choice, logits = trace(llm, params)
    assert len(choice.token_ids) == 5 and choice.token_ids[-1] == 2 and 2 not in choice.token_ids[:4]
    assert choice.logprobs is not None and len(choice.logprobs) == 5
    for told, row, token in zip(choice.logprobs, logits, choice.token_ids, strict=True):
        assert told[token].logprob == pytest.approx(float(torch.log_softmax(row, -1)[token]), abs=1e-5)


@pytest.mark.parametrize("options", [{}, {"cudagraph_capture_sizes": [1, 2]}], ids=["whole", "split"])
def test_other_rows_keep_their_tokens_and_their_recording(make_tiny: MakeLLM, options: dict[str, list[int]]) -> None:
    llm = make_tiny()
    params = [
        greedy(),
        greedy(logits_processors=[shift]),
        SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True),
        greedy(logits_processors=[shift], max_tokens=9),
    ]
    prompts = [PROMPT, *OTHERS]
    expected = [ids(llm.generate(prompt, each)[0]) for prompt, each in zip(prompts, params, strict=True)]
    together = make_tiny(**options)
    outputs = together.generate(prompts, params)
    assert [ids(output) for output in outputs] == expected
    assert set(together.stats().eager_steps) == {"logits_processors"}


def test_processors_through_preemptions(make_tiny: MakeLLM) -> None:
    prompts = [PROMPT, *OTHERS]
    params = greedy(logits_processors=[shift], max_tokens=40)
    expected = [ids(output) for output in make_tiny().generate(prompts, params)]
    small = make_tiny(num_gpu_blocks_override=6)
    assert [ids(output) for output in small.generate(prompts, params)] == expected
    assert small.core.scheduler.num_preemptions > 0


def test_steps_are_read_back_before_a_processor_runs(make_tiny: MakeLLM) -> None:
    """As on a GPU, where steps are launched ahead: with a processor about, none is."""
    llm = make_tiny()
    expected = [ids(llm.generate(prompt, greedy())[0]) for prompt in OTHERS[:2]]
    held = ids(llm.generate(PROMPT, greedy(logits_processors=[shift]))[0])
    llm.core.pipeline.depth = 1
    first = [llm.core.add(f"plain{i}", prompt["prompt_token_ids"], greedy()) for i, prompt in enumerate(OTHERS[:2])]
    for _ in range(4):
        llm.core.step()
    assert len(llm.core.pipeline.in_flight) == 1
    late = llm.core.add("held", PROMPT_IDS, greedy(logits_processors=[shift]))
    while not late.finished:
        llm.core.step()
        assert not llm.core.pipeline.in_flight
    while llm.core.has_work():
        llm.core.step()
    assert [list(answer.output().outputs[0].token_ids) for answer in first] == expected
    assert list(late.output().outputs[0].token_ids) == held


def raises(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    if len(token_ids) == 3:
        raise KeyError("no such thing")
    return logits


def not_a_number(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    if len(token_ids) == 2:
        logits[77] = torch.nan
    return logits


def none_at_all(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return torch.full_like(logits, -torch.inf) if len(token_ids) == 4 else logits


def only(token: int) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
    def force(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor([token]), 0.0)

    return force


def seven_then_nine(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return only(7 if len(token_ids) < 2 else 9)(token_ids, logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_infinity_forces_a_token(make_tiny: MakeLLM, temperature: float) -> None:
    def force(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[40 + len(token_ids)] = torch.inf
        return logits

    params = SamplingParams(temperature=temperature, max_tokens=4, ignore_eos=True, logits_processors=[force])
    assert ids(make_tiny().generate(PROMPT, params)[0]) == [40, 41, 42, 43]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("options", "step"),
    [
        ({"allowed_token_ids": [8, 9]}, 1),
        ({"stop_token_ids": [7], "min_tokens": 3}, 1),
        ({"allowed_token_ids": [7, 8], "logits_processors": [seven_then_nine]}, 3),
    ],
    ids=["allowed", "min_tokens", "later"],
)
def test_masks_that_leave_nothing_of_what_a_processor_allows_end_its_request_alone(
    make_tiny: MakeLLM, options: dict[str, Any], step: int, temperature: float
) -> None:
    llm = make_tiny()
    expected = ids(llm.generate(OTHERS[0], greedy())[0])
    beside = greedy(logits_processors=[only(9)], max_tokens=24)
    params = SamplingParams(
        **{"temperature": temperature, "max_tokens": 5, "logits_processors": [only(7)], "seed": 1, **options}
    )
    others = [llm.stream(OTHERS[0], greedy()), llm.stream(OTHERS[1], beside)]
    for other in others:
        next(other)
    name = params.logits_processors[0].__name__
    with pytest.raises(RequestError, match=rf"no token is left at step {step} of request .*\({name}\) allow"):
        llm.generate(PROMPT, params)
    assert [ids(list(other)[-1]) for other in others] == [expected, [9] * 24]
    assert llm.core.scheduler.pool.num_free == llm.core.scheduler.pool.num_usable_blocks


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("processors", "said"),
    [
        ([not_a_number], "logits processor not_a_number of request .* returned NaN among the logits at step 3,"),
        ([shift, none_at_all], "logits processor none_at_all of .* returned no logit above minus infinity at step 5,"),
    ],
)
def test_logits_from_which_nothing_can_be_chosen_end_their_own_request_alone(
    make_tiny: MakeLLM, processors: list[Callable[..., torch.Tensor]], said: str, temperature: float
) -> None:
    llm = make_tiny()
    expected = [ids(llm.generate(OTHERS[0], greedy())[0])]
    expected.append(ids(llm.generate(OTHERS[1], greedy(logits_processors=[shift]))[0]))
    others = [llm.stream(OTHERS[0], greedy()), llm.stream(OTHERS[1], greedy(logits_processors=[shift]))]
    for other in others:
        next(other)
    params = SamplingParams(
        temperature=temperature, seed=5, max_tokens=9, logits_processors=processors, ignore_eos=True
    )
    seen = []
    with pytest.raises(RequestError, match=said):
        for output in llm.stream(PROMPT, params):
            seen.append(ids(output))
    assert len(seen[-1]) == (2 if processors[0] is not_a_number else 4)
    assert [ids(list(other)[-1]) for other in others] == expected
    assert llm.core.scheduler.pool.num_free == llm.core.scheduler.pool.num_usable_blocks


@pytest.mark.parametrize(
    ("processor", "said"),
    [
        (raises, "logits processor raises of request .* raised KeyError: 'no such thing'"),
        (lambda token_ids, logits: None, "returned NoneType; it must return the logits"),
        (lambda token_ids, logits: logits[:5], r"returned \[5\]; it must return the logits, a tensor of shape \[256\]"),
    ],
)
def test_a_processor_that_fails_ends_its_own_request_alone(
    make_tiny: MakeLLM, processor: Callable[..., torch.Tensor], said: str
) -> None:
    llm = make_tiny()
    expected = ids(llm.generate(OTHERS[0], greedy())[0])
    other = llm.stream(OTHERS[0], greedy())
    next(other)
    with pytest.raises(RequestError, match=said):
        llm.generate(PROMPT, greedy(logits_processors=[processor]))
    assert ids(list(other)[-1]) == expected
    with pytest.raises(RequestError, match=said):
        list(llm.stream(PROMPT, greedy(logits_processors=[processor])))
    assert llm.core.scheduler.pool.num_free == llm.core.scheduler.pool.num_usable_blocks
    assert ids(llm.generate(OTHERS[0], greedy())[0]) == expected
