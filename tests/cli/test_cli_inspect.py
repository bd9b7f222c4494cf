"""``mainspring inspect``: tables, files, differences, and errors that say the way out."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mainspring.cli.app import app
from mainspring.graphs import CpuGraph, Recording
from mainspring.inspect import Inspection

sys.path.append(str(Path(__file__).parents[1] / "inspect"))
import recordings  # noqa: E402


def run(*words: str | Path) -> Any:
    return CliRunner().invoke(app, ["inspect", *map(str, words)], env={"NO_COLOR": "1"})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.json"
    recordings.inspection(findings=False).save(path)
    return path


def test_a_model_is_recorded_and_shown_and_everything_is_written(tiny_folder: Path, tmp_path: Path) -> None:
    files = [f"--{kind}={tmp_path / kind}" for kind in ("json", "html", "trace")]
    options = ["--load-format=dummy", "--device=cpu", "--max-num-seqs=4", "--kv-cache-memory=4MiB", "--steps=1"]
    done = run(tiny_folder, *options, *files)
    assert done.exit_code == 0, done.output
    for shown in (
        "Ladder of decode.plain",
        "model.layers.1",
        "kv_cache",
        "recordings, expected",
        "nothing found in 3 rungs",
    ):
        assert shown in done.stdout
    assert re.search(r"│ +4 │ +3-4 │ +25 % │ +12 %", done.stdout)
    assert re.search(r"│ eager .*torch.profiler", done.stdout) and re.search(r"│ graph .*torch.profiler", done.stdout)
    assert len(Recording.load(tmp_path / "json").rungs) == 3
    assert (tmp_path / "html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert json.loads((tmp_path / "trace").read_text())["traceEvents"]


def test_a_file_is_shown_as_the_model_was(file: Path, tmp_path: Path) -> None:
    done = run(file, "--json", tmp_path / "b.json", "--html", tmp_path / "b.html")
    assert done.exit_code == 0, done.output
    assert Inspection.load(tmp_path / "b.json") == Inspection.load(file)
    assert "4 layers alike, 4 operations each" in done.stdout
    assert done.stdout.count("qkv_kernel") == 1
    assert run(file, "--unfold").stdout.count("qkv_kernel") == 4


def test_a_recording_of_one_graph_is_shown(tmp_path: Path) -> None:
    x = torch.zeros(2, 4)
    Recording.of(CpuGraph.capture(lambda: x.relu())).save(tmp_path / "graph.json")
    done = run(tmp_path / "graph.json")
    assert done.exit_code == 0, done.output
    assert "aten::relu" in done.stdout and "No audit" in done.stdout


def test_names_do_not_steer_the_terminal(file: Path) -> None:
    shown = run(file, "--unfold").stdout
    assert "\x1b" not in shown and "\u2028" not in shown
    assert "[red]" in shown  # nor are they markup


def test_json_on_the_output_is_json_alone(file: Path) -> None:
    done = run(file, "--json", "-")
    assert Inspection.from_json(done.stdout) == Inspection.load(file)


def test_findings_are_shown_and_make_the_exit_status_1(tmp_path: Path) -> None:
    recordings.inspection().save(tmp_path / "bad.json")
    done = run(tmp_path / "bad.json")
    assert done.exit_code == 1
    assert "1 finding in 4 rungs, 100 pointers, 7 addresses within structs; 11 words" in " ".join(done.stdout.split())
    assert "moved: " in done.stdout and "operation 17 sample_kernel" in done.stdout


def test_two_rungs_or_two_files_are_compared(file: Path, tmp_path: Path) -> None:
    done = run(file, "--diff", "--rung", "1,8")
    assert done.exit_code == 0, done.output
    assert "12 operations differ, 6 are the same" in done.stdout
    assert re.search(r"4 x │ #2 qkv_kernel +│ grid: 8 x 1 x 1 → 64 x 1 x 1", done.stdout)
    assert run(file, "--diff").stdout == done.stdout  # smallest and largest, if not told otherwise
    other = recordings.inspection(layers=3, sizes=(1, 16))
    other.save(tmp_path / "b.json")
    done = run("--diff", file, tmp_path / "b.json", "--html", tmp_path / "d.html", "--json", tmp_path / "d.json")
    assert "decode.plain[1]: 4 operations differ, 14 are the same" in done.stdout
    assert "owners - model.layers.N.down.weight" in done.stdout
    assert "only in" in done.stdout and "decode.plain[16]" in done.stdout
    [diff] = json.loads((tmp_path / "d.json").read_text())["diffs"]
    assert [change["what"] for change in diff["changes"]] == ["removed"] * 4
    assert "beside" in (tmp_path / "d.html").read_text(encoding="utf-8")
    assert "the same 18 operations and owners" in run("--diff", file, file).stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["{a}", "--rung", "3"], "no recording of a runner with 3 rows; there is"),
        (["{a}", "--rung", "1,2"], "give one, or --diff for two"),
        (["{a}", "{a}"], "2 models; give one, or use --diff"),
        (["{a}", "{a}", "{a}", "--diff"], "3 models; give one, or two .json files"),
        (["{a}", "smollm2", "--diff"], "'smollm2' is no .json file; write one with"),
        (["{a}", "--device", "cpu"], "--device is for a model that is recorded now"),
        (["{a}", "--diff", "--trace", "t"], "--trace writes the timeline; leave out --diff"),
        (["smollm2", "--steps", "0", "--trace", "t"], "leave out --steps 0"),
        (["tiny", "--model", "qwen3-0.6b"], "two models, 'tiny' and --model 'qwen3-0.6b'; give one"),
        (["missing.json"], "missing.json"),
        (["{a}", "missing.json", "--diff"], "missing.json"),
        (["{a}", "{text}", "--diff"], "is not JSON"),
        (["{a}", "{later}", "--diff"], "schema 2 is not known here"),
        (["{words}"], "RungRecording.size is 'x'"),
        (["{none}", "--diff"], "there are no rungs"),
        (["{one}", "--diff"], "nothing to compare it with"),
        (["{bare}", "--trace", "t"], "there is no timeline to make a trace of"),
    ],
)
def test_what_cannot_be_done_is_an_error_of_one_line(file: Path, tmp_path: Path, words: list[str], told: str) -> None:
    made = recordings.inspection(sizes=(2,))
    made.save(tmp_path / "one.json")
    dataclasses.replace(made, timelines=()).save(tmp_path / "bare.json")
    rung = {"size": "x", "operations": [], "addresses": [], "pool_bytes": 0, "capture_seconds": 0}
    wrong = {"text": "{", "later": '{"schema": 2, "rungs": []}', "none": '{"rungs": []}'}
    wrong["words"] = json.dumps({"rungs": [rung]})
    for name, text in wrong.items():
        (tmp_path / f"{name}.json").write_text(text, encoding="utf-8")
    paths = {f"{{{name}}}": tmp_path / f"{name}.json" for name in wrong}
    paths |= {"{a}": file, "{one}": tmp_path / "one.json", "{bare}": tmp_path / "bare.json"}
    done = run(*(paths.get(word, word) for word in words))
    assert done.exit_code in (1, 2)
    assert told in done.stderr and done.stderr.count("\n") == 1, done.stderr
