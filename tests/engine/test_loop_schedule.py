"""What a loop ran, launched again step by step, gives the same bits: on the CPU, and on a GPU."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mainspring import LLM, SamplingParams
from mainspring.engine.answers import Answer
from mainspring.engine.schedule_log import ScheduleLog, record_schedule, replay_schedule
from mainspring.graphs import CpuGraph

MakeLLM = Callable[..., LLM]

SIZES: dict[str, Any] = {
    "num_gpu_blocks_override": 40,
    "block_size": 4,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "verify_graphs": False,  # its replays would be taken for steps
}


def random_params(rng: random.Random, stop: list[str] | None) -> SamplingParams:
    greedy = rng.random() < 0.5
    return SamplingParams(
        temperature=0.0 if greedy else 0.9,
        seed=rng.getrandbits(30),
        n=1 if greedy else rng.choice([1, 1, 3]),
        max_tokens=rng.randint(1, 60),
        ignore_eos=rng.random() < 0.5,
        stop=stop if rng.random() < 0.5 else None,
        repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.3]),
        logprobs=rng.choice([None, None, None, 2]),
        min_tokens=rng.choice([0, 0, 1]),
    )


def random_traffic(llm: LLM, seed: int, count: int, stop: list[str] | None = None) -> list[Answer]:
    """Requests and aborts at random moments, some while a loop runs; prompts share beginnings."""
    rng, core = random.Random(seed), llm.core
    shared = [rng.randrange(3, 250) for _ in range(24)]
    answers: list[Answer] = []
    while len(answers) < count or core.has_work():
        if len(answers) < count and (rng.random() < 0.3 or not core.has_work()):
            prompt = shared[: rng.randint(0, 20)] + [rng.randrange(3, 250) for _ in range(rng.randint(1, 10))]
            answers.append(core.add(str(len(answers)), prompt, random_params(rng, stop)))
        under_way = [answer for answer in answers if not answer.finished]
        if under_way and rng.random() < 0.05:
            core.abort(rng.choice(under_way))
        if rng.random() < 0.3:
            time.sleep(rng.choice([0.0, 0.001, 0.003]))
        core.step()
    return answers


class LogitsWatch:
    """Takes down the logits after each decode step of engines on the CPU, whoever launches it."""

    def __init__(self) -> None:
        self.steps: dict[int, list[str]] = {}
        self._logits: dict[int, torch.Tensor] = {}

    def watch(self, llm: LLM) -> list[str]:
        pool = id(llm.core.runner.pool)
        self._logits[pool] = llm.core.runner.logits
        return self.steps.setdefault(pool, [])

    def around(self, pool: int, run: Callable[[], object]) -> None:
        """Run a step; rows that it does not write are nought."""
        if pool not in self._logits:
            run()
            return
        self._logits[pool].zero_()
        run()
        self.steps[pool].append(sha256(self._logits[pool]))


@pytest.fixture
def logits_watch(monkeypatch: pytest.MonkeyPatch) -> LogitsWatch:
    watch, replay = LogitsWatch(), CpuGraph.replay
    monkeypatch.setattr(CpuGraph, "replay", lambda graph: watch.around(id(graph.pool), lambda: replay(graph)))
    return watch


def sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


def assert_some_of_everything(llm: LLM, log: ScheduleLog, answers: list[Answer]) -> None:
    """That the traffic had what the test is about."""
    stats = llm.stats()
    assert stats.loop_steps > stats.decode_steps / 2
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0
    # Which kinds of news meet a running loop is a matter of timing; that some do is not.
    assert "flag" in stats.loop_ends and len(stats.loop_ends) > 1
    assert {"abort", "length"} <= {choice.finish_reason for answer in answers for choice in answer.choices}
    assert sum(launch.digest is not None for launch in log.launches) > 20


@pytest.mark.parametrize("seed", [0, 1])
def test_a_loops_schedule_gives_the_same_bits_step_by_step(
    make_tiny: MakeLLM, logits_watch: LogitsWatch, seed: int
) -> None:
    llm = make_tiny(launch_mode="loop", **SIZES)
    looped = logits_watch.watch(llm)
    with record_schedule(llm.core.runner) as log:
        answers = random_traffic(llm, seed, 60)
    assert_some_of_everything(llm, log, answers)
    assert llm.core.scheduler.pool.num_free == llm.core.memory.num_blocks
    assert len(looped) == log.num_steps
    graph, eager = make_tiny(launch_mode="graph", **SIZES), make_tiny(launch_mode="eager", **SIZES)
    singly = logits_watch.watch(graph)
    assert list(replay_schedule(log, graph.core.runner)) == []
    assert singly == looped
    unrecorded, pool = logits_watch.watch(eager), id(eager.core.runner.pool)
    assert list(replay_schedule(log, eager.core.runner, lambda run: logits_watch.around(pool, run))) == []
    assert unrecorded == looped


def test_stop_strings_too(make_tiny: MakeLLM, tiny_speaking: Path) -> None:
    speaking = {"model": str(tiny_speaking), "skip_tokenizer_init": False, **SIZES}
    llm = make_tiny(launch_mode="loop", **speaking)
    stops = ["a", "b", "e", "i", "k"]
    with record_schedule(llm.core.runner) as log:
        answers = random_traffic(llm, 5, 50, stop=stops)
    ended = [choice for answer in answers for choice in answer.choices if choice.stop_reason in stops]
    assert len(ended) >= 3
    assert llm.core.scheduler.pool.num_free == llm.core.memory.num_blocks
    assert list(replay_schedule(log, make_tiny(launch_mode="graph", **speaking).core.runner)) == []


def test_a_changed_schedule_is_noticed(make_tiny: MakeLLM) -> None:
    llm = make_tiny(launch_mode="loop", **SIZES)
    with record_schedule(llm.core.runner) as log:
        llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    assert len(log.launches) == 2
    log.launches[1].steps -= 1
    log.launches[1].tokens.pop()
    wrong = list(replay_schedule(log, make_tiny(launch_mode="graph", **SIZES).core.runner))
    assert [line.split(": ")[1] for line in wrong] == [
        f"{name} has other bits" for name in ("seats", "ring", "step", "logits")
    ]
    log.launches[1].tokens[3][0] = (0, 1)
    assert any(
        "step 3: tokens" in line for line in replay_schedule(log, make_tiny(launch_mode="graph", **SIZES).core.runner)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", [0, 1])
def test_on_a_gpu_a_loops_schedule_gives_the_same_bits_step_by_step(make_tiny: MakeLLM, dtype: str, seed: int) -> None:
    llm = make_tiny(device="cuda", dtype=dtype, launch_mode="loop", **SIZES)
    with record_schedule(llm.core.runner) as log:
        answers = random_traffic(llm, seed, 300)
    assert_some_of_everything(llm, log, answers)
    assert llm.core.scheduler.pool.num_free == llm.core.memory.num_blocks
    for mode in ("graph", "eager"):
        other = make_tiny(device="cuda", dtype=dtype, launch_mode=mode, **SIZES)
        assert list(replay_schedule(log, other.core.runner)) == []
