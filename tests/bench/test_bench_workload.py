"""Workloads, and the figures made from times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring.bench.latency import Timeline
from mainspring.bench.workload import Workload, percentile, time_per_token


@pytest.mark.parametrize(
    "wrong", [{"batches": ()}, {"batches": (1, 0)}, {"input_len": 0}, {"output_len": -1}, {"repeats": 0}]
)
def test_sizes_below_one_are_refused(wrong: dict[str, object]) -> None:
    fields: dict[str, object] = {"batches": (1,), "input_len": 4, "output_len": 4}
    with pytest.raises(ValueError, match="must be at least 1"):
        Workload(**{**fields, **wrong})  # type: ignore[arg-type]


def test_every_engine_gets_the_same_prompts() -> None:
    one, other = (Workload((3,), 5, 8) for _ in range(2))
    prompts = one.prompts(3, vocab_size=50)
    assert prompts == other.prompts(3, vocab_size=50) != Workload((3,), 5, 8, seed=1).prompts(3, vocab_size=50)
    assert [len(prompt) for prompt in prompts] == [5, 5, 5]
    assert all(0 <= token < 50 for prompt in prompts for token in prompt)


def test_time_per_token_leaves_out_the_first() -> None:
    asked = []

    def generate(tokens: int) -> float:
        asked.append(tokens)
        return 7.0 + 0.5 * (tokens - 1)

    assert time_per_token(generate, output_len=10, repeats=3) == (0.5, 7.0)
    assert asked == [1, 11] * 3


def test_only_steps_of_the_whole_batch_count() -> None:
    # A prompt chunk's tokens (2 rows), then steps among which one served 2 rows only.
    timeline = Timeline(10.0, [(11.0, 2), (12.0, 4), (12.5, 4), (13.0, 4), (20.0, 2), (21.0, 4), (21.25, 4)])
    assert timeline.step_seconds(4) == [0.5, 0.5, 0.25]
    assert timeline.seconds == 11.25


@given(values=st.lists(st.floats(0, 1e6), min_size=1), percent=st.floats(0, 100))
def test_percentile_is_a_value_that_so_many_do_not_exceed(values: list[float], percent: float) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) >= len(values) * percent / 100 - 1e-9
    assert sum(value < found for value in values) <= len(values) * percent / 100
