"""The load of ``bench serve`` is what it says, and its figures are of what happened."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from mainspring.bench.http_client import Address
from mainspring.bench.serve import Timing, Traffic, percentile
from mainspring.bench.serve_soak import Crowd, ServeSoakReport


def run(*arguments: str, file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mainspring", "bench", "serve", "--device", "cpu", "--dtype", "float32"]
    return subprocess.run(
        [*command, *arguments, "--json", str(file)], capture_output=True, text=True, timeout=850, check=False
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_rate_and_mode_has_its_record(tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "records.json"
    fields = ["--request-rate", "2,20", "--seconds", "1", "--input-len", "9", "--output-len", "5"]
    done = run("--model", str(tiny_folder), "--launch-mode", "graph,eager", *fields, file=file)
    assert done.returncode == 0, done.stderr
    records = json.loads(file.read_text())
    assert [(record["launch_mode"], record["request_rate"]) for record in records] == [
        (mode, rate) for mode in ("graph", "eager") for rate in (2.0, 20.0)
    ]
    for record in records:
        assert record["kind"] == "serve" and record["failed"] == 0 and record["requests"] >= 1
        assert 0 < record["ttft_ms"] <= record["ttft_p99_ms"] <= record["e2e_p99_ms"]
        assert 0 <= record["itl_ms"] <= record["itl_p99_ms"]  # 0 where a slow client reads several at once
        assert record["tokens_per_second"] * record["seconds"] == pytest.approx(5 * record["requests"])
    assert "TTFT" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_crowd_gets_right_answers_and_leaves_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    crowd = ["--clients", "12", "--minutes", "0.1", "--drop", "0.2", "--garbage", "0.2"]
    done = run("--model", str(tiny_folder), *crowd, file=file)
    assert done.returncode == 0, done.stderr
    [record] = json.loads(file.read_text())
    assert record["answered"] > 5 and record["dropped"] > 0 and record["garbage"] > 0 and record["streamed"] > 0
    assert (record["lost"], record["different"], record["kv_usage"], record["exit_status"]) == (0, 0, 0.0, 0)
    assert 0 < record["kinds"] <= record["all_kinds"] == 64 + 6 + 2 and record["memory_slack"] > 0


def test_a_soak_in_which_anything_went_wrong_is_not_ok() -> None:
    good = {"answered": 5, "kv_usage": 0.0, "running": 0.0, "waiting": 0.0, "exit_status": 0}
    assert ServeSoakReport(**good).ok  # type: ignore[arg-type]
    assert ServeSoakReport(**good, memory_late=3, memory_slack=3).ok  # type: ignore[arg-type]
    for wrong in (
        {"answered": 0},
        {"lost": 1},
        {"different": 1},
        {"garbage_taken": 1},
        {"kv_usage": 0.1},
        {"running": 1.0},
        {"exit_status": 1},
        {"memory_late": 1 << 30},
    ):
        assert not ServeSoakReport(**{**good, **wrong}).ok  # type: ignore[arg-type]


def test_tokens_that_came_together_share_their_time() -> None:
    timing = Timing(1.0, [(1.5, 1), (2.5, 2), (3.0, 1)])
    assert timing.first_token == 0.5
    assert timing.gaps == [0.5, 0.5, 0.5]
    assert timing.tokens == 4
    assert percentile([3, 1, 2], 0.5) == 2 and percentile([3, 1, 2], 0.99) == 3


def test_arrivals_come_at_the_rate_that_was_asked_for() -> None:
    moments = Traffic((50.0,), seconds=20.0).arrivals(50.0)
    assert 850 < len(moments) < 1150
    assert moments == sorted(moments) and moments[-1] < 20.0
    assert Traffic((0.01,), seconds=1.0).arrivals(0.01) == [0.0]


@pytest.mark.parametrize("wrong", [{"rates": ()}, {"rates": (0.0,)}, {"rates": (1.0,), "output_len": 0}])
def test_traffic_of_nothing_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Traffic(**wrong)  # type: ignore[arg-type]


def test_shares_of_a_crowd_are_shares() -> None:
    for wrong in ({"drop": 0.6, "garbage": 0.6}, {"drop": -0.1}, {"clients": 0}, {"minutes": 0.0}):
        with pytest.raises(ValueError, match="at most 1|above 0"):
            Crowd(**wrong)  # type: ignore[arg-type]


def test_addresses_are_read_as_people_write_them() -> None:
    assert Address.of("http://127.0.0.1:8000/v1") == Address("127.0.0.1", 8000)
    assert Address.of("localhost:9") == Address("localhost", 9)
    with pytest.raises(ValueError, match="address"):
        Address.of("https://x")


#: A package that has vLLM's name and command, and answers every prompt with as many tokens as were asked for.
STAND_IN = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
switches = set(sys.argv)
if given["--dtype"] == "float16":
    sys.exit("no float16 here")
assert {"--skip-tokenizer-init", "--no-enable-prefix-caching", "--enforce-eager"} <= switches, sys.argv
assert (given["--max-model-len"], given["--max-num-seqs"], given["--load-format"]) == ("14", "3", "dummy"), sys.argv


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert len(asked["prompt"]) == 9 and asked["return_token_ids"] and "model" not in asked
        self.send_response(200)
        self.end_headers()
        for _ in range(asked["max_tokens"]):
            self.wfile.write(b"data: " + json.dumps({"choices": [{"token_ids": [7]}]}).encode() + b"\\n\\n")
        self.wfile.write(b"data: [DONE]\\n\\n")
        self.close_connection = True


ThreadingHTTPServer((given["--host"], int(given["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def vllm_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site" / "vllm" / "entrypoints" / "openai"
    folder.mkdir(parents=True)
    for package in (folder, *folder.parents[:2]):
        (package / "__init__.py").touch()
    (folder / "api_server.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.mark.slow
@pytest.mark.usefixtures("vllm_stand_in")
def test_the_server_of_a_peer_is_measured_under_the_same_traffic(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    shutil.copy(tiny_folder / "config.json", tmp_path / "model")
    file = tmp_path / "records.json"
    traffic = ["--request-rate", "3", "--seconds", "1", "--input-len", "9", "--output-len", "5", "--max-num-seqs", "3"]
    modes = ["--launch-mode", "eager", "--peer", "vllm"]
    done = run("--model", str(tmp_path / "model"), *modes, *traffic, file=file)
    assert done.returncode == 0, done.stderr
    ours, theirs = json.loads(file.read_text())
    assert (ours["engine"], theirs["engine"]) == ("mainspring", "vllm")
    assert theirs["launch_mode"] == "eager" and theirs["failed"] == 0
    assert theirs["requests"] == ours["requests"] >= 1
    assert theirs["tokens_per_second"] * theirs["seconds"] == pytest.approx(5 * theirs["requests"])


@pytest.mark.usefixtures("vllm_stand_in")
def test_a_peer_that_does_not_start_says_why(tmp_path: Path) -> None:
    from mainspring.bench.peers.base import PeerError, PeerSpec, open_server

    site = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0])
    spec = PeerSpec(str(tmp_path), "dummy", "float16", "cpu", "graph", 14, 3, {})
    sys.path.insert(0, str(site))
    try:
        with pytest.raises(PeerError, match="did not start: no float16 here"), open_server("vllm", spec):
            raise AssertionError("it started")
        with pytest.raises(PeerError, match="transformers has no server that could be measured; give vllm"):
            open_server("transformers", spec)
    finally:
        sys.path.remove(str(site))
