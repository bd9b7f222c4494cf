"""``mainspring serve`` as a process: it says where it listens, ends in order, and tells why it cannot begin."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

DUMMY = ["--load-format", "dummy", "--device", "cpu", "--skip-tokenizer-init", "--kv-cache-memory", "8MiB"]


@contextmanager
def serving(*arguments: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "mainspring", "serve", *arguments]
    with log.open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def port_of(process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"ready: http://127.0.0.1:(\d+) serves tiny", log.read_text()):
            return int(found[1])
        time.sleep(0.05)
    raise AssertionError(log.read_text())


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mainspring", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("how", [(signal.SIGTERM,), (signal.SIGINT,), (signal.SIGTERM, signal.SIGTERM)], ids=str)
def test_a_signal_lets_the_running_answer_finish_and_ends_with_status_0(
    tiny_folder: Path, tmp_path: Path, how: tuple[signal.Signals, ...]
) -> None:
    log = tmp_path / "log"
    arguments = [str(tiny_folder), *DUMMY, "--port", "0", "--served-model-name", "tiny"]
    with serving(*arguments, log=log) as process:
        connection = http.client.HTTPConnection("127.0.0.1", port_of(process, log), timeout=60)
        body = {"prompt": [5, 6], "max_tokens": 300, "ignore_eos": True, "stream": True, "user": "somebody"}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        first = response.readline()
        for each in how:
            before = log.read_text().count("shutting down")
            os.kill(process.pid, each)
            while not before and "shutting down" not in log.read_text():
                time.sleep(0.01)
        events = (first + response.read()).split(b"\n\n")
        assert events[-2] == b"data: [DONE]"
        assert len(events) == 302  # 300 tokens, the end, and what comes behind it
        assert process.wait(60) == 0
    said = log.read_text()
    assert "2 prompt tokens, 300 answer tokens" in said and "'somebody'" in said
    assert "Traceback" not in said


def test_a_port_that_is_taken_is_one_line(tiny_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run(str(tiny_folder), *DUMMY, "--port", port)
    assert done.returncode == 1
    assert f"port {port}" in last_line(done) and "--port" in last_line(done)
    assert "Traceback" not in done.stderr


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = run(str(tmp_path / "nothing"), "--port", "0")
    assert done.returncode in (1, 2)
    assert last_line(done).startswith("mainspring: error:") and "nothing" in last_line(done)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a", "--model", "b"], "twice"),
        (["--port", "70000"], "--port"),
        (["--log-level", "loud"], "--log-level"),
        (["--max-queue", "-1"], "max_queue"),
        (["--max-body-size", "much"], "much"),
        (["--tool-call-parser", "pigeon"], "hermes"),
        (["--shutdown-grace", "-1"], "shutdown_grace"),
    ],
)
def test_a_slip_is_told_before_anything_is_loaded(arguments: list[str], words: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert words in last_line(done)
