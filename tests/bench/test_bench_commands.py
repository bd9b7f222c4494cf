"""``mainspring bench`` from end to end, on a tiny model of random weights on the CPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

Bench = Callable[..., Result]
SMALL: tuple[object, ...] = ("--input-len", 6, "--output-len", 8, "--repeats", 1, "--device", "cpu")
FIELDS = {
    "device", "date", "commit", "versions", "command", "model", "batch", "context", "dtype", "launch_mode", "engine",
    "tpot_ms", "tpot_p99_ms", "floor_ms", "ratio", "tokens_per_second", "step_ms",
}  # fmt: skip


def read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())


def test_latency_leaves_one_record_for_each_batch_and_mode(run_bench: Bench, tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    arguments = ("latency", "--model", tiny_folder, "--batch", "1,3", "--launch-mode", "eager,graph", *SMALL)
    done = run_bench(*arguments, "--json", file)
    assert done.exit_code == 0, done.output
    found = read(file)
    assert [(each["launch_mode"], each["batch"]) for each in found] == [
        ("eager", 1), ("eager", 3), ("graph", 1), ("graph", 3)
    ]  # fmt: skip
    for record in found:
        assert set(record) >= FIELDS
        assert (record["engine"], record["model"], record["context"]) == ("mainspring", "tiny-qwen", 10)
        assert record["ratio"] == pytest.approx(record["tpot_ms"] / record["floor_ms"])
        assert record["floor_ms"] == pytest.approx(1e3 * record["step_read_bytes"] / record["read_bandwidth"])
        assert record["tokens_per_second"] == pytest.approx(1e3 * record["batch"] / record["tpot_ms"])
        assert record["tpot_p99_ms"] >= record["tpot_ms"] > 0
        assert (record["step_ms"] is None) == (record["launch_mode"] == "eager")
    run_bench(*arguments, "--json", file)
    assert len(read(file)) == 8
    assert "tiny-qwen" in done.output and "x floor" in done.output


def test_loops_are_measured_by_the_clock_of_the_device(run_bench: Bench, tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    arguments = ("latency", "--model", tiny_folder, "--batch", "1,2", "--launch-mode", "loop,graph", *SMALL)
    done = run_bench(*arguments, "--json", file)
    assert done.exit_code == 0, done.output
    alone, pair, *single = read(file)
    assert [each["launch_mode"] for each in (alone, pair, *single)] == ["loop", "loop", "graph", "graph"]
    for record in (alone, pair):
        assert record["tpot_p99_ms"] >= record["tpot_ms"] > 0
        assert record["step_ms"] > 0
        assert record["cpu_us_per_token"] is not None
    assert (alone["launches_per_token"], pair["launches_per_token"]) == (1 / 8, 1 / 16)
    assert [record["launches_per_token"] for record in single] == [1, 1 / 2]


def test_answers_on_a_busy_cpu_stand_beside_those_on_a_quiet_one(
    run_bench: Bench, tiny_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    done = run_bench("busy", "--model", tiny_folder, *SMALL, "--json", file)
    assert done.exit_code == 0, done.output
    loop, graph = read(file)
    assert (loop["launch_mode"], graph["launch_mode"]) == ("loop", "graph")
    for record in (loop, graph):
        assert len(record["quiet_ms"]) == len(record["busy_ms"]) == 1
        assert record["spinners"] >= 1
        assert record["quiet_ms"][0] > 0 and record["first_quiet_ms"] > 0
    assert "slower by" in done.output


def test_context_is_the_mean_over_the_measured_steps(run_bench: Bench, tiny_folder: Path) -> None:
    done = run_bench("latency", "--model", tiny_folder, *SMALL, "--context", 40, "--sampled", "--json")
    assert done.exit_code == 0, done.output
    (file,) = Path("benchmarks/results").iterdir()
    (record,) = read(file)
    assert (record["context"], record["input_len"], record["output_len"]) == (40, 36, 8)
    assert record["sampled"] is True and record["step_ms"] > 0


def test_a_peer_is_measured_in_the_same_run(run_bench: Bench, tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    arguments = ("latency", "--model", tiny_folder, "--batch", "2", *SMALL, "--peer", "transformers")
    done = run_bench(*arguments, "--json", file)
    assert done.exit_code == 0, done.output
    ours, theirs = read(file)
    assert (ours["engine"], theirs["engine"], theirs["launch_mode"]) == ("mainspring", "transformers", "eager")
    assert ours["floor_ms"] == theirs["floor_ms"]
    assert theirs["tpot_p99_ms"] is None and theirs["tpot_ms"] == theirs["tpot_mean_ms"]


def test_a_peer_that_is_not_installed_is_one_line(
    run_bench: Bench, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find_spec(name))
    done = run_bench("latency", "--model", tiny_folder, "--peer", "vllm")
    assert done.exit_code == 1
    assert done.stderr == (
        "mainspring: error: peer vllm cannot be measured: the package 'vllm' is not installed here\n"
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--model", "gpt-5"), "model 'gpt-5' is not known here"),
        (("--peer", "tgi"), "peer 'tgi' is not known"),
        (("--launch-mode", "graph,warp"), "launch mode 'warp' is not known"),
        (("--batch", "0"), "batch is 0"),
        (("--batch", "one"), "is not a list of batch sizes"),
        (("--output-len", "300"), "the positions that the model was made for"),
        (("--profile", *SMALL), "--profile shows a GPU's kernels"),
        (("--profile", "--launch-mode", "eager"), "have graph among --launch-mode"),
        (("--context", "10"), "input_len is -118"),
    ],
)
def test_what_cannot_be_measured_is_told_in_one_line(
    run_bench: Bench, tiny_folder: Path, arguments: tuple[object, ...], complaint: str
) -> None:
    done = run_bench("latency", "--model", tiny_folder, "--device", "cpu", *arguments)
    assert done.exit_code == 2, done.output
    assert complaint in done.stderr and done.stderr.count("\n") == 1


def test_startup_runs_cold_then_warm_and_its_stages_add_up(run_bench: Bench, tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = run_bench("startup", "--model", tiny_folder, "--device", "cpu", "--max-num-seqs", 4, "--json", file)
    assert done.exit_code == 0, done.output
    cold, warm = read(file)
    assert (cold["cache"], warm["cache"], cold["weights_from"]) == ("cold", "warm", "disk")
    for record in (cold, warm):
        assert record["seconds"] == pytest.approx(sum(record["stages"].values()))
        assert {"import", "load weights", "record", "first token"} <= set(record["stages"])
        assert all(seconds >= 0 for seconds in record["stages"].values())
        assert record["rungs"] == 3
        assert record["warm_up_runs"] == 3  # a CPU makes one for each
        assert 0 < record["decode_seconds"] <= record["recording_seconds"]
        assert record["audit_seconds"] > 0


def test_cpu_compares_pairs_of_runs(run_bench: Bench, tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    sizes = ("--batch", "1,2", "--input-len", 5, "--output-len", 4, "--repeats", 2)
    done = run_bench("cpu", "--model", tiny_folder, *sizes, "--json", file)
    assert done.exit_code == 0, done.output
    found = read(file)
    assert [each["batch"] for each in found] == [1, 2]
    for record in found:
        assert (record["kind"], record["peer"], len(record["ratios"])) == ("comparison", "transformers", 2)
        assert min(record["ratios"]) <= record["ratio"] <= max(record["ratios"])


def test_help_imports_no_torch() -> None:
    code = "import sys; sys.argv = ['mainspring', 'bench', 'latency', '--help']\nfrom mainspring.cli import main\n"
    code += "try:\n    main()\nexcept SystemExit:\n    pass\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_a_run_needs_neither_gguf_nor_a_tokenizer(tiny_folder: Path) -> None:
    code = f"""
import sys
sys.modules["gguf"] = None
sys.argv = ["mainspring", "bench", "latency", "--model", {str(tiny_folder)!r}, "--device", "cpu",
            "--input-len", "4", "--output-len", "4", "--repeats", "1"]
import mainspring.bench.bandwidth as bandwidth
bandwidth.CPU_BYTES = 1 << 20
from mainspring.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_a_gpus_step_is_shown_kernel_by_kernel(run_bench: Bench, tiny_folder: Path, tmp_path: Path) -> None:
    config = tiny_folder / "config.json"
    larger = {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "head_dim": 64,
        "num_attention_heads": 8,
        "vocab_size": 1024,
    }
    config.write_text(json.dumps({**json.loads(config.read_text()), **larger}))
    file = tmp_path / "out.json"
    sizes = ("--input-len", 16, "--output-len", 16, "--repeats", 1)
    done = run_bench("latency", "--model", tiny_folder, "--batch", "1,4", "--profile", *sizes, "--json", file)
    assert done.exit_code == 0, done.output
    for record in read(file):
        assert record["step_ms"] > 0
        assert sum(row["share"] for row in record["kernels"]) == pytest.approx(1)
        assert all(row["total_us"] > 0 for row in record["kernels"])
