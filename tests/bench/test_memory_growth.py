"""A leak is reported in a run of minutes, and warm-up is not taken for one, however short the run."""

from __future__ import annotations

import math
import random

import pytest

from mainspring.bench.memory_growth import COLD_SLACK, WARM_SLACK, MemoryGrowth, memory_growth

MIB = 1 << 20
BASE = 1400 * MIB


def series(seconds: int, warm_up: float, in_seconds: float, leak: float = 0.0, seed: int = 0) -> list[int]:
    """A sample a second: ``warm_up`` MiB that come ever more slowly, ``leak`` MiB a minute, and noise of 2 MiB."""
    rng = random.Random(seed)
    return [
        BASE + int(MIB * (warm_up * (1 - math.exp(-s / in_seconds)) + leak * s / 60 + rng.uniform(0, 2)))
        for s in range(seconds)
    ]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("warm_at", [5, 60, 170])
def test_a_leak_in_five_minutes_is_reported(warm_at: int, seed: int) -> None:
    grown = memory_growth(series(300, 60, 10, leak=36, seed=seed), warm_at)
    assert grown.slack == WARM_SLACK and not grown.is_flat


def test_a_leak_is_reported_though_warm_up_has_grown_more() -> None:
    assert not memory_growth(series(300, 1000, 20, leak=20), 60).is_flat


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("seconds", [60, 300])
def test_warm_up_that_ends_is_no_leak(seconds: int, seed: int) -> None:
    assert memory_growth(series(seconds, 180, seconds / 15, seed=seed), warm_at=seconds // 4).is_flat


@pytest.mark.parametrize("seconds", [1, 2, 4, 5, 6, 9])
def test_a_run_too_short_to_be_warm_is_not_judged_by_its_warm_up(seconds: int) -> None:
    for warm_at in (None, seconds - 1):
        for in_seconds in (1, 5, 20):
            assert memory_growth(series(seconds, 180, in_seconds), warm_at).is_flat


def test_a_run_that_was_never_warm_is_still_reported_when_it_grows_without_measure() -> None:
    grown = memory_growth(series(300, 60, 10, leak=100), None)
    assert grown.slack == COLD_SLACK and not grown.is_flat


def test_early_is_read_after_the_server_is_warm() -> None:
    samples = [BASE] * 50 + [BASE + 100 * MIB] * 50
    assert memory_growth(samples, 50) == MemoryGrowth(BASE + 100 * MIB, BASE + 100 * MIB, WARM_SLACK)
    assert not memory_growth(samples, 10).is_flat
    assert memory_growth(samples, 70).slack == COLD_SLACK
    assert memory_growth([BASE], None) == MemoryGrowth(BASE, BASE, COLD_SLACK)
