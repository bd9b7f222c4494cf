"""What an engine has done: counted in the engine, shown by ``--stats``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from mainspring.engine.launched import LaunchedStep
from mainspring.engine.loop_driver import LoopDriver
from mainspring.engine.loops import RunningLoop
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

    Of the ``prefill_steps``, ``recorded_prefill_steps`` were replays, and ``eager_prefill_steps`` counts the others by
    reason. ``rungs``, padding and ``eager_steps`` are those of decode steps.

    ``decode_launches`` counts the replays and loops that the CPU launched for decoding (eager steps too), and
    ``launches_per_token`` them over decoded tokens. ``loop_launches`` of them were loops, which made ``loop_steps`` of
    the ``decode_steps``; ``loop_ends`` is why they ended. ``single_steps`` counts, in loop mode, decode steps that were
    launched one at a time, by reason. ``loop_gap_ms`` is the median of the milliseconds for which the device stood
    still between two loops, where no prefill step was between; None where none was seen.
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
    decode_launches: int = 0
    launches_per_token: float = 0.0
    loop_launches: int = 0
    loop_steps: int = 0
    loop_ends: Mapping[str, int] = field(default_factory=dict)
    single_steps: Mapping[str, int] = field(default_factory=dict)
    loop_gap_ms: float | None = None
    recorded_prefill_steps: int = 0
    eager_prefill_steps: Mapping[str, int] = field(default_factory=dict)


class StepClock:
    """Times steps from the CPU's side: a decode step's time is what passed since the step before it was done."""

    def __init__(self) -> None:
        self.decode_steps = 0
        self.decode_rows = 0
        self.loop_steps = 0
        self.decode_seconds = 0.0
        self.busy_seconds = 0.0
        self._last = 0.0

    def starting(self, idle: bool) -> None:
        """A step, or a loop, is about to be launched; ``idle`` says that no other is under way."""
        if idle:
            self._last = time.perf_counter()

    def launched(self, plan: PrefillPlan | DecodePlan, step: LaunchedStep | RunningLoop) -> None:
        """A step, or a loop, was launched. On a CPU that is when a step has been computed."""
        if isinstance(plan, DecodePlan) and isinstance(step, LaunchedStep):
            self.decode_steps += 1
            self.decode_rows += len(plan.requests)

    def arrived(self, launched: LaunchedStep) -> None:
        """A step has been read back."""
        passed = self._pass()
        if not launched.is_prefill:
            self.decode_seconds += passed

    def looped(self, steps: int, rows: int) -> None:
        """``steps`` steps of a loop have arrived, with ``rows`` tokens together."""
        if steps:
            self.decode_seconds += self._pass()
            self.decode_steps += steps
            self.loop_steps += steps
            self.decode_rows += rows

    def _pass(self) -> float:
        now = time.perf_counter()
        passed, self._last = now - self._last, now
        self.busy_seconds += passed
        return passed

    def stats(
        self, launch_mode: str, runner: ModelRunner, scheduler: Scheduler, tokens: int, driver: LoopDriver
    ) -> EngineStats:
        """The counts so far, with the runner's, the scheduler's and the loops'."""
        prefix, launches = scheduler.pool.counters, runner.decode_launches + runner.loops.launches
        counters = [each.counters for each in runner.runners.values()]
        rungs: dict[int, int] = {}
        eager: dict[str, int] = dict(runner.eager_steps)
        again: dict[str, int] = {}
        for counter in counters:
            for size, count in (*counter.replays.items(), *counter.repeats.items()):
                rungs[size] = rungs.get(size, 0) + count
            for reason, count in counter.eager_steps.items():
                eager[reason] = eager.get(reason, 0) + count
        recorders = [each.counters for each in runner.all_runners]
        for counter in recorders:
            for reason, count in counter.recaptures.items():
                again[reason] = again.get(reason, 0) + count
        rows = sum(counter.rows for counter in counters)
        padded = sum(counter.padded_rows for counter in counters)
        return EngineStats(
            launch_mode=launch_mode,
            cpu_calls_per_token=(runner.device_calls - runner.prefill_calls) / max(self.decode_rows, 1),
            ms_per_token=1e3 * self.decode_seconds / max(self.decode_steps, 1),
            tokens_per_second=tokens / self.busy_seconds if self.busy_seconds else 0.0,
            padding_waste=padded / max(rows + padded, 1),
            padded_rows=padded,
            rungs=dict(sorted(rungs.items())),
            prefill_steps=runner.prefill_steps,
            decode_steps=self.decode_steps,
            prefill_tokens=runner.prefill_tokens,
            decoded_tokens=self.decode_rows,
            eager_steps=eager,
            recaptures=again,
            verified_graphs=sum(counter.verified for counter in recorders),
            recorded_bytes=int(runner.pool.nbytes),
            recording_seconds=sum(counter.capture_seconds for counter in recorders),
            preemptions=scheduler.num_preemptions,
            prefix_queried_tokens=prefix.queried_tokens,
            prefix_hit_tokens=prefix.hit_tokens,
            prefix_evicted_blocks=prefix.evicted_blocks,
            decode_launches=launches,
            launches_per_token=launches / max(self.decode_rows, 1),
            loop_launches=runner.loops.launches,
            loop_steps=self.loop_steps,
            loop_ends=dict(driver.ends),
            single_steps=dict(driver.single_steps),
            loop_gap_ms=1e3 * statistics.median(driver.gaps) if driver.gaps else None,
            recorded_prefill_steps=runner.prefill.recorded_steps,
            eager_prefill_steps=dict(runner.prefill.eager_steps),
        )
