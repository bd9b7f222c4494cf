"""From a conversation to the text and the token ids that the model goes on from. Runs in the engine's text thread."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.meta

from mainspring.server.errors import ApiError, bad_request
from mainspring.server.protocol import ChatRequest, Message, TokenizeRequest, Tool
from mainspring.server.tools import knows_tools, tools_message

#: What the server itself gives to a chat template.
OWN_VARIABLES = {"messages", "tools", "add_generation_prompt", "continue_final_message", "documents", "chat_template"}


def tokenizer_or_400(tokenizer: Any) -> Any:
    """The tokenizer; a 400 where the engine has none."""
    if tokenizer is None:
        raise bad_request(
            "this server has no tokenizer (--skip-tokenizer-init); give the prompt as token ids to /v1/completions",
            "prompt",
        )
    return tokenizer


#: Characters of a token, where no token of the vocabulary is as long: unknown ones may be taken together.
TOKEN_CHARACTERS = 64


@lru_cache(maxsize=1)
def _longest_token(tokenizer: Any) -> int:
    return max(TOKEN_CHARACTERS, *map(len, tokenizer.get_vocab()))


def encode_text(tokenizer: Any, text: str, add_special_tokens: bool, field: str, max_model_len: int) -> list[int]:
    """Token ids of a text; a 400 that names ``field`` where it is no text, or far too long for ``max_model_len``
    tokens, which is seen without encoding it."""
    longest = _longest_token(tokenizer)
    if len(text) > max_model_len * longest:
        raise bad_request(
            f"{field} comes to {len(text)} characters, more than max_model_len {max_model_len} tokens of {longest} "
            f"characters, the longest, can hold; shorten it",
            field,
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise bad_request(f"{field} holds half of a surrogate pair, which is no text", field) from error
    return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


def render_chat(
    tokenizer: Any,
    request: ChatRequest | TokenizeRequest,
    tools: Sequence[Tool],
    describe_tools: bool,
    max_model_len: int,
) -> str:
    """A conversation as the chat template writes it.

    ``describe_tools`` says that a template that knows nothing of tools gets them as a system message. More messages
    than ``max_model_len`` tokens are refused without writing them.
    """
    if len(request.messages or ()) > max_model_len:
        raise bad_request(
            f"{len(request.messages or ())} messages > max_model_len {max_model_len}; leave the oldest out", "messages"
        )
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise bad_request("this model has no chat template; use /v1/completions", "messages")
    messages = [_as_template_wants(message, index) for index, message in enumerate(request.messages or ())]
    options: dict[str, Any] = dict(_checked_kwargs(template, request.chat_template_kwargs or {}))
    if tools:
        if knows_tools(template):
            options["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
        elif describe_tools:
            messages = _with_system(messages, tools_message(tools))
        else:
            raise bad_request(
                "this model's chat template knows nothing of tools; leave tools out, or start the server with "
                "--tool-call-parser hermes, which tells the model of them in a system message",
                "tools",
            )
    go_on = bool(request.continue_final_message)
    add_prompt = request.add_generation_prompt if request.add_generation_prompt is not None else not go_on
    if go_on and add_prompt:
        raise bad_request(
            "continue_final_message and add_generation_prompt exclude each other; set one of them to false",
            "continue_final_message",
        )
    if go_on and messages[-1].get("role") != "assistant":
        raise bad_request("continue_final_message needs a last message of role assistant", "continue_final_message")
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_prompt, continue_final_message=go_on, **options
        )
    except RecursionError:
        raise bad_request("messages or tools are nested too deeply; flatten them", "messages") from None
    except Exception as error:
        # A template says itself what it does not accept, and breaks in many ways where it was not written for it.
        raise bad_request(f"the model's chat template refuses these messages: {error}", "messages") from error
    return str(text)


def _as_template_wants(message: Message, index: int) -> dict[str, Any]:
    """A message with plain text, and with tool arguments as objects, as templates take them."""
    given = message.model_dump(exclude_none=True)
    refusal = given.pop("refusal", None)
    content = given.get("content", refusal)
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    if content is None and not given.get("tool_calls"):
        raise bad_request(f"messages.{index}.content is missing", f"messages.{index}.content")
    given["content"] = content or ""
    if given["role"] == "developer":
        given["role"] = "system"
    if message.tool_calls and message.role != "assistant":
        raise bad_request("only an assistant's message may have tool_calls", f"messages.{index}.tool_calls")
    for place, call in enumerate(given.get("tool_calls", ())):
        where = f"messages.{index}.tool_calls.{place}.function.arguments"
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
        except (ValueError, RecursionError) as error:
            raise bad_request(f"{where} is not JSON: {error}", where) from error
    return given


def _with_system(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    if messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _checked_kwargs(template: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Refuse what the template does not look at: it would be accepted and ignored."""
    if not kwargs:
        return kwargs
    known = _variables(template if isinstance(template, str) else "") - OWN_VARIABLES
    for name in kwargs:
        if name not in known:
            raise ApiError(
                400,
                f"chat_template_kwargs.{name} is not looked at by this model's chat template, which knows "
                f"{', '.join(sorted(known)) or 'none'}",
                param=f"chat_template_kwargs.{name}",
            )
    return kwargs


@lru_cache(maxsize=8)
def _variables(template: str) -> frozenset[str]:
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(template)))
    except jinja2.TemplateError:
        return frozenset()
