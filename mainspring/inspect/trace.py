"""Timelines as a trace that Chrome's tracing page and Perfetto open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mainspring.inspect.inspection import Inspection

__all__ = ["trace_events", "write_trace"]


def trace_events(inspection: Inspection) -> dict[str, Any]:
    """The trace as plain data, in the Trace Event Format: a process for each launch mode, a thread for each lane."""
    events: list[dict[str, Any]] = []
    for pid, timeline in enumerate(inspection.timelines, start=1):
        about = {"pid": pid, "tid": 0, "ph": "M"}
        title = f"{timeline.mode} ({timeline.rows} rows on rung {timeline.rung}, {timeline.clock})"
        events.append({**about, "name": "process_name", "args": {"name": title}})
        events.append({**about, "name": "process_sort_index", "args": {"sort_index": pid}})
        for tid, lane in enumerate(timeline.lanes, start=1):
            events.append({**about, "tid": tid, "name": "thread_name", "args": {"name": lane.name}})
            events += [
                {
                    "ph": "X",
                    "pid": pid,
                    "tid": tid,
                    "name": event.name,
                    "ts": round(event.start, 3),
                    "dur": round(event.duration, 3),
                    "cat": "device" if lane.device else "calls",
                    "args": {"step": event.step},
                }
                for event in lane.events
            ]
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": dict(inspection.about)}


def write_trace(inspection: Inspection, path: str | Path) -> None:
    """Write the trace to a file.

    Raises:
        ValueError: there is no timeline.
    """
    if not inspection.timelines:
        raise ValueError("there is no timeline to make a trace of; inspect a model with --steps of at least 1")
    Path(path).write_text(json.dumps(trace_events(inspection)), encoding="utf-8")
