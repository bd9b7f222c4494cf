"""``mainspring chat``: the conversation is kept, Ctrl-C stops an answer only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_engine import FakeLLM
from typer.testing import Result

Invoke = Callable[..., Result]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_each_question_comes_with_all_that_was_said_before(invoke: Invoke, fake: type[FakeLLM]) -> None:
    done = invoke("chat", "--system", "be brief", input="one two\n\nthree\n")
    told = {"role": "system", "content": "be brief"}
    assert (done.exit_code, done.stdout) == (0, "one two\nthree\n")
    assert fake.made[0].conversations == [
        [told, user("one two")],
        [told, user("one two"), assistant("one two"), user("three")],
    ]


def test_reset_forgets_the_conversation_but_not_the_system_message(invoke: Invoke, fake: type[FakeLLM]) -> None:
    invoke("chat", "--system", "be brief", input="one\n/reset\ntwo\n")
    assert fake.made[0].conversations[-1] == [{"role": "system", "content": "be brief"}, user("two")]


@pytest.mark.parametrize("leave", ["/exit", "/quit"])
def test_exit_leaves_and_what_follows_is_not_asked(invoke: Invoke, fake: type[FakeLLM], leave: str) -> None:
    done = invoke("chat", input=f"one\n{leave}\ntwo\n")
    assert (done.exit_code, done.stdout) == (0, "one\n")


def test_ctrl_c_stops_the_answer_and_keeps_the_session(
    invoke: Invoke, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "interrupt_after", 2)
    done = invoke("chat", input="one two three\nfour five\n")
    assert (done.exit_code, done.stdout) == (0, "one two\nfour five\n")
    assert "(stopped)" in done.stderr
    assert fake.made[0].conversations[-1] == [
        user("one two three"),
        assistant("one two"),
        user("four five"),
    ]


def test_a_question_that_fails_is_dropped_and_the_session_goes_on(
    invoke: Invoke, fake: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = FakeLLM.stream

    def failing_once(self: FakeLLM, prompt: str, params: object) -> object:
        if prompt == "long":
            raise ValueError("prompt of 9000 tokens > max_model_len 8192")
        return stream(self, prompt, params)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeLLM, "stream", failing_once)
    done = invoke("chat", input="one\nlong\ntwo\n")
    assert (done.exit_code, done.stdout) == (0, "one\ntwo\n")
    assert "mainspring: error: prompt of 9000 tokens > max_model_len 8192\n" in done.stderr
    assert fake.made[0].conversations[-1] == [user("one"), assistant("one"), user("two")]


def test_an_unknown_command_suggests_the_nearest_and_asks_nothing(invoke: Invoke, fake: type[FakeLLM]) -> None:
    done = invoke("chat", input="/rest\n/help\n")
    assert "no command '/rest'; did you mean /reset?" in done.stderr
    assert "Ctrl-C stops the answer" in done.stderr
    assert fake.made[0].conversations == []


def test_stats_are_shown_at_the_end_and_when_asked(invoke: Invoke) -> None:
    assert invoke("chat", "--stats", input="/stats\nx\n").stderr.count("launch mode") == 2
    assert "launch mode" not in invoke("chat", input="x\n").stderr


def test_an_answer_cut_by_its_length_says_so(invoke: Invoke) -> None:
    assert "[cut at 3 tokens; --max-tokens may allow more]\n" in invoke("chat", input="one two three\n").stderr
    assert "[cut" not in invoke("chat", input="one two\n").stderr
