"""Standard streams that are closed, full, or cannot show what is written: one line or silence, no traceback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_engine import FakeLLM
from typer.testing import Result

from mainspring.cli.options import parse_bytes

Invoke = Callable[..., Result]

ENGINE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import mainspring
from fake_engine import FakeLLM
vars(mainspring)["LLM"] = FakeLLM
from mainspring.cli import main
main()
"""


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run a shell line in which ``$MS`` is the command with a fake engine."""
    return subprocess.run(
        ["bash", "-c", line.replace("$MS", '"$0" -c "$1"'), sys.executable, ENGINE],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("command", ["$MS generate 'one two'", "echo one two | $MS chat"])
@pytest.mark.parametrize("where", [">&-", "2>&-", "| true", "> /dev/full", "> /dev/full 2>&1"])
def test_an_output_that_takes_nothing_gives_no_traceback(command: str, where: str) -> None:
    done = shell(f"{command} {where}")
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 2


def test_a_chat_without_an_input_says_so() -> None:
    done = shell("$MS chat <&-")
    assert done.returncode == 2
    assert "standard input is closed" in done.stderr


def test_an_answer_is_written_where_the_encoding_lacks_a_character() -> None:
    done = shell("PYTHONIOENCODING=ascii $MS generate 'hi 🌟 you'")
    assert (done.returncode, done.stdout) == (0, "hi ? you\n")


def test_a_prompt_is_utf8_whatever_the_locale() -> None:
    done = shell("PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 LC_ALL=POSIX $MS generate 'hi 🌟' | od -An -c")
    assert "h   i" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("line", [r"$MS generate $'a\xff'", r"printf '\xff' | $MS generate"])
def test_a_prompt_that_is_no_utf8_is_told_in_one_line(line: str) -> None:
    done = shell(line)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "not UTF-8" in done.stderr


@pytest.mark.parametrize("text", ["9" * 400, "9" * 400 + "GB"])
def test_a_size_past_all_numbers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a number of bytes"):
        parse_bytes(text)


def test_ctrl_c_while_a_question_is_being_encoded_keeps_the_session(
    invoke: Invoke, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = FakeLLM.stream_chat
    interrupts = iter([KeyboardInterrupt()])

    def interrupted(self: FakeLLM, *arguments: object) -> object:
        for interrupt in interrupts:
            raise interrupt
        return ask(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeLLM, "stream_chat", interrupted)
    done = invoke("chat", input="one\ntwo\n")
    assert (done.exit_code, done.stdout) == (0, "two\n")
    assert fake.made[0].conversations == [[{"role": "user", "content": "two"}]]
