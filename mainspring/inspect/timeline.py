"""What ran when: a few decode steps in one launch mode, and the gaps between operations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mainspring.graphs.plain_data import make

__all__ = ["Event", "Gap", "Lane", "Timeline", "category"]

#: Microseconds below which a gap is none: times are kept to the nanosecond.
ROUNDING = 5e-4

_CATEGORIES = (
    ("wait", ("synchronize",)),
    ("attention", ("attention", "flash", "_decode_kernel", "sdpa")),
    ("product", ("gemv", "gemm", "linear", "matmul", "_mma", "skinny", "nvjet", "cutlass", "addmm", "::mm")),
    ("norm", ("norm", "rope", "silu", "embed")),
    ("copy", ("memcpy", "memset", "copy", "index")),
    ("launch", ("launch",)),
    ("step", ("step ",)),
)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took time.

    Attributes:
        name: of the operation, kernel or call.
        start: microseconds from the timeline's zero.
        duration: in microseconds.
        step: which of the timeline's steps it belongs to, from 0; -1 where that is not known.
    """

    name: str
    start: float
    duration: float
    step: int = -1

    @property
    def end(self) -> float:
        """Microseconds from the timeline's zero."""
        return self.start + self.duration


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of events, by start.

    Attributes:
        name: such as "GPU" or "CPU: calls".
        device: whether this is where the model's operations run.
        events: what ran.
    """

    name: str
    device: bool
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which the device ran nothing, in microseconds, between two operations."""

    start: float
    duration: float
    after: str
    before: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """A few steps in one launch mode.

    Attributes:
        mode: "eager", "graph" or "loop".
        rows: in the batch.
        rung: that served it.
        steps: how many there are.
        clock: who measured, such as "torch.profiler".
        lanes: what ran where.
        note: what else there is to know.
        whole_steps: the device's events are whole steps, so that gaps inside them are not seen.
    """

    mode: str
    rows: int
    rung: int
    steps: int
    clock: str
    lanes: tuple[Lane, ...]
    note: str = ""
    whole_steps: bool = False

    @property
    def device_events(self) -> list[Event]:
        """What ran on the device, by start."""
        return sorted((event for lane in self.lanes if lane.device for event in lane.events), key=lambda e: e.start)

    @property
    def span(self) -> tuple[float, float]:
        """First start and last end on the device, in microseconds; (0, 0) where nothing ran."""
        events = self.device_events
        return (events[0].start, max(event.end for event in events)) if events else (0.0, 0.0)

    @property
    def step_us(self) -> float:
        """Microseconds of a step: what passed from the first operation to the end of the last, over the steps."""
        start, end = self.span
        return (end - start) / self.steps if self.steps else 0.0

    @property
    def idle_us(self) -> float | None:
        """Microseconds of a step in which the device ran nothing; None where that is not seen."""
        if self.whole_steps or not self.steps:
            return None
        return sum(gap.duration for gap in self.gaps()) / self.steps

    @property
    def operations(self) -> float | None:
        """Operations on the device in a step; None where they are not seen."""
        return None if self.whole_steps or not self.steps else len(self.device_events) / self.steps

    @property
    def calls(self) -> float | None:
        """Calls of the CPU to the device in a step, or None where the device is the CPU, or nobody counted."""
        lanes = [lane for lane in self.lanes if not lane.device]
        return sum(len(lane.events) for lane in lanes) / self.steps if lanes and self.steps else None

    def gaps(self) -> list[Gap]:
        """All times between the first and the last operation in which the device ran nothing, by start."""
        found: list[Gap] = []
        end, latest = None, ""
        for event in self.device_events:
            if end is not None and event.start - end > ROUNDING:
                found.append(Gap(end, event.start - end, latest, event.name))
            if end is None or event.end > end:
                end, latest = event.end, event.name
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; an event is [name, start, duration, step]."""
        return {
            "mode": self.mode,
            "rows": self.rows,
            "rung": self.rung,
            "steps": self.steps,
            "clock": self.clock,
            "note": self.note,
            "whole_steps": self.whole_steps,
            "lanes": [
                {
                    "name": lane.name,
                    "device": lane.device,
                    "events": [[e.name, round(e.start, 3), round(e.duration, 3), e.step] for e in lane.events],
                }
                for lane in self.lanes
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Timeline:
        """From `as_dict`.

        Raises:
            KeyError, TypeError: `data` is something else.
        """
        names = [each.name for each in fields(Event)]
        lanes = []
        for lane in data["lanes"]:
            events = tuple(make(Event, dict(zip(names, event, strict=False))) for event in lane["events"])
            lanes.append(make(Lane, {**lane, "events": events}))
        return make(cls, {**data, "lanes": tuple(lanes)})


def category(name: str) -> str:
    """What kind of work a name stands for: product, attention, norm, copy, launch, step, wait or other."""
    lowered = name.lower()
    return next((kind for kind, words in _CATEGORIES if any(word in lowered for word in words)), "other")
