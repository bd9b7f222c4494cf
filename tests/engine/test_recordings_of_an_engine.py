"""An engine knows what it recorded: names of all memory, audits, verification, and weights that were replaced."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mainspring import LLM, SamplingParams
from mainspring.engine.errors import SettingsError
from mainspring.graphs import Recording, VerificationError

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = {"prompt_token_ids": [5, 6, 7]}
MakeLLM = Callable[..., LLM]


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[int]:
    return list(llm.generate(PROMPT, params)[0].outputs[0].token_ids)


def test_every_address_of_a_recorded_step_lies_in_a_buffer_with_a_name(make_tiny: MakeLLM) -> None:
    llm = make_tiny(max_num_seqs=4)
    recording = llm.recording()
    assert [(rung.name, rung.size) for rung in recording.rungs] == [
        ("decode.plain", 4),
        ("decode.plain", 2),
        ("decode.plain", 1),
    ]
    for rung in recording.rungs:
        owners = {entry.owner for entry in rung.addresses}
        assert owners >= {"kv_cache", "seats", "block_tables", "token_ring", "logits", "decode.plain.input.rows"}
        assert "model.layers.1.mlp.down_proj.weight" in owners
        assert {entry.kind for entry in rung.addresses} <= {"buffer", "opaque", "pool", "constant"}
    assert recording.totals["kv_cache"] == llm.core.runner.buffers["kv_cache"].nbytes
    assert recording.totals["pool"] == llm.core.runner.pool.nbytes
    assert Recording.from_json(recording.to_json()) == recording


def test_the_full_step_is_in_the_recording_once_it_was_needed(make_tiny: MakeLLM) -> None:
    llm = make_tiny(max_num_seqs=2)
    tokens(llm, SamplingParams(temperature=1.0, seed=1, max_tokens=2))
    assert ("decode.full", 1) in [(rung.name, rung.size) for rung in llm.recording().rungs]
    assert all(report.ok for report in llm.audit().values())


def test_recordings_are_verified_on_random_requests_and_leave_no_trace(make_tiny: MakeLLM) -> None:
    llm = make_tiny(max_num_seqs=4, verify_graphs=True)
    assert llm.stats().verified_graphs == 3
    other = make_tiny(max_num_seqs=4, verify_graphs=False)
    assert other.stats().verified_graphs == 0
    expected = tokens(other)
    before = {
        name: tensor.clone() for name, tensor in llm.core.runner.buffers.items() if tensor.layout == torch.strided
    }
    assert llm.verify_graphs() == 3
    for name, tensor in before.items():
        if ".input." not in name:
            assert torch.equal(llm.core.runner.buffers[name], tensor), name
    assert tokens(llm) == expected


def test_verification_covers_penalties_and_logprobs_and_spares_requests_under_way(make_tiny: MakeLLM) -> None:
    params = SamplingParams(temperature=0.7, seed=3, presence_penalty=1.0, logprobs=2, max_tokens=8, ignore_eos=True)
    llm, other = make_tiny(max_num_seqs=4), make_tiny(max_num_seqs=4)
    expected = tokens(other, params)
    stream = llm.stream(PROMPT, params)
    seen = [next(stream) for _ in range(3)]
    assert llm.verify_graphs() == 4  # the full step's rung as well
    seen += list(stream)
    assert list(seen[-1].outputs[0].token_ids) == expected


def test_a_step_that_replays_something_else_is_refused(make_tiny: MakeLLM) -> None:
    llm = make_tiny(max_num_seqs=1)
    step = llm.core.runner.step
    model = step.model
    original = model.compute_logits

    def scaled(hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return original(hidden, out).mul_(2)

    model.compute_logits = scaled  # type: ignore[method-assign]
    with pytest.raises(VerificationError, match=r"'decode\.plain'.*'logits' differs.*eager runs aten::mul_"):
        llm.verify_graphs()


@pytest.mark.parametrize("value", [1, "yes"])
def test_verify_graphs_is_a_switch(value: Any, make_tiny: MakeLLM) -> None:
    with pytest.raises(SettingsError, match="verify_graphs"):
        make_tiny(verify_graphs=value)


def test_weights_written_in_place_keep_the_recordings_and_are_served_at_once(make_tiny: MakeLLM) -> None:
    llm = make_tiny(max_num_seqs=2)
    before = tokens(llm)
    norm = dict(llm.core.runner.model.named_parameters())["model.norm.weight"]
    llm.update_weights([("model.norm.weight", -norm.clone())])
    assert tokens(llm) != before
    assert llm.stats().recaptures == {}


def replace_weight(llm: LLM, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    module = llm.core.runner.model
    *path, last = name.split(".")
    for part in path:
        module = getattr(module, part)
    weight = getattr(module, last)
    plain = weight.to_dense() if weight.layout != torch.strided else weight
    setattr(module, last, nn.Parameter(change(plain), requires_grad=False))


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.down_proj.weight", "lm_head.weight"])
def test_weights_replaced_by_new_tensors_are_recorded_again_and_it_says_so(
    name: str, make_tiny: MakeLLM, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_tiny(max_num_seqs=2)
    before = tokens(llm)
    with caplog.at_level(logging.INFO, "mainspring"):
        replace_weight(llm, name, lambda weight: -2 * weight)
        changed = tokens(llm)
    assert changed != before
    assert llm.stats().recaptures == {"a weight was replaced by another tensor": 2}
    assert name in caplog.text and "again" in caplog.text
    replace_weight(llm, name, lambda weight: -weight / 2)
    assert tokens(llm) == before  # nothing of the prefix cache is from the other weights


def test_released_graphs_are_recorded_again_and_counted(make_tiny: MakeLLM) -> None:
    llm = make_tiny(max_num_seqs=2)
    before = tokens(llm)
    llm.release_graphs()
    assert llm.core.runner.pool.nbytes == 0
    assert llm.recording().rungs == ()
    assert tokens(llm) == before
    assert llm.stats().recaptures == {"release_graphs() was called": 1}


@pytest.mark.parametrize("seats", [1, 4, 21])
def test_the_bytes_of_recordings_are_accounted_for_and_compared_with_the_estimate(
    make_tiny: MakeLLM, caplog: pytest.LogCaptureFixture, seats: int
) -> None:
    with caplog.at_level(logging.INFO, "mainspring"):
        llm = make_tiny(max_num_seqs=seats)
    found = llm.core.recorded
    assert found is not None
    assert found.taken == llm.core.runner.pool.nbytes == found.expected
    assert found.difference == 0
    assert "MiB were expected (+0.0 MiB)" in caplog.text
    taken = llm.core.runner.bytes_taken()
    assert taken["kv_cache"] == (llm.core.memory.num_blocks + 1) * llm.core.memory.block_bytes
    assert taken["weights"] > 0 and taken["buffers"] > 0
    rung = llm.recording().rungs[0]
    assert rung.pool_bytes > 0 and rung.capture_seconds > 0 and len(rung.operations) > 10
    assert make_tiny(enforce_eager=True).core.recorded is None


def test_stats_count_padded_rows(make_tiny: MakeLLM) -> None:
    llm = make_tiny(max_num_seqs=4, cudagraph_capture_sizes=[4])
    llm.generate([PROMPT] * 3, GREEDY)
    stats = llm.stats()
    assert stats.padded_rows == stats.rungs[4] * 4 - stats.decoded_tokens > 0


@pytest.mark.parametrize("mode", ["graph", "loop"])
@pytest.mark.parametrize("ask", ["verify_graphs", "audit", "recording", "release_graphs"])
def test_what_is_asked_of_recordings_leaves_an_answer_under_way_as_it_is(
    make_tiny: MakeLLM, mode: str, ask: str
) -> None:
    llm = make_tiny(launch_mode=mode)
    prompt = {"prompt_token_ids": [5, 6]}
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=100, ignore_eos=True)
    expected = llm.generate(prompt, params)[0].outputs[0].token_ids
    stream = llm.stream(prompt, params)
    for _ in range(3):
        next(stream)
        getattr(llm, ask)()
    assert list(stream)[-1].outputs[0].token_ids == expected
