"""Errors of the command line: one line that says what to do, and an exit status."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_engine import FakeLLM
from typer.testing import Result

from mainspring.cli.options import parse_bytes, parse_sizes

Invoke = Callable[..., Result]


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["generate", "x", "--temprature", "1"], "--temperature"),
        (["generate", "x", "--max-token", "1"], "--max-tokens"),
        (["generate", "x", "--enforce_eager"], "--enforce-eager"),
        (["chat", "--max-num-seq", "1"], "--max-num-seqs"),
        (["generat", "x"], "generate"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(
    invoke: Invoke, fake: type[FakeLLM], arguments: list[str], nearest: str
) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert nearest in done.stderr
    assert not fake.made


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--temperature", "-1"], "temperature is -1.0; it is a number in [0, 3.4e+38]"),
        (["--top-p", "0"], "top_p is 0.0; it is a number in (0, 1]"),
        (["--max-tokens", "0"], "max_tokens is 0; it is an integer >= 1"),
        (["-n", "2", "--temperature", "0"], "n is 2 at temperature 0"),
        (["--stop", ""], "stop holds an empty text"),
        (["--kv-cache-memory", "2 GiBs"], "'2 GiBs' is not a number of bytes; write 1073741824, 512MiB"),
        (["--cudagraph-capture-sizes", "1,two"], "'1,two' is not a list of batch sizes; write 1,2,4"),
        (["--system", "x"], "--system needs --chat"),
        (["--prompt-file", "/no/such/file"], "/no/such/file"),
        (["--prompt-file", "/"], "/"),
    ],
)
def test_bad_input_is_one_line_and_status_2_before_an_engine_is_made(
    invoke: Invoke, fake: type[FakeLLM], arguments: list[str], said: str
) -> None:
    done = invoke("generate", "x", *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("mainspring: error: ") and said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not fake.made


@pytest.mark.parametrize(("arguments", "input"), [([], ""), (["", "y"], ""), (["--prompt-file", "-"], "\n")])
def test_an_empty_prompt_is_refused(invoke: Invoke, arguments: list[str], input: str) -> None:
    done = invoke("generate", *arguments, input=input)
    assert done.exit_code == 2
    assert "is empty; give it at least one character" in done.stderr


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ValueError("too\n  long"), 2, "too long"),
        (FileNotFoundError("no model"), 2, "no model"),
        (RuntimeError("a kernel\nfailed"), 1, "RuntimeError: a kernel failed"),
        (KeyError("secret"), 1, "KeyError: 'secret'"),
        (MemoryError(), 1, "MemoryError"),
    ],
)
def test_an_error_of_the_engine_is_one_line_without_a_traceback(
    invoke: Invoke,
    fake: type[FakeLLM],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    status: int,
    line: str,
) -> None:
    monkeypatch.setattr(fake, "fails_with", error)
    done = invoke("generate", "x")
    assert (done.exit_code, done.stderr) == (status, f"mainspring: error: {line}\n")


def test_debug_shows_where_an_error_comes_from(
    invoke: Invoke, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "fails_with", RuntimeError("a kernel failed"))
    by_option = invoke("generate", "x", "--debug")
    monkeypatch.setenv("MAINSPRING_DEBUG", "1")
    for done in (by_option, invoke("generate", "x")):
        assert done.exit_code == 1
        assert "Traceback" in done.stderr and "fake_engine.py" in done.stderr
        assert done.stderr.endswith("mainspring: error: RuntimeError: a kernel failed\n")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1048576", 1 << 20),
        ("512MiB", 512 << 20),
        ("2GiB", 2 << 30),
        ("2g", 2 * 10**9),
        ("1.5 GB", 15 * 10**8),
        ("0.5ki", 512),
        ("3TB", 3 * 10**12),
    ],
)
def test_bytes_are_read_with_their_unit(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "GiB", "1e9", "1 2", "0.1B"])
def test_what_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of bytes"):
        parse_bytes(text)


def test_sizes_may_be_parted_by_commas_or_spaces() -> None:
    assert parse_sizes("1,2,4") == parse_sizes("1, 2 4") == [1, 2, 4]
    for text in ("", "1,,2", "1.5"):
        with pytest.raises(ValueError, match="is not a list of batch sizes"):
            parse_sizes(text)
