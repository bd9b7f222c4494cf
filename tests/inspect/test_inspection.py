"""An inspection as data: there and back, its ladder, its memory, its timelines and its trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import recordings
from hypothesis import given
from hypothesis import strategies as st

from mainspring.graphs import GraphError, Ladder, Recording, Span
from mainspring.inspect import Event, Inspection, Lane, Timeline, compare_recordings, compare_rungs, write_trace
from mainspring.inspect.book import GAP, group_owners, memory_class, owners, regions
from mainspring.inspect.observe import profiled_lanes
from mainspring.inspect.padding import padding_by_rung, padding_waste


def test_json_gives_back_what_was_written(tmp_path: Path) -> None:
    made = recordings.inspection()
    made.save(tmp_path / "a.json")
    read = Inspection.load(tmp_path / "a.json")
    assert read == made
    assert Recording.load(tmp_path / "a.json") == made.recording  # the file is a recording, too


def test_a_recording_alone_can_be_shown(tmp_path: Path) -> None:
    recordings.inspection().recording.save(tmp_path / "a.json")
    read = Inspection.load(tmp_path / "a.json")
    assert (read.audits, read.timelines, read.title) == ({}, (), "decode")
    assert "recording alone" in read.notes[0]


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"rungs": 3}', '{"rungs": [], "inspection": {"audits": {"a": {"x": 1}}}}']
)
def test_a_file_that_is_something_else_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(GraphError, match="a.json"):
        Inspection.load(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("about", {"model": 3}, "Inspection.about"),
        ("notes", "text", "Inspection.notes"),
        ("estimates", {"expected": "x"}, "Estimates.expected"),
        ("audits", {"decode": {"rungs": None}}, "AuditReport.rungs is None"),
        ("timelines", [{"mode": "eager", "lanes": [{"events": [["k", "0", 1]]}]}], "Event.start is '0'"),
    ],
)
def test_a_part_that_holds_something_else_is_named(key: str, value: Any, told: str) -> None:
    data = recordings.inspection(sizes=(1,), layers=1).as_dict()
    data["inspection"][key] = value
    with pytest.raises(GraphError, match=told):
        Inspection.from_json(json.dumps(data))


@given(st.sets(st.integers(1, 70), min_size=1, max_size=8))
def test_padding_is_what_the_ladder_pads(sizes: set[int]) -> None:
    ladder, waste = Ladder(sorted(sizes)), padding_waste(sorted(sizes))
    assert len(waste) == ladder.top
    for rows, share in enumerate(waste, start=1):
        assert share * ladder.rung_for(rows) == pytest.approx(ladder.rung_for(rows) - rows)
    by_rung = padding_by_rung(sorted(sizes))
    assert [each.size for each in by_rung] == sorted(sizes)
    assert sum(each.mean * (each.size - each.first + 1) for each in by_rung) == pytest.approx(sum(waste))


def test_owners_of_all_layers_are_one_group_and_uses_are_those_of_the_largest_rung() -> None:
    groups = {group.pattern: group for group in group_owners(owners(recordings.inspection().recording))}
    weights = groups["model.layers.N.qkv.weight"]
    assert [owner.name for owner in weights.owners] == [f"model.layers.{at}.qkv.weight" for at in range(4)]
    assert weights.nbytes == 4 * 0xF00
    assert groups["graph pool"].operations == 16
    assert groups["logits"].owners[0].rungs == 4


def test_a_region_ends_where_many_addresses_are_unused() -> None:
    near, far = Span("b", "buffer", 100 + GAP - 1, 10), Span("c", "buffer", 3 * GAP, 5)
    found = regions([far, Span("a", "buffer", 0, 100), near, Span("inside", "pool", 10, 5)])
    assert [[span.owner for span in region.spans] for region in found] == [["a", "inside", "b"], ["c"]]
    assert [(region.start, region.end) for region in found] == [(0, 109 + GAP), (3 * GAP, 3 * GAP + 5)]


def test_memory_is_told_apart_by_what_it_holds() -> None:
    seen = [("a.weight", "buffer"), ("kv_cache", "buffer"), ("seats", "buffer"), ("x", "opaque"), ("y", "freed")]
    assert [memory_class(*each) for each in seen] == ["weights", "kv", "buffers", "weights", "bad"]


def test_gaps_are_the_times_in_which_no_lane_of_the_device_runs() -> None:
    one = Lane("GPU stream 1", True, (Event("a", 0, 10), Event("b", 15, 10)))
    two = Lane("GPU stream 2", True, (Event("c", 8, 4), Event("d", 40, 5)))
    calls = Lane("CPU", False, (Event("launch", 26, 2),))
    timeline = Timeline("graph", 1, 1, 1, "clock", (one, two, calls))
    assert [(gap.start, gap.duration, gap.after, gap.before) for gap in timeline.gaps()] == [
        (12, 3, "c", "b"),
        (25, 15, "b", "d"),
    ]
    assert (timeline.step_us, timeline.idle_us, timeline.operations, timeline.calls) == (45, 18, 4, 1)


def test_a_trace_has_every_event_under_its_mode_and_lane(tmp_path: Path) -> None:
    write_trace(recordings.inspection(), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    titles = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [title.split()[0] for title in titles.values()] == ["eager", "graph", "loop"]
    timed = [event for event in events if event["ph"] == "X"]
    assert len(timed) == 6 + 6 + 6 + 2
    assert {"ts", "dur", "pid", "tid", "name"} <= timed[0].keys()


def mark(step: int, ts: float, dur: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": f"mainspring step {step}", "ts": ts, "dur": dur, "tid": 1}


def test_kernels_belong_to_the_step_that_launched_them_however_late_they_run() -> None:
    def event(cat: str, name: str, ts: float, dur: float, correlation: int) -> dict[str, Any]:
        return {
            "ph": "X",
            "cat": cat,
            "name": name,
            "ts": ts,
            "dur": dur,
            "tid": 1,
            "args": {"correlation": correlation},
        }

    trace = [
        mark(0, 1000, 10),
        mark(1, 1010, 10),
        event("cuda_runtime", "cudaGraphLaunch", 1002, 3, 1),
        event("cuda_driver", "cuLaunchKernelEx", 1012, 3, 2),
        event("cuda_runtime", "cudaDeviceSynchronize", 1020, 99, 3),
        event("kernel", "first", 1015, 20, 1),
        event("kernel", "second", 1040, 20, 1),
        event("kernel", "third", 1065, 5, 2),
        event("kernel", "of something else", 1070, 5, 9),
        {"ph": "X", "cat": "gpu_user_annotation", "name": "mainspring step 0", "ts": 1015, "dur": 45, "tid": 7},
        {"ph": "M", "name": "process_name"},
    ]
    gpu, calls = profiled_lanes(trace, on_gpu=True)
    assert [(each.name, each.start, each.step) for each in gpu.events] == [
        ("first", 15, 0),
        ("second", 40, 0),
        ("third", 65, 1),
    ]
    assert [(each.name, each.step) for each in calls.events] == [("cudaGraphLaunch", 0), ("cuLaunchKernelEx", 1)]
    assert (gpu.device, calls.device) == (True, False)


def test_on_a_cpu_the_outermost_operations_count_once() -> None:
    def event(name: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
        return {"ph": "X", "cat": "cpu_op", "name": name, "ts": ts, "dur": dur, "tid": tid}

    trace = [
        mark(0, 1000, 50),
        event("before", 900, 10),
        event("inner", 1012, 3),
        event("outer", 1010, 20),
        event("next", 1040, 5),
        event("of another thread", 1032, 3, tid=2),
    ]
    [lane] = profiled_lanes(trace, on_gpu=False)
    assert [(each.name, each.start, each.step) for each in lane.events] == [("outer", 10, 0), ("next", 40, 0)]


def test_rungs_differ_in_grids_but_not_in_their_own_rows() -> None:
    diff = compare_rungs(recordings.rung(1), recordings.rung(8))
    assert (diff.same, len(diff.changes)) == (6, 12)
    grids = {group.name: group.fields for group in diff.groups()}
    assert grids["qkv_kernel"] == (("grid", "8 x 1 x 1", "64 x 1 x 1"),)
    assert compare_rungs(recordings.rung(8), recordings.rung(8)).equal


def test_a_kernel_that_came_and_owners_that_went_are_told() -> None:
    a, b = recordings.inspection(), recordings.inspection(layers=3)
    diffs, only_a, only_b = compare_recordings(a.recording, b.recording)
    assert (len(diffs), only_a, only_b) == (4, [], [])
    assert {change.what for change in diffs[0].changes} == {"removed"}
    assert diffs[0].owners_removed == tuple(f"model.layers.3.{part}" for part in sorted(recordings.PER_LAYER))
    other = Recording((recordings.rung(3),))
    assert compare_recordings(a.recording, other)[1:] == (
        [f"decode.plain[{size}]" for size in (8, 4, 2, 1)],
        ["decode.plain[3]"],
    )
