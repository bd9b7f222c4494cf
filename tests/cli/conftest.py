"""A command line whose engine is a fake."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from fake_engine import FakeLLM
from typer.testing import CliRunner, Result

import mainspring
from mainspring.cli.app import app

Invoke = Callable[..., Result]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeLLM]]:
    monkeypatch.setitem(vars(mainspring), "LLM", FakeLLM)
    monkeypatch.setattr(FakeLLM, "made", [])
    monkeypatch.setattr(FakeLLM, "fails_with", None)
    monkeypatch.setattr(FakeLLM, "interrupt_after", None)
    yield FakeLLM
    for llm in FakeLLM.made:
        assert llm.open_streams == 0, "a stream was left open: its request would go on"
        assert llm.closed, "an engine was left open"


@pytest.fixture
def invoke(fake: type[FakeLLM]) -> Invoke:
    def run(*arguments: str, input: str = "") -> Result:
        return CliRunner().invoke(app, arguments, input=input, env={"COLUMNS": "120", "NO_COLOR": "1"})

    return run
