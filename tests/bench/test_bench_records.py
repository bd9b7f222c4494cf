"""Records: their fields, and the list that they are added to."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path

import pytest
import torch

from mainspring.bench import records
from mainspring.bench.records import append_records, as_record, default_path, provenance

CPU = torch.device("cpu")


def test_records_are_added_to_those_that_are_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    append_records(path, [{"a": 1}])
    append_records(path, [{"a": 2}, {"a": 3}])
    assert json.loads(path.read_text()) == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert [each.name for each in path.parent.iterdir()] == ["results.json"]


@pytest.mark.parametrize(("content", "complaint"), [('{"a": 1}', "holds a dict"), ("[1, 2", "is not JSON")])
def test_a_file_of_another_kind_is_left_as_it_is(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=complaint):
        append_records(path, [{"a": 1}])
    assert path.read_text() == content


def test_what_is_not_json_is_refused_and_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    append_records(path, [{"a": 1}])
    with pytest.raises(ValueError, match="JSON"):
        append_records(path, [{"a": float("nan")}])
    assert json.loads(path.read_text()) == [{"a": 1}]
    assert len(list(tmp_path.iterdir())) == 1


def test_provenance_says_when_where_and_with_what() -> None:
    origin = provenance(CPU)
    when = datetime.fromisoformat(origin.date)
    assert when.utcoffset() is not None and not when.utcoffset()
    assert origin.command.startswith("mainspring ")
    assert origin.device.startswith("CPU ")
    assert origin.versions["torch"] == torch.__version__
    assert {"mainspring", "torch", "triton", "transformers", "cuda", "driver"} <= set(origin.versions)


def test_commit_is_of_this_checkout_or_as_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MAINSPRING_COMMIT", raising=False)
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?|unknown", records.commit())
    monkeypatch.setenv("MAINSPRING_COMMIT", "abc123")
    assert records.commit() == "abc123"
    monkeypatch.delenv("MAINSPRING_COMMIT")
    # An installed copy must not claim the commit of whatever repository it happens to lie in.
    monkeypatch.setattr(records, "__file__", str(tmp_path / "site-packages" / "mainspring" / "bench" / "records.py"))
    assert records.commit() == "unknown"


def test_default_file_is_named_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "device_name", lambda device: "NVIDIA H200")
    assert default_path(CPU) == Path("benchmarks/results/h200.json")
    monkeypatch.setattr(records, "device_name", lambda device: "CPU Some (R) Model, 2 threads")
    assert default_path(CPU) == Path("benchmarks/results/cpu-some-r-model-2-threads.json")


def test_extra_figures_lie_beside_the_others() -> None:
    class Measured:
        def figures(self) -> dict[str, object]:
            return {"batch": 1, "extra": {"kernels": []}}

    record = as_record(provenance(CPU), "latency", Measured())
    assert (record["kind"], record["batch"], record["kernels"]) == ("latency", 1, [])
    assert "extra" not in record
