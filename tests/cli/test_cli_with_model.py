"""The commands with the embedded model, as a person at a terminal meets them."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SMALL = ["--device", "cpu", "--dtype", "float32", "--max-num-seqs", "2", "--kv-cache-memory", "64MiB"]
ALPHABET = "Here is the English alphabet: ABC"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "mainspring", *arguments], capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["graph", "eager", "loop"])
def test_generate_answers_and_closes_with_the_stats(smollm2_path: Path, mode: str) -> None:
    chosen = ["--enforce-eager"] if mode == "eager" else ["--launch-mode", mode]
    done = run("generate", *SMALL, *chosen, "--max-tokens", "8", "--stop", "OP", "--stats", ALPHABET)
    assert (done.returncode, done.stdout) == (0, "DEFGHIJKLMN\n")
    rows = {
        line.split("│")[1].strip(): line.split("│")[2].strip()
        for line in done.stderr.splitlines()
        if line.startswith("│")
    }
    assert rows["launch mode"] == mode
    if mode == "loop":  # which may have made one more before it heard of the stop string
        assert rows["loops"].startswith("1 for ")
        return
    assert rows["rungs used"] == ("1 x 7" if mode == "graph" else "none")
    assert rows["decode steps"] == "7"


class Terminal:
    """A program on a terminal of its own, and what it has written there."""

    def __init__(self, *arguments: str) -> None:
        self.process, self._main = pty.fork()
        if self.process == 0:
            os.execv(sys.executable, [sys.executable, "-m", "mainspring", *arguments])
        self._running = True
        self._read_up_to = 0
        self.shown = ""

    def until(self, text: str, seconds: float = 120) -> None:
        """Read until ``text`` has come after what was found before."""
        end = time.monotonic() + seconds
        while (found := self.shown.find(text, self._read_up_to)) < 0:
            ready, _, _ = select.select([self._main], [], [], max(end - time.monotonic(), 0))
            assert ready, f"no {text!r} in {seconds} s; on the terminal: {self.shown!r}"
            try:
                self.shown += os.read(self._main, 4096).decode(errors="replace")
            except OSError:
                raise AssertionError(f"the program ended without {text!r}: {self.shown!r}") from None
        self._read_up_to = found + len(text)

    def type(self, text: str) -> None:
        os.write(self._main, text.encode())

    def status(self) -> int:
        """Wait for the end; the exit status."""
        with contextlib.suppress(OSError):
            while piece := os.read(self._main, 4096):
                self.shown += piece.decode(errors="replace")
        self._running = False
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])

    def end(self) -> None:
        """End the program, where it has not ended by itself."""
        if self._running:
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
        os.close(self._main)


@pytest.fixture
def chat(smollm2_path: Path) -> Iterator[Terminal]:
    terminal = Terminal("chat", *SMALL, "--max-tokens", "400")
    try:
        yield terminal
    finally:
        terminal.end()


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_the_next_question_is_answered(chat: Terminal) -> None:
    chat.until(">>> ")
    chat.type("Write a long story about a clock.\n")
    chat.until("\n")  # the echo of the question
    chat.until(" the ")
    chat.type("\x03")
    chat.until("(stopped)")
    chat.until(">>> ")
    chat.type("/reset\n")
    chat.until("(forgotten)")
    chat.until(">>> ")
    chat.type("Hi\n")
    chat.until("\n")
    chat.until("How can I assist you today?")
    chat.until(">>> ")
    chat.type("\x04")
    assert chat.status() == 0
    assert "Traceback" not in chat.shown
