"""The picture of the same tokens in each launch mode: what it says is what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring import LLM, SamplingParams
from mainspring.inspect.picture import PLOT, _columns, figure_text, render_picture
from mainspring.inspect.same_tokens import ModeTimeline, watch_tokens
from mainspring.inspect.timeline import Event, Lane, Timeline

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "timeline_picture.py"
IMAGES = SCRIPT.parents[1] / "docs" / "images"
SVG = "{http://www.w3.org/2000/svg}"
MODES = ["eager", "graph", "loop"]
ABOUT = {
    "model": "<A & B>",
    "dtype": "float32",
    "prompt_tokens": 8,
    "device": "a device",
    "commit": "abc",
    "date": "2026-01-02",
}


def made(mode: str, events: list[tuple[float, float, int]], whole_steps: bool = False) -> ModeTimeline:
    lane = Lane("device", True, tuple(Event("k", start, duration, step) for start, duration, step in events))
    steps = 1 + max(step for *_, step in events)
    return ModeTimeline(
        Timeline(mode, 1, 1, steps, "a clock", (lane,), whole_steps=whole_steps), tuple(range(steps)), 0.5, 3.0
    )


EAGER = made("eager", [(0, 10, 0), (20, 10, 0), (25, 15, 0), (100, 10, 1), (113, 7, 1)])
LOOP = made("loop", [(0, 30, 0), (30, 30, 1)], whole_steps=True)


def run_script(*arguments: object) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def lanes(svg: ET.Element) -> list[tuple[str, dict[str, float]]]:
    """Mode of each lane, and the figures that are written in it."""
    return [
        (
            (group.get("class") or "").removeprefix("lane "),
            {str(each.get("data-figure")): float(each.text or "") for each in group.iter(f"{SVG}tspan")},
        )
        for group in svg.iter(f"{SVG}g")
        if (group.get("class") or "").startswith("lane ")
    ]


def check_figures(found: dict[str, float], mode: str, measured: dict[str, Any]) -> None:
    expected = {name for name, value in measured.items() if value is not None}
    expected -= {"gaps", "gaps_in_steps_seen", "busy_ms_per_token"}
    if not measured["gaps_in_steps_seen"]:
        expected -= {"ms_per_token_unwatched"}
    assert found.keys() == {f"{mode}.{name}" for name in expected}
    for name, value in found.items():
        exact = measured[name.removeprefix(f"{mode}.")] * (100 if name.endswith("busy_share") else 1)
        assert value == pytest.approx(exact, rel=6e-3), name


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_picture_shows_what_was_measured(tiny_folder: Path, tmp_path: Path, device: str) -> None:
    run_script(tiny_folder, "--tokens", 5, "--prompt-tokens", 8, "--device", device, "--out", tmp_path)
    data = json.loads((tmp_path / "timeline.json").read_text())
    text = (tmp_path / "timeline.svg").read_text()
    assert [mode["mode"] for mode in data["modes"]] == MODES
    assert data["command"].startswith("python benchmarks/timeline_picture.py ")
    assert {"device", "date", "commit", "versions"} <= data.keys()
    assert len(data["modes"][0]["token_ids"]) == 5
    for mode in data["modes"]:
        assert mode["token_ids"] == data["modes"][0]["token_ids"]
        assert {step for *_, step in mode["events"]} == set(range(5))
        assert mode["figures"]["busy_share"] <= 1
    eager, graph, loop = (mode["figures"] for mode in data["modes"])
    assert eager["launches_per_token"] > graph["launches_per_token"] > loop["launches_per_token"] > 0
    assert len(data["modes"][2]["events"]) == 5 and loop["gaps"] == 0
    shown = lanes(ET.fromstring(text))
    assert [mode for mode, _ in shown] == MODES * 2  # all tokens, and enlarged
    for (mode, found), measured in zip(shown, (eager, graph, loop), strict=False):
        check_figures(found, mode, measured)
    run_script("--redraw", tmp_path / "timeline.json", "--out", tmp_path / "again")
    assert (tmp_path / "again" / "timeline.svg").read_text() == text


def test_other_tokens_and_answers_that_are_too_long_are_refused(tiny_folder: Path) -> None:
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "enforce_eager": True}
    with (
        LLM(str(tiny_folder), seed=1, max_model_len=64, **options) as one,
        LLM(str(tiny_folder), seed=2, max_model_len=64, **options) as other,
    ):
        with pytest.raises(ValueError, match=r"8 \+ 67 tokens > max_model_len 64; watch fewer tokens"):
            watch_tokens([one.core], [5] * 8, 60)
        with pytest.raises(ValueError, match="they are to be the same"):
            watch_tokens([one.core, other.core], [5] * 8, 4)
        [found] = watch_tokens([one.core], [5] * 8, 4)
        answer = one.generate(
            {"prompt_token_ids": [5] * 8}, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        )
        assert list(found.token_ids) == answer[0].outputs[0].token_ids[4:]


def test_what_overlaps_is_busy_once_and_gaps_are_measured_between() -> None:
    figures = EAGER.figures()
    assert EAGER.busy() == [(0, 10), (20, 40), (100, 110), (113, 120)]
    assert EAGER.begins() == [0, 100]
    assert (figures.gaps, figures.median_gap_us, figures.largest_gap_us) == (3, 10, 60)
    assert figures.ms_per_token == pytest.approx(0.06)
    assert figures.busy_ms_per_token == pytest.approx(0.0235)
    assert figures.busy_share == pytest.approx(47 / 120)
    assert (figures.launches_per_token, figures.ms_per_token_unwatched) == (3, 0.5)


def test_steps_that_touch_leave_no_gap_whatever_is_rounded() -> None:
    steps = made("loop", [(round(610.4 * at, 3), 610.4, at) for at in range(40)], whole_steps=True)
    assert steps.figures().gaps == 0
    assert steps.figures().busy_share == 1
    assert steps.figures().median_gap_us is None


def test_json_gives_back_what_was_measured() -> None:
    for mode in (EAGER, LOOP):
        read = ModeTimeline.from_dict(json.loads(json.dumps(mode.as_dict())))
        assert read == mode
        assert read.figures() == mode.figures()


def test_the_picture_needs_nothing_else_and_shows_names_as_they_are() -> None:
    text = render_picture([EAGER, LOOP], ABOUT)
    root = ET.fromstring(text)
    assert "<A & B>, float32" in "".join(root.itertext())
    assert "prefers-color-scheme: dark" in text
    assert not any(word in text.replace(SVG[1:-1], "") for word in ("http", "href", "url(", "<script"))
    bars = [group for group in root.iter(f"{SVG}g") if group.get("class") == "lane loop"]
    [bar] = [each for each in bars[0].iter(f"{SVG}rect") if each.get("class") == "busy"]
    assert float(bar.get("width") or 0) == pytest.approx(PLOT / 2)  # one time axis: the loop is twice as fast


@pytest.mark.skipif(not (IMAGES / "timeline.json").exists(), reason="the docs have no such picture yet")
def test_the_docs_show_a_gpu_and_what_their_json_holds(tmp_path: Path) -> None:
    data = json.loads((IMAGES / "timeline.json").read_text())
    assert "NVIDIA" in data["device"] and data["versions"]["driver"]
    assert not data["commit"].endswith("-dirty")
    run_script("--redraw", IMAGES / "timeline.json", "--out", tmp_path)
    assert (tmp_path / "timeline.svg").read_text() == (IMAGES / "timeline.svg").read_text()


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0.01, 50)), min_size=1, max_size=30), st.floats(0, 100))
def test_columns_are_as_busy_as_the_time_that_they_stand_for(pairs: list[tuple[float, float]], start: float) -> None:
    busy, at = [], 0.0
    for gap, duration in pairs:
        busy.append((at + gap, at + gap + duration))
        at += gap + duration
    length = 500.0
    seen = sum(max(min(end, start + length) - max(begin, start), 0) for begin, end in busy)
    columns = _columns(busy, start, length)
    drawn = sum(width * share for _, width, share in columns) * length / PLOT
    assert drawn == pytest.approx(seen, abs=length / PLOT * 4 * len(pairs) / 40 + 1e-6)
    assert all(left + width <= PLOT + 1e-6 and 0 < share <= 1 for left, width, share in columns)


def test_figures_keep_three_digits() -> None:
    assert [figure_text(value) for value in (0, 0.61234, 9.876, 95.62, 8554.7, 0.0385)] == [
        "0",
        "0.612",
        "9.88",
        "95.6",
        "8555",
        "0.0385",
    ]
