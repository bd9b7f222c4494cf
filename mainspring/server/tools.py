"""Tool calls: what the model is made to write, and what is read out of what it wrote."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mainspring.server.protocol import Tool

HERMES_OPENING, HERMES_CLOSING = "<tool_call>", "</tool_call>"
#: White space of JSON on one line, for llguidance.
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
#: An answer that is no call, in Lark's notation.
_OTHER = r"OTHER: /([^{](.|\n)*)?/"


@dataclass(frozen=True)
class Call:
    """A piece of a tool call: with ``name`` its beginning, and ``arguments`` to be added to what came before."""

    index: int
    arguments: str
    name: str | None = None
    id: str | None = None


@dataclass
class Piece:
    """What a piece of the model's text comes to."""

    content: str = ""
    calls: list[Call] = field(default_factory=list)


class ToolReader(Protocol):
    """Reads tool calls out of a text that comes in pieces."""

    called: bool

    def push(self, text: str, finished: bool) -> Piece:
        """Take in the next piece of text; ``finished`` says that it is the last."""
        ...


def new_call_id() -> str:
    """An id for a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"


class HermesReader:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes and Qwen models write it.

    Text outside of the tags is content. What stands in the tags and is no call is content too, tags included.
    """

    def __init__(self) -> None:
        self.called = False
        self._after_call = False
        self._buffer = ""
        self._calls = 0

    def push(self, text: str, finished: bool) -> Piece:
        """See ``ToolReader``."""
        self._buffer += text
        piece = Piece()
        while True:
            start = self._buffer.find(HERMES_OPENING)
            if start < 0:
                keep = 0 if finished else _beginning_of(HERMES_OPENING, self._buffer)
                self._add_content(piece, self._buffer[: len(self._buffer) - keep])
                self._buffer = self._buffer[len(self._buffer) - keep :]
                return piece
            self._add_content(piece, self._buffer[:start])
            self._buffer = self._buffer[start:]
            end = self._buffer.find(HERMES_CLOSING)
            if end < 0 and not finished:
                return piece
            # A model may end its answer without the closing tag.
            stop = len(self._buffer) if end < 0 else end
            call = _as_call(self._buffer[len(HERMES_OPENING) : stop], "arguments")
            whole = self._buffer[: stop + (0 if end < 0 else len(HERMES_CLOSING))]
            self._buffer = self._buffer[len(whole) :]
            if call is None:
                piece.content += whole
            else:
                piece.calls.append(Call(self._calls, call[1], call[0], new_call_id()))
                self._calls += 1
                self.called = self._after_call = True

    def _add_content(self, piece: Piece, text: str) -> None:
        # The white space behind a call is not part of what the model says.
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            piece.content += text


class LlamaJsonReader:
    """``{"name": ..., "parameters": {...}}``, several with ``;`` between them, as Llama 3 models write it.

    An answer that begins in any other way is content.
    """

    def __init__(self) -> None:
        self.called = False
        self._buffer = ""
        self._decided: bool | None = None

    def push(self, text: str, finished: bool) -> Piece:
        """See ``ToolReader``."""
        self._buffer += text
        if self._decided is None:
            start = self._buffer.lstrip()
            tag = "<|python_tag|>"
            if start.startswith(("{", tag)):
                self._decided = True
            elif (start and not tag.startswith(start)) or finished:
                self._decided = False
        if self._decided is None or (self._decided and not finished):
            return Piece()
        text, self._buffer = self._buffer, ""
        if not self._decided:
            return Piece(text)
        calls = _json_calls(text.strip().removeprefix("<|python_tag|>"))
        if not calls:
            return Piece(text)
        self.called = True
        return Piece("", [Call(i, arguments, name, new_call_id()) for i, (name, arguments) in enumerate(calls)])


class NamedReader:
    """The arguments of one function, which the grammar makes the whole answer of."""

    def __init__(self, name: str) -> None:
        self.called = True
        self._name = name
        self._begun = False

    def push(self, text: str, finished: bool) -> Piece:
        """See ``ToolReader``."""
        if self._begun:
            return Piece("", [Call(0, text)] if text else [])
        self._begun = True
        return Piece("", [Call(0, text, self._name, new_call_id())])


class RequiredReader:
    """A JSON list of ``{"name": ..., "parameters": {...}}``, which the grammar makes the whole answer of.

    Where the answer was cut, the calls that are whole are told.
    """

    def __init__(self) -> None:
        self.called = False
        self._buffer = ""
        self._calls = 0

    def push(self, text: str, finished: bool) -> Piece:
        """See ``ToolReader``."""
        self._buffer += text
        piece = Piece()
        if "}" not in text and not finished:
            return piece
        while True:
            rest = self._buffer.lstrip("[, \n")
            try:
                value, end = json.JSONDecoder().raw_decode(rest)
            except (ValueError, RecursionError):
                return piece
            call = _call_of(value, "parameters")
            if call is None:
                return piece
            self._buffer = rest[end:]
            piece.calls.append(Call(self._calls, call[1], call[0], new_call_id()))
            self._calls += 1
            self.called = True


