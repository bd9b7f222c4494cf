"""SamplingParams: what is refused, what is kept, and that nothing changes afterwards."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from mainspring.engine.options import UnknownOptionError
from mainspring.engine.sampling_params import SamplingParams


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.n, params.seed) == (16, 0, 1, None)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert params.detokenize and params.skip_special_tokens
    assert not params.ignore_eos and not params.include_stop_str_in_output


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("top-p", "top_p"),
        ("Seed", "seed"),
        ("max_new_tokens", "max_tokens"),
        ("ignore_eos_token", "ignore_eos"),
    ],
)
def test_an_unknown_name_is_an_error_that_suggests_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UnknownOptionError, match=f"SamplingParams has no option '{name}'.*'{nearest}'"):
        SamplingParams(**{name: 1})


def test_an_unknown_name_near_nothing_lists_the_names_that_exist() -> None:
    with pytest.raises(TypeError, match=r"no option 'zzz'; the options are .*\btemperature\b"):
        SamplingParams(zzz=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "name_and_value",
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("top_k", -2),
        ("min_p", -0.01),
        ("min_p", 1.5),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("n", 0),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("seed", 1 << 63),
        ("logprobs", -2),
        ("prompt_logprobs", -2),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("bad_words", [""]),
        ("stop_token_ids", [-1]),
        ("allowed_token_ids", []),
        ("logit_bias", {3: 100.5}),
        ("logit_bias", {-3: 1.0}),
    ],
)
def test_a_value_out_of_range_is_refused_by_name_and_value(name_and_value: tuple[str, Any]) -> None:
    name, value = name_and_value
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "name_and_value",
    [
        ("temperature", "hot"),
        ("temperature", None),
        ("top_k", 1.5),
        ("max_tokens", True),
        ("max_tokens", "16"),
        ("seed", 0.5),
        ("ignore_eos", 1),
        ("stop", 3),
        ("stop", [3]),
        ("bad_words", "word"),
        ("stop_token_ids", ["2"]),
        ("stop_token_ids", 2),
        ("logit_bias", [3]),
        ("logits_processors", ["not a function"]),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(name_and_value: tuple[str, Any]) -> None:
    name, value = name_and_value
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: value})


INTEGERS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@pytest.mark.parametrize("boolean", [True, np.True_, np.array(True), torch.tensor(True)], ids=repr)
def test_a_boolean_is_no_number_and_no_token_id(boolean: Any) -> None:
    given: list[tuple[str, Any]] = [(name, boolean) for name in INTEGERS + NUMBERS]
    given += [("stop_token_ids", [boolean]), ("allowed_token_ids", [boolean]), ("logit_bias", {3: boolean})]
    if not isinstance(boolean, np.ndarray):  # which is no key
        given.append(("logit_bias", {boolean: 1.0}))
    for name, value in given:
        with pytest.raises(TypeError, match=name):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize("values", [b"ab", np.array([True]), torch.tensor([True])], ids=repr)
def test_bytes_and_masks_are_no_token_ids(name: str, values: Any) -> None:
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: values})


def test_numbers_of_other_libraries_are_kept_as_plain_ones() -> None:
    for name in INTEGERS:
        for value in (np.int64(3), np.array(3), torch.tensor(3)):
            kept = getattr(SamplingParams(**{name: value}), name)
            assert (type(kept), kept) == (int, 3)
    for name in NUMBERS:
        for value in (np.float32(0.5), np.array(0.5), torch.tensor(0.5)):
            kept = getattr(SamplingParams(**{name: value}), name)
            assert (type(kept), kept) == (float, 0.5)


@pytest.mark.parametrize("value", [np.array([0.5, 0.5]), np.array(["a"]), torch.tensor([0.5, 0.5])], ids=repr)
def test_several_values_are_no_number(value: Any) -> None:
    for name in NUMBERS:
        with pytest.raises(TypeError, match=name):
            SamplingParams(**{name: value})
    with pytest.raises(TypeError, match="logit_bias"):
        SamplingParams(logit_bias={3: value})


@pytest.mark.parametrize(
    "allowed",
    [
        {"top_k": 0},
        {"top_k": -1},
        {"temperature": 0},
        {"temperature": 1e-6},
        {"top_p": 1},
        {"top_p": 1e-4},
        {"min_p": 1.0},
        {"max_tokens": None, "min_tokens": 100},
        {"min_tokens": 4, "max_tokens": 4},
        {"seed": -(1 << 63)},
        {"logprobs": 0},
        {"logit_bias": {"42": -100}},
        {"n": 3, "temperature": 0.5},
    ],
)
def test_the_edges_of_the_ranges_are_allowed(allowed: dict[str, Any]) -> None:
    params = SamplingParams(**allowed)
    for name in allowed.keys() - {"logit_bias"}:
        assert getattr(params, name) == allowed[name]


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_half_of_a_surrogate_pair_is_no_text(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} holds .*surrogate"):
        SamplingParams(**{name: ["fine", "a\ud800"]})
    SamplingParams(**{name: ["\ud7ff\ue000😊"]})


@pytest.mark.parametrize(
    "together",
    [
        {"min_tokens": 5, "max_tokens": 4},
        {"stop": "x", "detokenize": False},
        {"n": 2, "temperature": 0.0},
    ],
)
def test_values_that_contradict_each_other_are_refused(together: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        SamplingParams(**together)


def test_lists_are_kept_as_tuples_so_that_nothing_changes_afterwards() -> None:
    stop, ids, bias = ["a", "b"], [1, 2], {7: 1}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append("")
    ids.append(-1)
    bias[-5] = 1
    assert params.stop == params.stop_strings == ("a", "b")
    assert params.stop_token_ids == (1, 2)
    assert params.logit_bias == {7: 1.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = -1  # type: ignore[misc]


def test_one_stop_string_is_the_same_as_a_list_of_one() -> None:
    assert SamplingParams(stop="ab") == SamplingParams(stop=["ab"])
    assert SamplingParams().stop_strings == ()


def test_copies_are_equal_and_changed_copies_are_checked_again() -> None:
    params = SamplingParams(stop=["x"], seed=3, logit_bias={1: 2.0})
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    assert dataclasses.replace(params, max_tokens=5).max_tokens == 5
    with pytest.raises(ValueError, match="max_tokens"):
        dataclasses.replace(params, max_tokens=0)
    assert hash(params) == hash(copy.copy(params))


def test_greedy_is_temperature_zero_and_nothing_else() -> None:
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=1e-9).greedy
