"""A conversation that cannot be put to a model is refused, with the message that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mainspring.engine.conversations import conversations, render
from mainspring.engine.errors import RequestError
from mainspring.models.source import resolve
from mainspring.models.tokenizer import load_tokenizer

HI = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Any:
    return load_tokenizer(resolve(smollm2_path))


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "a conversation is \\[\\]"),
        ([[]], "message 0 is \\[\\]"),
        ("hello", "a conversation is 'hello'"),
        (5, "a conversation is 5"),
        ([HI, "hello"], "message 1 is 'hello'"),
        ([{"role": "user"}], "message 0 has the content None"),
        ([{"content": "Hi"}], "message 0 has the role None"),
        ([{"role": 5, "content": "Hi"}], "message 0 has the role 5"),
        ([HI, {"role": "user", "content": 5}], "message 1 has the content 5"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "message 0 has a part that is no text"),
        ([{"role": "user", "content": ["Hi"]}], "message 0 has a part that is no text"),
    ],
)
def test_what_is_no_conversation_is_refused(tokenizer: Any, messages: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        render(tokenizer, messages, "m")


def test_what_the_template_refuses_is_told_with_its_words(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for template in ("{{ raise_exception('no such role') }}", "{{ messages[0]['content'] + 5 }}", "{% if"):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        with pytest.raises(RequestError, match="the chat template of 'm' refuses these messages: "):
            render(tokenizer, [HI], "m")
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(RequestError, match="no chat template"):
        render(tokenizer, [HI], "m")


def test_parts_of_a_message_are_joined(tokenizer: Any) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
    assert render(tokenizer, [parts], "m") == render(tokenizer, [{"role": "user", "content": "one\ntwo"}], "m")


def test_one_conversation_or_several() -> None:
    assert conversations([HI]) == [[HI]]
    assert conversations(([HI], [HI, HI])) == [[HI], [HI, HI]]
    assert conversations([]) == []
    assert conversations([HI, [HI]]) == [[HI, [HI]]]  # of which render refuses the second message
    for wrong in (None, "hello", HI, 5):
        with pytest.raises(RequestError, match="messages is"):
            conversations(wrong)