#: ``--tool-call-parser`` -> its reader.
PARSERS: dict[str, type[HermesReader] | type[LlamaJsonReader]] = {
    "hermes": HermesReader,
    "llama3_json": LlamaJsonReader,
}


def parser_for_template(template: str | None) -> str | None:
    """The parser for the calls that a chat template teaches, or None."""
    if template and HERMES_OPENING in template:
        return "hermes"
    if template and "parameters" in template and ("ipython" in template or "python_tag" in template):
        return "llama3_json"
    return None


def knows_tools(template: str | None) -> bool:
    """Whether a chat template tells the model of tools."""
    return bool(template) and re.search(r"\btools\b", template or "") is not None


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """The JSON schema of a function's arguments."""
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def _call_schema(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def required_schema(tools: Sequence[Tool], parallel: bool) -> dict[str, Any]:
    """The JSON schema of a list of at least one call; of exactly one unless ``parallel``."""
    definitions: dict[str, Any] = {}
    calls = []
    for tool in tools:
        schema = dict(arguments_schema(tool))
        # Definitions are looked up from the root, which is no longer the function's own schema.
        definitions.update(schema.pop("$defs", {}))
        calls.append(_call_schema(tool.function.name, schema))
    whole: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not parallel:
        whole["maxItems"] = 1
    if definitions:
        whole["$defs"] = definitions
    return whole


def strict_grammar(tools: Sequence[Tool], parser: str, tag_is_token: bool) -> str:
    """Free text, or calls whose arguments keep to each function's schema, in Lark's notation.

    Functions that are not strict may have any object as arguments. ``tag_is_token`` says that ``<tool_call>`` is a
    special token.
    """
    from llguidance import StructTag

    schemas = {
        tool.function.name: arguments_schema(tool) if tool.function.strict else {"type": "object"} for tool in tools
    }
    if parser == "llama3_json":
        calls = [_call_schema(name, schema) | {"x-guidance": ONE_LINE} for name, schema in schemas.items()]
        rules = [f"call_{place}: %json {json.dumps(schema)}" for place, schema in enumerate(calls)]
        names = " | ".join(f"call_{place}" for place in range(len(calls)))
        return "\n".join(["start: calls | OTHER", 'calls: call (";" " "? call)*', f"call: {names}", *rules, _OTHER])
    tags = [
        StructTag(
            trigger=HERMES_OPENING,
            begin=f'{HERMES_OPENING}\n{{"name": {json.dumps(name)}, "arguments": ',
            grammar=schema | {"x-guidance": ONE_LINE},
            end=f"}}\n{HERMES_CLOSING}",
        )
        for name, schema in schemas.items()
    ]
    return str(StructTag.to_grammar(tags, assume_special=tag_is_token))


def tools_message(tools: Sequence[Tool]) -> str:
    """What a model is told of its tools where its chat template does not: calls in Hermes' format."""
    signatures = "\n".join(
        json.dumps(tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})) for tool in tools
    )
    return (
        "You can call these functions:\n"
        f"{signatures}\n"
        f"To call one, write {HERMES_OPENING}\n"
        '{"name": <its name>, "arguments": <a JSON object>}\n'
        f"{HERMES_CLOSING}"
    )


def _as_call(text: str, key: str) -> tuple[str, str] | None:
    try:
        return _call_of(json.loads(text), key)
    except (ValueError, RecursionError):
        return None


def _call_of(value: Any, key: str) -> tuple[str, str] | None:
    """Name and arguments (as JSON text) of a call, or None where it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    other = "parameters" if key == "arguments" else "arguments"
    arguments = value.get(key, value.get(other, {}))
    if isinstance(arguments, str):
        return value["name"], arguments
    return (value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _json_calls(text: str) -> list[tuple[str, str]]:
    """All calls of a text of JSON objects with ``;`` between them; none where anything else stands there."""
    calls, position = [], 0
    while position < len(text):
        try:
            value, position = json.JSONDecoder().raw_decode(text, position)
        except (ValueError, RecursionError):
            return []
        call = _call_of(value, "parameters")
        if call is None:
            return []
        calls.append(call)
        while position < len(text) and text[position] in "; \n":
            position += 1
    return calls


def _beginning_of(tag: str, text: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``tag``."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
