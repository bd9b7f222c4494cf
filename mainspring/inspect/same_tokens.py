"""The same tokens of one request, decoded in each launch mode: when the device was busy, and when it waited."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mainspring.inspect.observe import PROFILER, loop_clock, profiled, stamped_loops
from mainspring.inspect.timeline import Event, Lane, Timeline

if TYPE_CHECKING:
    from mainspring.engine.answers import Answer
    from mainspring.engine.core import EngineCore

__all__ = ["FIRST_TOKEN", "Figures", "ModeTimeline", "watch_tokens"]

#: Number of the first token that is watched, counted from 0: what comes before is the start of the answer.
FIRST_TOKEN = 4
#: Tokens behind those that are watched, so that the last of them is no end of an answer.
TOKENS_BEHIND = 3
#: Decimal places that are kept of a time in microseconds.
DIGITS = 3


@dataclass(frozen=True)
class Figures:
    """What was measured of one launch mode.

    Attributes:
        ms_per_token: from the beginning of the first token's step to the end of the last one's, as drawn.
        ms_per_token_unwatched: the same tokens without a profiler, as they arrive at the CPU; in a loop, which no
            profiler slows down, as drawn.
        busy_ms_per_token: milliseconds of a token in which something ran on the device.
        busy_share: that over `ms_per_token`, 0 to 1.
        gaps: times in which nothing ran, in all.
        median_gap_us: of one of them in microseconds; None where there is none.
        largest_gap_us: of them.
        launches_per_token: kernels, recordings or loops that the CPU launched; on a CPU, where nothing is launched,
            operations that it called.
        gaps_in_steps_seen: False where only whole steps are timed: a step counts as busy from begin to end.
    """

    ms_per_token: float
    ms_per_token_unwatched: float
    busy_ms_per_token: float
    busy_share: float
    gaps: int
    median_gap_us: float | None
    largest_gap_us: float | None
    launches_per_token: float
    gaps_in_steps_seen: bool


@dataclass(frozen=True)
class ModeTimeline:
    """One launch mode's timeline of the watched tokens, zero being its first operation.

    Attributes:
        timeline: an event's step is the number of its token, from 0.
        token_ids: the tokens.
        unwatched_ms: milliseconds of a token without a profiler.
        launches: by the CPU for a token.
    """

    timeline: Timeline
    token_ids: tuple[int, ...]
    unwatched_ms: float
    launches: float

    @property
    def mode(self) -> str:
        """The launch mode."""
        return self.timeline.mode

    def figures(self) -> Figures:
        """What the timeline shows, in numbers."""
        timeline, gaps = self.timeline, [gap.duration for gap in self.timeline.gaps()]
        span = timeline.span[1] - timeline.span[0]
        idle = sum(gaps)
        return Figures(
            ms_per_token=1e-3 * timeline.step_us,
            ms_per_token_unwatched=self.unwatched_ms,
            busy_ms_per_token=1e-3 * (span - idle) / timeline.steps,
            busy_share=1 - idle / span,
            gaps=len(gaps),
            median_gap_us=statistics.median(gaps) if gaps else None,
            largest_gap_us=max(gaps, default=None),
            launches_per_token=self.launches,
            gaps_in_steps_seen=not timeline.whole_steps,
        )

    def busy(self) -> list[tuple[float, float]]:
        """Begin and end, in microseconds, of each time in which something ran, without overlaps."""
        start, end = self.timeline.span
        edges = [start]
        for gap in self.timeline.gaps():
            edges += [gap.start, gap.start + gap.duration]
        edges.append(end)
        return list(zip(edges[::2], edges[1::2], strict=True))

    def begins(self) -> list[float]:
        """Microseconds at which the first operation of each token began."""
        first: dict[int, float] = {}
        for event in self.timeline.device_events:
            first.setdefault(event.step, event.start)
        return [first[step] for step in sorted(first)]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; an event of the device is [index into names, start, duration, token]."""
        events = self.timeline.device_events
        names = list(dict.fromkeys(event.name for event in events))
        index = {name: at for at, name in enumerate(names)}
        return {
            "mode": self.mode,
            "clock": self.timeline.clock,
            "steps": self.timeline.steps,
            "whole_steps": self.timeline.whole_steps,
            "token_ids": list(self.token_ids),
            "unwatched_ms": self.unwatched_ms,
            "launches": self.launches,
            "figures": asdict(self.figures()),
            "names": names,
            "events": [[index[e.name], e.start, e.duration, e.step] for e in events],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModeTimeline:
        """From `as_dict`; the figures are made again."""
        names = data["names"]
        events = tuple(Event(names[name], start, duration, step) for name, start, duration, step in data["events"])
        return cls(
            _timeline(data["mode"], data["clock"], data["steps"], events, data["whole_steps"]),
            tuple(data["token_ids"]),
            data["unwatched_ms"],
            data["launches"],
        )


def watch_tokens(cores: Sequence[EngineCore], prompt: Sequence[int], tokens: int) -> list[ModeTimeline]:
    """Let each engine answer `prompt` alone, greedily, and watch `tokens` tokens of the answer from `FIRST_TOKEN` on.

    Engines are of different launch modes, with the same weights and no request under way.

    Raises:
        ValueError: the context is too long for an engine, a loop was not one, or the tokens are not the same.
    """
    total = FIRST_TOKEN + tokens + TOKENS_BEHIND
    for core in cores:
        if len(prompt) + total > core.limits.max_model_len:
            raise ValueError(
                f"{len(prompt)} + {total} tokens > max_model_len {core.limits.max_model_len}; watch fewer tokens"
            )
    for core in cores:
        _arrivals(core, prompt, total)  # warms up
    # All that is timed without the profiler comes before it: it may stay in the driver's way.
    arrivals = [_arrivals(core, prompt, total) for core in cores]
    found = {
        index: _watch_loop(core, prompt, tokens, total)
        for index, core in enumerate(cores)
        if core.launch_mode == "loop"
    }
    for index, core in enumerate(cores):
        if index not in found:
            unwatched = (arrivals[index][FIRST_TOKEN + tokens - 1] - arrivals[index][FIRST_TOKEN - 1]) / tokens
            found[index] = _watch_steps(core, prompt, tokens, total, 1e3 * unwatched)
    modes = [found[index] for index in range(len(cores))]
    for mode in modes:
        if mode.token_ids != modes[0].token_ids:
            raise ValueError(
                f"{mode.mode} made the tokens {mode.token_ids}, {modes[0].mode} made {modes[0].token_ids}; they are to "
                "be the same"
            )
    return modes


def _watch_steps(core: EngineCore, prompt: Sequence[int], tokens: int, total: int, unwatched_ms: float) -> ModeTimeline:
    """Steps that the CPU launches, by the profiler."""
    with _answering(core, prompt, total) as answer:
        request = answer.choices[0].request
        while len(request.output_token_ids) + len(core.pipeline.in_flight) < FIRST_TOKEN - 1:
            core.step()
        profiled(core, 1)  # the profiler's own start-up goes into this step
        lanes = profiled(core, tokens)
        while core.has_work():
            core.step()
        ids = tuple(request.output_token_ids[FIRST_TOKEN : FIRST_TOKEN + tokens])
    [events] = [lane.events for lane in lanes if lane.device]
    calls = [event for lane in lanes if not lane.device for event in lane.events if "Launch" in event.name]
    launches = len(calls) / tokens if core.limits.device.type == "cuda" else _cpu_launches(core, events, tokens)
    return ModeTimeline(_timeline(core.launch_mode, PROFILER, tokens, events), ids, unwatched_ms, launches)


def _cpu_launches(core: EngineCore, events: Sequence[Event], tokens: int) -> float:
    return len(events) / tokens if core.launch_mode == "eager" else core.stats().launches_per_token


def _watch_loop(core: EngineCore, prompt: Sequence[int], tokens: int, total: int) -> ModeTimeline:
    before = core.stats()
    with stamped_loops(core) as stamps, _answering(core, prompt, total) as answer:
        while core.has_work():
            core.step()
        ids = tuple(answer.choices[0].request.output_token_ids[FIRST_TOKEN : FIRST_TOKEN + tokens])
    after = core.stats()
    steps = [
        (int(begin), int(end)) for loop in stamps for begin, end in zip(loop[:-1], loop[1:], strict=True)
    ]  # the step that makes token 1 is the first: token 0 is the prompt's
    if len(steps) != total - 1:
        raise ValueError(
            f"{len(steps)} of {total - 1} steps ran in loops, the others alone ({dict(after.single_steps)}); give the "
            "engine more KV blocks"
        )
    events = tuple(
        Event("step", 1e-3 * (begin - steps[FIRST_TOKEN - 1][0]), 1e-3 * (end - begin), at)
        for at, (begin, end) in enumerate(steps[FIRST_TOKEN - 1 : FIRST_TOKEN - 1 + tokens])
    )
    timeline = _timeline("loop", loop_clock(core.limits.device), tokens, events, whole_steps=True)
    launches = (after.decode_launches - before.decode_launches) / (after.decoded_tokens - before.decoded_tokens)
    return ModeTimeline(timeline, ids, 1e-3 * timeline.step_us, launches)


def _timeline(mode: str, clock: str, steps: int, events: Sequence[Event], whole_steps: bool = False) -> Timeline:
    """With its first operation at 0."""
    zero = min((event.start for event in events), default=0.0)
    moved = tuple(
        Event(event.name, round(event.start - zero, DIGITS), round(event.duration, DIGITS), event.step)
        for event in events
    )
    return Timeline(mode, 1, 1, steps, clock, (Lane("device", True, moved),), whole_steps=whole_steps)


def _arrivals(core: EngineCore, prompt: Sequence[int], total: int) -> list[float]:
    """When each token of the answer came, in seconds."""
    arrivals: list[float] = []
    with _answering(core, prompt, total) as answer:
        while core.has_work():
            core.step()
            new = len(answer.choices[0].request.output_token_ids) - len(arrivals)
            arrivals += [time.perf_counter()] * new
    return arrivals


@contextmanager
def _answering(core: EngineCore, prompt: Sequence[int], total: int) -> Iterator[Answer]:
    from mainspring import SamplingParams

    params = SamplingParams(max_tokens=total, temperature=0.0, ignore_eos=True, detokenize=False)
    answer = core.add("watched", prompt, params)
    try:
        yield answer
    finally:
        core.abort(answer)
        while core.has_work():
            core.step()
