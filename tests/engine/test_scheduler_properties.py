"""Random traffic through a tiny pool: nothing leaks, nothing is shared wrongly, everybody ends, in order."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_device import Params
from scheduler_harness import Engine

from mainspring.engine.errors import RequestError


def make_prompt(rng: random.Random, longest: int) -> list[int]:
    """Two families of prompts, each a cut of one long text, some with an end of their own."""
    family = rng.randrange(2)
    text = random.Random(family).choices((1, 2, 3), k=longest)
    prompt = text[: rng.randint(1, longest)]
    if rng.random() < 0.3:
        prompt = prompt[:-1] + [rng.randint(1, 3)]
    return prompt


class Traffic(RuleBasedStateMachine):
    """Hypothesis chooses what happens and when; the harness checks every promise after each step."""

    @initialize(
        num_blocks=st.integers(2, 14),
        block_size=st.integers(1, 4),
        num_seats=st.integers(1, 4),
        max_num_batched_tokens=st.integers(1, 12),
        max_model_len=st.integers(4, 40),
        depth=st.integers(0, 2),
        prefix_caching=st.booleans(),
    )
    def start(self, **sizes: int) -> None:
        self.engine = Engine(**sizes)  # type: ignore[arg-type]

    @rule(
        seed=st.integers(0, 2**16),
        max_tokens=st.one_of(st.none(), st.integers(1, 20)),
        eos_every=st.sampled_from([0, 3, 10]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        choices=st.sampled_from([1, 1, 1, 3]),
        salt=st.sampled_from([None, None, "x"]),
    )
    def arrive(
        self,
        seed: int,
        max_tokens: int | None,
        eos_every: int,
        priority: int,
        choices: int,
        salt: str | None,
    ) -> None:
        prompt = make_prompt(random.Random(seed), 24)
        fits = len(prompt) < min(self.engine.pool.num_usable_tokens, self.engine.scheduler.max_model_len)
        for choice in range(choices):
            params = Params(max_tokens, seed % 3 + choice, eos_every)
            options = {"priority": priority, "choice": choice, "cache_salt": salt}
            if fits:
                self.engine.add(prompt, params, **options)
            else:
                with pytest.raises(RequestError, match=f"prompt of {len(prompt)} tokens"):
                    self.engine.add(prompt, params, **options)

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @rule(
        max_steps=st.integers(1, 12),
        stop_after=st.integers(1, 20),
        keep_free=st.sampled_from([0, 0, 1, 3]),
        more_steps=st.sampled_from([0, 0, 1, 6]),
        admit=st.booleans(),
    )
    def loop(self, **choices: int) -> None:
        self.engine.loop_step(**choices)  # type: ignore[arg-type]

    @precondition(lambda self: self.engine.requests)
    @rule(index=st.integers(0, 10**6))
    def abort(self, index: int) -> None:
        self.engine.abort(self.engine.requests[index % len(self.engine.requests)])

    @precondition(lambda self: self.engine.scheduler.num_running)
    @rule(index=st.integers(0, 10**6))
    def stop_string(self, index: int) -> None:
        running = self.engine.scheduler.requests[: self.engine.scheduler.num_running]
        self.engine.stop_on_cpu(running[index % len(running)])

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.run()


Traffic.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestTraffic = Traffic.TestCase


def drive(rng: random.Random, engine: Engine, steps: int, load: float) -> None:
    """``steps`` launched steps of random arrivals, aborts and stops; then everything runs to its end."""
    longest = min(engine.pool.num_usable_tokens, engine.scheduler.max_model_len) - 1
    live: list = []
    while engine.num_steps < steps:
        if rng.random() < load and engine.scheduler.num_waiting < 8:
            prompt = make_prompt(rng, rng.randint(1, min(longest, 40)))
            for choice in range(3 if rng.random() < 0.1 else 1):
                max_tokens = rng.choice([1, 4, 8, 16, 16, 40, 40, None])
                params = Params(max_tokens, rng.randrange(4), rng.choice([0, 4, 20]))
                priority = rng.choice([0, 0, 0, 1])
                live.append(engine.add(prompt, params, priority=priority, choice=choice))
        dice = rng.random()
        if live and dice < 0.01:
            engine.abort(rng.choice(live))
        elif live and dice < 0.02:
            engine.stop_on_cpu(rng.choice(live))
        if dice > 0.97:
            keep_free, more_steps = rng.choice([0, 0, 2]), rng.choice([0, 0, 5])
            engine.loop_step(rng.randint(1, 20), rng.randint(1, 20), keep_free, more_steps, rng.random() < 0.5)
        else:
            engine.step()
        for request in [r for r in live if r.is_finished]:
            engine.check_answer(request)
            live.remove(request)
            engine.requests.remove(request)
    engine.run()


@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_hundred_thousand_random_steps_keep_every_promise(depth: int, prefix_caching: bool) -> None:
    sizes = [(9, 3, 16), (17, 6, 8), (33, 8, 64), (65, 12, 32)]
    for number, (num_blocks, num_seats, budget) in enumerate(sizes):
        rng = random.Random(number)
        engine = Engine(num_blocks, 4, num_seats, budget, depth=depth, prefix_caching=prefix_caching)
        drive(rng, engine, 6_250, load=0.3)
        assert engine.scheduler.num_preemptions > 20, "the pool was not tight"
        assert (engine.pool.counters.hit_tokens > 0) == prefix_caching
