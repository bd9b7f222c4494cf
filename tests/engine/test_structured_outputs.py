"""Answers keep to the form that was asked for, whatever the weights say, in every launch mode and company."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from mainspring import LLM, SamplingParams, StructuredOutputsParams
from mainspring.engine.asks import Asks
from mainspring.engine.errors import RequestError

pytest.importorskip("llguidance")

MakeLLM = Callable[..., LLM]
PROMPT = "A person, as JSON:"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def answer(llm: LLM, wanted: Any, **fields: Any) -> list[str]:
    params = SamplingParams(structured_outputs=wanted, **{"seed": 4, "max_tokens": 60, **fields})
    [output] = llm.generate(PROMPT, params)
    assert all(choice.finish_reason == "stop" for choice in output.outputs)
    return [choice.text for choice in output.outputs]


def test_json_keeps_to_its_schema(smollm2: LLM) -> None:
    for text in answer(smollm2, {"json": SCHEMA}, n=3):
        person = json.loads(text)
        assert set(person) == {"name", "age"}
        assert len(person["name"]) <= 6 and person["age"] <= 150
        assert text == json.dumps(person, ensure_ascii=False)  # on one line, so that no answer is all white space


def test_expressions_choices_and_grammars_are_kept_to(smollm2: LLM) -> None:
    assert re.fullmatch(r"[0-9]{3}-[0-9]{2}", answer(smollm2, {"regex": "[0-9]{3}-[0-9]{2}"})[0])
    assert answer(smollm2, {"choice": ['"é"\n', "nö"]})[0] in ('"é"\n', "nö")
    assert re.fullmatch("ab+c", answer(smollm2, StructuredOutputsParams(grammar='start: "a" "b"+ "c"'))[0])
    assert answer(smollm2, {"json": {"const": 7}}, temperature=0) == ["7"]


def test_company_and_preemption_change_no_answer(smollm2: LLM) -> None:
    bound = SamplingParams(structured_outputs={"json": SCHEMA}, seed=4, max_tokens=60)
    free = SamplingParams(temperature=0, max_tokens=12)
    alone = [smollm2.generate(PROMPT, params)[0].outputs[0].token_ids for params in (bound, free)]
    together = [output.outputs[0].token_ids for output in smollm2.generate([PROMPT] * 4, [bound, free, bound, free])]
    assert together == alone * 2


def test_a_preempted_answer_goes_on_where_it_was(smollm2_path: object) -> None:
    params = [SamplingParams(structured_outputs={"regex": "(ab){12}"}, seed=seed, max_tokens=30) for seed in range(3)]
    options = {"max_model_len": 64, "num_gpu_blocks_override": 6, "block_size": 8, "enable_prefix_caching": False}
    with LLM("smollm2", device="cpu", dtype="float32", **options) as llm:
        outputs = llm.generate(["One two three four five."] * 3, params)
        assert llm.stats().preemptions > 0
    assert [output.outputs[0].text for output in outputs] == ["ab" * 12] * 3


def test_only_rows_with_a_grammar_wait_for_the_cpu_and_no_step_runs_eager(smollm2: LLM) -> None:
    before = smollm2.stats()
    answer(smollm2, {"choice": ["yes", "no"]})
    after = smollm2.stats()
    assert after.eager_steps == before.eager_steps
    assert sum(after.rungs.values()) > sum(before.rungs.values())
    assert Asks.GRAMMAR.need_cpu and Asks.PROCESSORS.need_cpu and not Asks.ALLOWED_IDS.need_cpu


def test_log_probabilities_are_the_models_own(smollm2: LLM) -> None:
    params = SamplingParams(structured_outputs={"choice": ["yes"]}, temperature=0, logprobs=0)
    [output] = smollm2.generate(PROMPT, params)
    first = output.outputs[0]
    assert first.logprobs is not None
    assert first.logprobs[0][first.token_ids[0]].logprob < -1.0  # though nothing else was allowed


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"json": {"type": "person"}}, "person"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"not": {}}}, "not"),
        ({"regex": "("}, "unclosed"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "nothing"}, "kept to"),
        ({"regex": "a" * (1 << 21)}, "characters"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_before_anything_runs(smollm2: LLM, wanted: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        smollm2.generate(PROMPT, SamplingParams(structured_outputs=wanted))
    assert not smollm2.core.has_work()


@pytest.mark.parametrize(
    ("wanted", "kind", "words"),
    [
        ({}, ValueError, "nothing"),
        ({"regex": "a", "choice": ["b"]}, ValueError, "regex and choice"),
        ({"regx": "a"}, TypeError, "regex"),
        ({"choice": []}, ValueError, "choice"),
        ({"choice": [""]}, ValueError, "choice"),
        ({"json": "{"}, ValueError, "not JSON"),
        ({"json": "[1]"}, TypeError, "object"),
        ({"json": {"maximum": float("nan")}}, ValueError, "not JSON"),
        ({"regex": 7}, TypeError, "regex"),
        ({"regex": "a", "whitespace_pattern": " "}, ValueError, "whitespace_pattern"),
        ("json", TypeError, "StructuredOutputsParams"),
    ],
)
def test_a_form_that_says_nothing_is_refused_when_it_is_made(wanted: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        SamplingParams(structured_outputs=wanted)


@pytest.mark.parametrize(
    "other", [{"ignore_eos": True}, {"min_tokens": 3}, {"allowed_token_ids": [5]}, {"bad_words": ["x"]}]
)
def test_what_may_rule_out_every_token_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(other))):
        SamplingParams(structured_outputs={"choice": ["a"]}, **other)


def test_an_engine_without_a_tokenizer_says_so(make_tiny: MakeLLM) -> None:
    with pytest.raises(RequestError, match="tokenizer"):
        make_tiny().generate({"prompt_token_ids": [5]}, SamplingParams(structured_outputs={"choice": ["a"]}))


def test_a_grammar_that_breaks_ends_its_answer_alone(smollm2: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from mainspring.engine.structured import Grammar

    follow = Grammar.follow

    def breaks(self: Grammar, token_ids: Any) -> None:
        follow(self, token_ids)
        if len(token_ids) == 3:
            raise RequestError("the grammar is too complex")

    bound = SamplingParams(structured_outputs={"regex": "a{30}"}, max_tokens=40)
    free = SamplingParams(temperature=0, max_tokens=8)
    expected = smollm2.generate(PROMPT, free)[0].outputs[0].token_ids
    monkeypatch.setattr(Grammar, "follow", breaks)
    answers = [smollm2.core.add(name, [5, 6, 7], bound) for name in ("a", "b")]
    other = smollm2.core.add("c", smollm2._encode(PROMPT)[1], free)
    while smollm2.core.has_work():
        smollm2.core.step()
    assert [str(each.error) for each in answers] == ["the grammar is too complex"] * 2
    assert [len(each.choices[0].request.output_token_ids) for each in answers] == [3, 3]
    assert other.output().outputs[0].token_ids == expected
    assert smollm2.core.scheduler.pool.num_free == smollm2.core.memory.num_blocks
