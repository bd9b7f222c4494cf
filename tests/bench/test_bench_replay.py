"""A batch paused in mid-answer: its step can be replayed, and the engine goes on as if nothing had been."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mainspring import LLM, SamplingParams
from mainspring.bench.latency import drive
from mainspring.bench.replay import STEPS_IN_A_ROW, paused_batch

PROMPTS = [[5, 6, 7], [9, 8], [1] * 15]
MakeLLM = Callable[..., LLM]
PARAMS = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False)


@pytest.fixture
def make_llm(tiny_folder: Path) -> Iterator[MakeLLM]:
    made: list[LLM] = []

    def make(**options: object) -> LLM:
        sizes = {"max_num_seqs": 4, "kv_cache_memory": 4 << 20, "skip_tokenizer_init": True}
        made.append(LLM(str(tiny_folder), device="cpu", load_format="dummy", **{**sizes, **options}))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def test_replays_start_from_the_same_state_each_time(make_llm: MakeLLM) -> None:
    llm = make_llm()
    ring = llm.core.runner.ring
    with paused_batch(llm.core, PROMPTS, PARAMS, after=10) as paused:
        assert paused is not None and 1 <= paused.steps <= STEPS_IN_A_ROW
        seen = []
        for _ in range(2):
            paused.rewind()
            before = int(ring.step)
            for _ in range(paused.steps):
                paused.replay()
            assert int(ring.step) == before + paused.steps
            seen.append(ring.entries.clone())
            replayed = [(before + step) % len(ring.entries) for step in range(paused.steps)]
            assert (ring.entries[replayed, : len(PROMPTS), 0] >= 0).all(), "a row did nothing"
        assert seen[0].equal(seen[1])
        assert paused.step_ms() > 0


def test_the_engine_answers_alike_before_and_after(make_llm: MakeLLM) -> None:
    llm = make_llm()
    requests = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    before = [output.outputs[0].token_ids for output in llm.generate(requests, PARAMS)]
    with paused_batch(llm.core, PROMPTS, PARAMS, after=10) as paused:
        assert paused is not None
        paused.replay()
    assert not llm.core.has_work()
    assert [output.outputs[0].token_ids for output in llm.generate(requests, PARAMS)] == before


def test_nothing_is_recorded_in_an_eager_engine(make_llm: MakeLLM) -> None:
    llm = make_llm(enforce_eager=True)
    with paused_batch(llm.core, PROMPTS, PARAMS, after=3) as paused:
        assert paused is None
    assert not llm.core.has_work()


def test_drive_sees_every_token(make_llm: MakeLLM) -> None:
    llm = make_llm()
    timeline = drive(llm.core, PROMPTS, PARAMS)
    assert sum(rows for _, rows in timeline.arrivals) == len(PROMPTS) * 60
    assert len(timeline.step_seconds(len(PROMPTS))) == 59
    assert all(seconds > 0 for seconds in timeline.step_seconds(len(PROMPTS)))
