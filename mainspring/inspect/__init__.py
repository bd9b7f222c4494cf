"""Reports of what was recorded: in the terminal, as JSON, as one HTML page, as a trace.

with LLM("smollm2") as llm:
    inspection = inspect_engine(llm)
Path("report.html").write_text(render_page([inspection]), encoding="utf-8")
"""

from __future__ import annotations

from mainspring.inspect.collect import inspect_engine
from mainspring.inspect.diff import RungDiff, compare_recordings, compare_rungs
from mainspring.inspect.inspection import Estimates, Inspection
from mainspring.inspect.page import render_page
from mainspring.inspect.timeline import Event, Lane, Timeline
from mainspring.inspect.trace import write_trace

__all__ = [
    "Estimates",
    "Event",
    "Inspection",
    "Lane",
    "RungDiff",
    "Timeline",
    "compare_recordings",
    "compare_rungs",
    "inspect_engine",
    "render_page",
    "write_trace",
]
