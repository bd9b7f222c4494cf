"""What an engine has done: counted in the engine, shown by ``--stats``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from mainspring.engine.launched import LaunchedStep
from mainspring.engine.model_runner import ModelRunner
from mainspring.engine.scheduler import DecodePlan, PrefillPlan, Scheduler


@dataclass(frozen=True)
class EngineStats:
    """Counts since the engine was made.

    ``cpu_calls_per_token`` counts what the CPU asks of the device for decoding (replays or operations, uploads, reads)
    over decoded tokens; ``ms_per_token`` is the wall time of a decode step, whatever its number of rows;
    ``padding_waste`` is the share of decode rows that were padding, 0 to 1. ``prefix_queried_tokens`` is how many
    prompt tokens were looked up in the prefix cache, ``prefix_hit_tokens`` how many were there. ``recaptures`` counts
    rungs that were recorded again, by reason; ``verified_graphs`` the recordings that were compared with eager runs.
    """

    launch_mode: str
    cpu_calls_per_token: float
    ms_per_token: float
    tokens_per_second: float
    padding_waste: float
    padded_rows: int
    rungs: Mapping[int, int]
    prefill_steps: int
    decode_steps: int
    prefill_tokens: int
    decoded_tokens: int
    eager_steps: Mapping[str, int]
    recaptures: Mapping[str, int]
    verified_graphs: int
    recorded_bytes: int
    recording_seconds: float
    preemptions: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    prefix_evicted_blocks: int


class StepClock:
    """Times steps from the CPU's side: a decode step's time is what passed since the step before it was done."""

    def __init__(self) -> None:
        self.tokens = 0
        self.prefill_steps = 0
        self.decode_steps = 0
        self.decode_rows = 0
        self.decode_calls = 0
        self.decode_seconds = 0.0
        self.busy_seconds = 0.0
        self._last = 0.0

    @contextmanager
    def launching(self, plan: PrefillPlan | DecodePlan, runner: ModelRunner, idle: bool) -> Iterator[None]:
        """Around the launch of a step; ``idle`` says that no other step is under way."""
        if idle:
            self._last = time.perf_counter()
        before = device_calls(runner)
        yield
        if isinstance(plan, DecodePlan):
            self.decode_steps += 1
            self.decode_rows += len(plan.requests)
            self.decode_calls += device_calls(runner) - before
        else:
            self.prefill_steps += 1

    def arrived(self, launched: LaunchedStep) -> None:
        """A step has been read back."""
        now = time.perf_counter()
        passed, self._last = now - self._last, now
        self.busy_seconds += passed
        if not launched.is_prefill:
            self.decode_seconds += passed

    def stats(self, launch_mode: str, runner: ModelRunner, scheduler: Scheduler) -> EngineStats:
        """The counts so far, with the runner's and the scheduler's."""
        prefix = scheduler.pool.counters
        counters = [each.counters for each in runner.runners.values()]
        rungs: dict[int, int] = {}
        eager: dict[str, int] = dict(runner.eager_steps)
        again: dict[str, int] = {}
        for counter in counters:
            for size, count in counter.replays.items():
                rungs[size] = rungs.get(size, 0) + count
            for reason, count in counter.eager_steps.items():
                eager[reason] = eager.get(reason, 0) + count
            for reason, count in counter.recaptures.items():
                again[reason] = again.get(reason, 0) + count
        rows = sum(counter.rows for counter in counters)
        padded = sum(counter.padded_rows for counter in counters)
        return EngineStats(
            launch_mode=launch_mode,
            cpu_calls_per_token=self.decode_calls / max(self.decode_rows, 1),
            ms_per_token=1e3 * self.decode_seconds / max(self.decode_steps, 1),
            tokens_per_second=self.tokens / self.busy_seconds if self.busy_seconds else 0.0,
            padding_waste=padded / max(rows + padded, 1),
            padded_rows=padded,
            rungs=dict(sorted(rungs.items())),
            prefill_steps=self.prefill_steps,
            decode_steps=self.decode_steps,
            prefill_tokens=runner.prefill_tokens,
            decoded_tokens=self.decode_rows,
            eager_steps=eager,
            recaptures=again,
            verified_graphs=sum(counter.verified for counter in counters),
            recorded_bytes=int(runner.pool.nbytes),
            recording_seconds=sum(counter.capture_seconds for counter in counters),
            preemptions=scheduler.num_preemptions,
            prefix_queried_tokens=prefix.queried_tokens,
            prefix_hit_tokens=prefix.hit_tokens,
            prefix_evicted_blocks=prefix.evicted_blocks,
        )


def device_calls(runner: ModelRunner) -> int:
    """Calls that the CPU has made to the device through this runner: replays or single operations, and copies."""
    calls = runner.upload.calls + runner.downloads + runner.eager_operations
    for each in runner.runners.values():
        calls += each.counters.replays.total() + each.counters.uploads
    return calls
