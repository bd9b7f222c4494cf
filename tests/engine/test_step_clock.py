"""The times that ``stats`` tells are those of the steps, whether launching computes them or only queues them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mainspring import LLM, SamplingParams
from mainspring.engine.model_runner import LaunchedStep
from mainspring.engine.plan import DecodePlan, PrefillPlan

MakeLLM = Callable[..., LLM]
PREFILL, DECODE = 3.0, 0.25


@pytest.mark.parametrize("computed", ["when launched", "when read"])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_token_takes_what_its_step_takes(
    make_tiny: MakeLLM, monkeypatch: pytest.MonkeyPatch, computed: str, eager: bool, depth: int
) -> None:
    llm = make_tiny(enforce_eager=eager) if eager else make_tiny(launch_mode="graph")
    llm.core.pipeline.depth = depth
    now = 100.0
    monkeypatch.setattr("mainspring.engine.stats.time", SimpleNamespace(perf_counter=lambda: now))
    launch, results = llm.core.runner.launch, LaunchedStep.results

    def timed_launch(plan: PrefillPlan | DecodePlan) -> LaunchedStep:
        nonlocal now
        step = launch(plan)
        now += PREFILL if step.is_prefill else DECODE
        return step

    def timed_results(step: LaunchedStep) -> Any:
        nonlocal now
        now += PREFILL if step.is_prefill else DECODE
        return results(step)

    if computed == "when launched":
        monkeypatch.setattr(llm.core.runner, "launch", timed_launch)
    else:
        monkeypatch.setattr(LaunchedStep, "results", timed_results)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    for _ in range(2):
        llm.generate([{"prompt_token_ids": [5, 6]}, {"prompt_token_ids": [7]}], params)
        now += 1000.0  # nothing to do
    stats = llm.stats()
    assert (stats.prefill_steps, stats.decode_steps) == (2, 16)
    busy = 2 * PREFILL + 16 * DECODE
    assert stats.tokens_per_second == pytest.approx(2 * 2 * 9 / busy)
    if depth == 0:  # else a prefill step and a decode step are under way together, and share their time
        assert stats.ms_per_token == pytest.approx(1e3 * DECODE)
