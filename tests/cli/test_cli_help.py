"""``--help`` on a narrow terminal: whole names, and sentences that the terminal wraps."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from mainspring.cli.app import app

BENCHES = ("latency", "busy", "startup", "cpu", "soak", "serve")
COMMANDS = [["generate"], ["chat"], ["serve"], ["inspect"], *(["bench", name] for name in BENCHES)]


def help_of(command: list[str]) -> str:
    done = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80", "NO_COLOR": "1", "TERMINAL_WIDTH": "80"})
    assert done.exit_code == 0
    return done.stdout


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_names_of_options_are_whole_in_80_columns(command: list[str]) -> None:
    cut = re.findall(r"--\S*…", help_of(command))
    # These two, side by side, do not fit; the text beside them says the longer one.
    assert [name for name in cut if "enable-prefix" not in name] == []


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_sentences_are_wrapped_by_the_terminal_and_carry_no_markup(command: list[str]) -> None:
    text = help_of(command)
    assert "``" not in text
    prose = [line.rstrip() for line in text.split("╭─")[0].splitlines()]
    for line, following in zip(prose, prose[1:], strict=False):
        if line.strip() and following.strip() and "Usage:" not in line:
            assert len(line) + len(following.split()[0]) >= 78, f"a break inside a sentence: {line!r}"
