"""From a conversation to the text that the model goes on from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mainspring.engine.errors import RequestError

#: A conversation: ``[{"role": "user", "content": "..."}, ...]``; content may be a list of ``{"type": "text"}`` parts.
Messages = Sequence[Mapping[str, Any]]


def conversations(messages: Any) -> list[Messages]:
    """One conversation, or several, as a list of them. Raises ``RequestError`` for what is neither."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise RequestError(f"messages is {messages!r}; give a list such as [{{'role': 'user', 'content': 'Hi'}}]")
    if any(isinstance(each, Mapping) for each in messages):
        return [messages]
    return list(messages)


def render(tokenizer: Any, messages: Any, model: str) -> str:
    """The conversation as the model's chat template writes it. Raises ``RequestError`` where it cannot be."""
    if not tokenizer.chat_template:
        raise RequestError(f"model {model!r} has no chat template; use generate")
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise RequestError(f"a conversation is {messages!r}; give a list of messages, at least one")
    given = [_message(message, index) for index, message in enumerate(messages)]
    try:
        return str(tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True))
    except Exception as error:
        # A template says itself what it does not accept, and breaks in many ways where it was not written for it.
        raise RequestError(f"the chat template of {model!r} refuses these messages: {error}") from error


def _message(message: Any, index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"message {index} is {message!r}; give a mapping with 'role' and 'content'")
    given = dict(message)
    if not isinstance(given.get("role"), str):
        raise RequestError(f"message {index} has the role {given.get('role')!r}; give a text such as 'user'")
    content = given.get("content")
    if isinstance(content, (list, tuple)):
        texts = [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
        if len(texts) < len(content):
            raise RequestError(f"message {index} has a part that is no text: {content!r}; give text only")
        given["content"] = "\n".join(texts)
    elif content is None and given.get("tool_calls"):
        given["content"] = ""
    elif not isinstance(content, str):
        raise RequestError(f"message {index} has the content {content!r}; give a text")
    return given
