"""An engine inspected: what the report says is what the engine has, and the engine goes on as before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mainspring import LLM, SamplingParams
from mainspring.engine.settings import DEFAULT_CPU_KV_BYTES
from mainspring.inspect import inspect_engine

PROMPT = {"prompt_token_ids": [5, 6, 7, 8]}
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> Iterator[LLM]:
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "kv_cache_memory": 4 << 20}
    with LLM(str(tiny_folder), max_num_seqs=4, progress=False, **options) as made:
        yield made


def test_eager_and_recorded_steps_are_watched_and_leave_the_engine_as_it_was(llm: LLM) -> None:
    before = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    free = llm.core.scheduler.pool.num_free
    found = inspect_engine(llm, rows=3, steps=2)
    assert llm.core.scheduler.pool.num_free == free
    assert not llm.core.has_work()
    assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == before
    assert llm.stats().eager_steps.keys() == {"enforce_eager"}  # those that were asked for, and counted
    eager, graph = found.timelines[:2]
    assert (eager.mode, graph.mode) == ("eager", "graph")
    for timeline in (eager, graph):
        assert (timeline.rows, timeline.rung, timeline.steps) == (3, 4, 2)
        steps = [event.step for event in timeline.device_events]
        assert steps.count(0) == steps.count(1) > 30
        assert 0 < (timeline.idle_us or 0) < timeline.step_us
    # A replay calls the project's own operations past the dispatcher, so the profiler sees what they call in torch.
    attention = [each for each in eager.device_events if each.name == "mainspring::rope_and_decode_attention"]
    assert len(attention) == 2 * llm.core.config.num_layers


def test_an_engine_that_loops_shows_its_loop(tiny_folder: Path) -> None:
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "launch_mode": "loop"}
    with LLM(str(tiny_folder), max_num_seqs=4, **options) as llm:
        found = inspect_engine(llm, steps=3)
    assert [timeline.mode for timeline in found.timelines] == ["eager", "graph", "loop"]
    loop = found.timelines[2]
    assert [event.step for event in loop.device_events] == [0, 1, 2]
    assert loop.step_us > 0 and loop.idle_us is None
    assert found.notes == ()


def test_recording_audit_and_estimates_are_the_engines_own(llm: LLM) -> None:
    found = inspect_engine(llm, steps=0)
    assert found.timelines == ()
    assert [rung.size for rung in found.recording.rungs] == [4, 2, 1]
    assert found.audits["decode.plain"].ok and found.audits["decode.plain"].rungs == 3
    assert found.recording.totals == llm.core.runner.bytes_taken()
    assert found.estimates is not None
    assert (found.estimates.expected, found.estimates.taken) == (llm.core.recorded.expected, llm.core.recorded.taken)  # type: ignore[union-attr]
    assert found.estimates.kv_blocks == llm.core.memory.num_blocks
    assert found.about["launch mode"] == "graph" and found.about["weights"] == "random (dummy)"


def test_the_step_that_samples_is_recorded_when_asked_for(llm: LLM) -> None:
    found = inspect_engine(llm, steps=0, sampled=True)
    names = [rung.name for rung in found.recording.rungs]
    assert names.count("decode.full") == names.count("decode.plain") == 3
    assert found.audits.keys() == {"decode.plain", "decode.full"}


def test_a_batch_that_cannot_be_had_is_refused_with_its_limit(llm: LLM) -> None:
    with pytest.raises(ValueError, match="batch of 5 rows > max_num_seqs 4"):
        inspect_engine(llm, rows=5)
    with pytest.raises(ValueError, match="> max_model_len 512"):
        inspect_engine(llm, steps=500)
    with pytest.raises(ValueError, match="0 rows"):
        inspect_engine(llm, rows=0)


def test_an_eager_engine_has_nothing_to_show(tiny_folder: Path) -> None:
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "kv_cache_memory": 4 << 20}
    with (
        LLM(str(tiny_folder), enforce_eager=True, **options) as llm,
        pytest.raises(ValueError, match="records nothing"),
    ):
        inspect_engine(llm)


@pytest.mark.gpu
def test_on_a_gpu_kernels_calls_and_gaps_are_seen(tiny_folder: Path) -> None:
    pytest.importorskip("cuda.bindings")
    with LLM(str(tiny_folder), load_format="dummy", skip_tokenizer_init=True, max_num_seqs=4) as llm:
        found = inspect_engine(llm, steps=3)
        assert llm.core.memory.num_blocks * llm.core.memory.block_bytes <= DEFAULT_CPU_KV_BYTES  # others share the GPU
    eager, graph = found.timelines[:2]
    assert eager.calls is not None and graph.calls is not None and graph.operations is not None
    assert eager.calls > 2 * llm.core.config.num_layers  # a layer is some kernels, and each is a call
    assert graph.calls < min(eager.calls, graph.operations)  # one call is all kernels of the step
    for timeline in (eager, graph):
        assert {event.step for event in timeline.device_events} == {0, 1, 2}
    assert found.audits["decode.plain"].ok
    assert all(rung.executable_bytes >= 0 and rung.operations for rung in found.recording.rungs)
    if found.about["launch mode"] == "loop":
        assert found.timelines[2].mode == "loop" and found.timelines[2].step_us > 0
