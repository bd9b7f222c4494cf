"""What a chat request's tools come to: what the model is told, the form that is forced, and how calls are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mainspring.engine.structured import StructuredOutputsParams
from mainspring.server.errors import bad_request
from mainspring.server.params import structured
from mainspring.server.protocol import ChatRequest, NamedTool, Tool
from mainspring.server.tools import (
    HERMES_CLOSING,
    HERMES_OPENING,
    PARSERS,
    NamedReader,
    RequiredReader,
    ToolReader,
    arguments_schema,
    parser_for_template,
    required_schema,
    strict_grammar,
)


@dataclass(frozen=True)
class ToolUse:
    """``shown`` are the tools that the model is told of; ``forced`` the form of the answer, if any; ``stop`` a text at
    which the answer ends; ``reader`` makes what reads one choice's calls, None where there are none to read."""

    shown: Sequence[Tool] = ()
    forced: StructuredOutputsParams | None = None
    stop: str | None = None
    reader: Callable[[], ToolReader] | None = None


def tool_use(request: ChatRequest, tokenizer: Any, parser: str | None) -> ToolUse:
    """How this request uses tools; ``parser`` is the server's setting. Raises ``ApiError``."""
    tools, choice = request.tools or [], request.tool_choice
    if not tools:
        for name in ("tool_choice", "parallel_tool_calls"):
            if getattr(request, name) not in (None, "none"):
                raise bad_request(f"{name} needs tools; give some", name)
        return ToolUse()
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise bad_request("two tools have the same name; rename one", "tools")
    parallel = request.parallel_tool_calls is not False
    if choice == "none":
        return ToolUse()
    if isinstance(choice, NamedTool):
        named = next((tool for tool in tools if tool.function.name == choice.function.name), None)
        if named is None:
            raise bad_request(f"tool_choice names {choice.function.name!r}, which is not among tools", "tool_choice")
        name = named.function.name
        return ToolUse(tools, structured({"json": arguments_schema(named)}, "tools"), None, lambda: NamedReader(name))
    if choice == "required":
        return ToolUse(tools, structured({"json": required_schema(tools, parallel)}, "tools"), None, RequiredReader)
    return _auto(request, tools, tokenizer, parser, parallel)


def _auto(request: ChatRequest, tools: Sequence[Tool], tokenizer: Any, parser: str | None, parallel: bool) -> ToolUse:
    parser = parser or parser_for_template(getattr(tokenizer, "chat_template", None))
    if parser is None:
        raise bad_request(
            "this model's chat template has no form of tool calls that this server knows; start it with "
            f"--tool-call-parser ({', '.join(sorted(PARSERS))}), or set tool_choice to required or to one function",
            "tools",
        )
    if request.structured_outputs is not None or (request.response_format and request.response_format.type != "text"):
        raise bad_request(
            "tools with tool_choice auto and a form of the answer exclude each other; leave one of them out", "tools"
        )
    if not parallel and parser != "hermes":
        raise bad_request(
            f"parallel_tool_calls false is not supported with tool_choice auto for {parser}; leave it out, or set "
            f"tool_choice to required",
            "parallel_tool_calls",
        )
    forced = None
    if any(tool.function.strict for tool in tools):
        grammar = strict_grammar(tools, parser, _is_special(tokenizer, HERMES_OPENING))
        forced = structured({"grammar": grammar}, "tools")
    return ToolUse(tools, forced, None if parallel else HERMES_CLOSING, PARSERS[parser])


def _is_special(tokenizer: Any, text: str) -> bool:
    return any(token.special and token.content == text for token in tokenizer.added_tokens_decoder.values())
