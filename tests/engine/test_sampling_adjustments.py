"""Penalties, biases and masks: each token is the arg-max of the formula on the model's own logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from sampling_helpers import PROMPT, PROMPT_IDS, greedy, ids, trace
from transformers import RepetitionPenaltyLogitsProcessor

from mainspring import LLM, SamplingParams

MakeLLM = Callable[..., LLM]
Formula = Callable[[torch.Tensor, list[int]], torch.Tensor]


def check(llm: LLM, params: SamplingParams, formula: Formula) -> list[int]:
    """Every token is the arg-max of ``formula(logits, answer so far)``; and at least one is not the plain arg-max."""
    output, logits = trace(llm, params)
    tokens = list(output.token_ids)
    assert len(tokens) == len(logits) > 1
    for index, (token, row) in enumerate(zip(tokens, logits, strict=True)):
        assert token == int(formula(row.clone(), tokens[:index]).argmax()), f"token {index} of {tokens}"
    assert tokens != [int(row.argmax()) for row in logits], "what was asked for changed nothing"
    return tokens


def counts(tokens: Sequence[int], vocab: int = 256) -> torch.Tensor:
    return torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=vocab)


@pytest.mark.parametrize("penalty", [1.8, 0.5])
def test_the_repetition_penalty_is_that_of_transformers(make_tiny: MakeLLM, penalty: float) -> None:
    reference = RepetitionPenaltyLogitsProcessor(penalty)

    def formula(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        return reference(torch.tensor([PROMPT_IDS + tokens]), logits.unsqueeze(0))[0]

    check(make_tiny(), greedy(repetition_penalty=penalty), formula)


def test_presence_and_frequency_count_the_answer_and_not_the_prompt(make_tiny: MakeLLM) -> None:
    def formula(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        seen = counts(tokens)
        return logits - 0.3 * (seen > 0) - 0.2 * seen

    llm = make_tiny()
    check(llm, greedy(presence_penalty=0.3, frequency_penalty=0.2), formula)
    outputs = llm.generate([PROMPT] * 2, [greedy(max_tokens=1), greedy(max_tokens=1, presence_penalty=2.0)])
    assert ids(outputs[0]) == ids(outputs[1]), "before the first token of the answer nothing is penalized"


def test_a_negative_frequency_penalty_repeats(make_tiny: MakeLLM) -> None:
    tokens = check(make_tiny(), greedy(frequency_penalty=-2.0), lambda row, tokens: row + 2.0 * counts(tokens))
    assert len(set(tokens[3:])) == 1


def test_all_penalties_together_come_after_the_bias(make_tiny: MakeLLM) -> None:
    reference = RepetitionPenaltyLogitsProcessor(1.5)

    def formula(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        logits[[7, 9]] += torch.tensor([3.0, 2.5])
        logits = reference(torch.tensor([PROMPT_IDS + tokens]), logits.unsqueeze(0))[0]
        seen = counts(tokens)
        return logits - 0.2 * seen - 0.1 * (seen > 0)

    params = greedy(repetition_penalty=1.5, presence_penalty=0.1, frequency_penalty=0.2, logit_bias={7: 3, 9: 2.5})
    check(make_tiny(), params, formula)


def test_logit_bias_is_added(make_tiny: MakeLLM) -> None:
    bias = {17: 100.0, 3: 50.0, 255: -100.0}

    def formula(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        logits[list(bias)] += torch.tensor(list(bias.values()))
        return logits

    llm = make_tiny()
    assert set(check(llm, greedy(logit_bias=bias), formula)) == {17}
    first = ids(llm.generate(PROMPT, greedy())[0])
    assert first[0] not in ids(llm.generate(PROMPT, greedy(logit_bias={first[0]: -100}))[0])


def test_only_allowed_ids_are_chosen(make_tiny: MakeLLM) -> None:
    allowed = [3, 31, 32, 64, 200, 255]

    def formula(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        barred = torch.ones(256, dtype=torch.bool)
        barred[allowed] = False
        return logits.masked_fill(barred, -torch.inf)

    llm = make_tiny()
    check(llm, greedy(allowed_token_ids=allowed), formula)
    drawn = SamplingParams(temperature=50.0, seed=1, max_tokens=60, allowed_token_ids=allowed, ignore_eos=True)
    assert set(ids(llm.generate(PROMPT, drawn)[0])) == set(allowed)


def test_no_stop_id_before_min_tokens_whatever_the_bias(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    params = SamplingParams(temperature=0.0, logit_bias={2: 100, 9: 90}, stop_token_ids=[9], min_tokens=5, max_tokens=9)
    choice = llm.generate(PROMPT, params)[0].outputs[0]
    assert len(choice.token_ids) == 6 and choice.token_ids[-1] == 2
    assert not {2, 9} & set(choice.token_ids[:5])
    assert choice.finish_reason == "stop"


def test_a_seat_keeps_nothing_of_an_earlier_request(make_tiny: MakeLLM) -> None:
    """Every kind of state is written over, or not looked at, when the seat has a new owner."""
    llm = make_tiny(max_num_seqs=1, enable_prefix_caching=False)
    expected = ids(llm.generate(PROMPT, greedy())[0])
    penalized = greedy(repetition_penalty=1.7, frequency_penalty=0.4)
    first = ids(llm.generate(PROMPT, penalized)[0])
    llm.generate({"prompt_token_ids": [99, 98]}, greedy(logit_bias={5: 100}, allowed_token_ids=[5, 6], logprobs=2))
    assert ids(llm.generate(PROMPT, penalized)[0]) == first
    # The full variant, with nothing asked for but that no stop id ends the answer yet.
    unused = next(token for token in range(256) if token not in expected)
    assert ids(llm.generate(PROMPT, greedy(min_tokens=24, stop_token_ids=[unused]))[0]) == expected


def test_the_step_itself_counts_its_tokens(make_tiny: MakeLLM) -> None:
    """N replays with nothing between them leave counts of N tokens."""
    llm = make_tiny()
    runner = llm.core.runner
    answer = llm.core.add("counted", PROMPT_IDS, greedy(frequency_penalty=0.5, max_tokens=12))
    llm.core.step()
    seat = answer.choices[0].request.seat
    assert seat is not None
    written = [answer.choices[0].request.output_token_ids[0]]
    for _ in range(8):
        runner.runners["full"](rows=[seat])
        written.append(int(runner.seats.token_ids[seat]))
    seen = runner.buffers["logits_state.seen"][seat].cpu()
    assert torch.equal((seen >> 1).long(), counts(written))
    assert torch.equal(torch.nonzero(seen & 1).flatten(), torch.tensor(sorted(set(PROMPT_IDS))))
    runner.resynchronize()
    llm.core.abort(answer)
