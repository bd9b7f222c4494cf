"""What the deployment files ask of the command is what the command has."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

from mainspring.cli.app import app

DEPLOY = Path(__file__).parents[2] / "deploy"


def check_arguments(arguments: list[str]) -> None:
    """Whether ``mainspring serve`` takes these."""
    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    serve.make_context("serve", arguments, resilient_parsing=False).close()


def test_the_image_runs_the_command_with_options_that_it_has() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    [entry] = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
    [command] = re.findall(r"^CMD (.*)$", text, re.MULTILINE)
    assert json.loads(entry)[1:] == ["serve"]
    check_arguments(json.loads(command))
    assert "'.[server]'" in text
    for source in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        assert all((DEPLOY.parent / name).exists() for name in source.split())


def test_the_unit_runs_the_command_with_options_that_it_has() -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "mainspring.service")
    command = shlex.split(unit["Service"]["ExecStart"])
    assert command[0].endswith("/bin/mainspring") and command[1] == "serve"
    check_arguments(command[2:])
    grace = float(command[command.index("--shutdown-grace") + 1])
    assert float(unit["Service"]["TimeoutStopSec"]) > grace


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "mainspring.service").read_text()
    runnable = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE)
    path = tmp_path / "mainspring.service"
    path.write_text(runnable)
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True)
    assert str(path) not in done.stderr, done.stderr
