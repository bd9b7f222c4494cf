"""Tool calls are read out of what models write, whole and in pieces, and forced where they have to be."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_server import Live

from mainspring.engine.errors import RequestError
from mainspring.engine.structured import GrammarCompiler
from mainspring.server.protocol import ChatRequest, Tool
from mainspring.server.tool_use import tool_use
from mainspring.server.tools import (
    HermesReader,
    LlamaJsonReader,
    NamedReader,
    RequiredReader,
    ToolReader,
    parser_for_template,
    required_schema,
)

HERMES = 'Let me look.\n<tool_call>\n{"name": "f", "arguments": {"a": "<b>"}}\n</tool_call>'
TWO = HERMES + '\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
LLAMA = '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}'
REQUIRED = '[{"name": "f", "parameters": {"a": [1, {"b": "}"}]}}, {"name": "g", "parameters": {}}]'

#: reader, text -> content, (name, arguments) of the calls
CASES: list[tuple[Callable[[], ToolReader], str, str, list[tuple[str, Any]]]] = [
    (HermesReader, "just text", "just text", []),
    (HermesReader, "a < b <tool> c", "a < b <tool> c", []),
    (HermesReader, HERMES, "Let me look.\n", [("f", {"a": "<b>"})]),
    (HermesReader, TWO, "Let me look.\n", [("f", {"a": "<b>"}), ("g", {})]),
    (HermesReader, HERMES.removesuffix("\n</tool_call>"), "Let me look.\n", [("f", {"a": "<b>"})]),
    (HermesReader, "<tool_call>no JSON</tool_call>!", "<tool_call>no JSON</tool_call>!", []),
    (HermesReader, "<tool_call>{", "<tool_call>{", []),
    (HermesReader, "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    (HermesReader, "ends with <tool_", "ends with <tool_", []),
    (LlamaJsonReader, "just text", "just text", []),
    (LlamaJsonReader, LLAMA, "", [("f", {"a": 1}), ("g", {})]),
    (LlamaJsonReader, "<|python_tag|>" + LLAMA, "", [("f", {"a": 1}), ("g", {})]),
    (LlamaJsonReader, '{"name": "f"', '{"name": "f"', []),
    (LlamaJsonReader, '{"answer": 7}', '{"answer": 7}', []),
    (LlamaJsonReader, "", "", []),
    (RequiredReader, REQUIRED, "", [("f", {"a": [1, {"b": "}"}]}), ("g", {})]),
    (RequiredReader, REQUIRED[:-20], "", [("f", {"a": [1, {"b": "}"}]})]),
    (lambda: NamedReader("h"), '{"a": 1}', "", [("h", {"a": 1})]),
]


def read(make: Callable[[], ToolReader], pieces: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    """What a client puts together of a stream."""
    reader, content, calls, ids = make(), "", dict[int, list[str]](), set()
    for number, piece in enumerate(pieces, start=1):
        told = reader.push(piece, finished=number == len(pieces))
        content += told.content
        for call in told.calls:
            if call.name is not None:
                assert call.index not in calls and call.id
                ids.add(call.id)
                calls[call.index] = [call.name, ""]
            calls[call.index][1] += call.arguments
    assert len(ids) == len(calls) and list(calls) == list(range(len(calls)))
    assert reader.called == bool(calls)
    return content, [(name, json.loads(arguments)) for name, arguments in calls.values()]


@pytest.mark.parametrize(("make", "text", "content", "calls"), CASES)
@given(data=st.data())
def test_calls_are_read_however_the_text_is_cut(
    make: Callable[[], ToolReader], text: str, content: str, calls: list[tuple[str, Any]], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(make, pieces) == (content, calls)
    assert read(make, list(text) or [""]) == (content, calls)


@given(st.text(alphabet='<>tool_call/{}"name: ,[]arguments', max_size=80))
def test_content_is_never_lost_or_made_up(text: str) -> None:
    reader = HermesReader()
    content = "".join(reader.push(letter, finished=False).content for letter in text) + reader.push("", True).content
    assert reader.called or content == text


def test_what_streams_early_is_what_is_certain() -> None:
    reader = HermesReader()
    assert reader.push("Hello <", False).content == "Hello "
    assert reader.push("b> and", False).content == "<b> and"


def test_the_parser_follows_the_chat_template() -> None:
    assert parser_for_template("... <tool_call> ...") == "hermes"
    assert parser_for_template('{"name": f, "parameters": d} ... ipython') == "llama3_json"
    assert parser_for_template("{{ messages }}") is None
    assert parser_for_template(None) is None


def test_definitions_of_a_functions_schema_are_found_from_the_list_of_calls() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "integer"}}}
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": schema}})
    made = required_schema([tool], parallel=False)
    assert made["$defs"] == {"A": {"type": "integer"}}
    assert (made["minItems"], made["maxItems"]) == (1, 1)


SCHEMA = {"type": "object", "properties": {"x": {"enum": ["p", "q"]}}, "required": ["x"], "additionalProperties": False}
STRICT = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}]


def strict_grammar_of(live: Live, tools: list[Any], parser: str) -> Callable[[str], None]:
    """Follows a text through the grammar for these tools; raises ``RequestError`` where it breaks it."""
    core = live.engine.llm.core
    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "tools": tools})
    use = tool_use(request, core.tokenizer, parser)
    assert use.forced is not None
    compiler = GrammarCompiler(core.tokenizer, core.config.vocab_size, core.config.eos_token_ids)

    def follow(text: str) -> None:
        grammar = compiler.compile(use.forced)  # type: ignore[arg-type]
        grammar.follow(core.tokenizer.encode(text, add_special_tokens=False) + [2])

    return follow


def test_a_strict_function_gets_arguments_of_its_schema_though_it_need_not_be_called(tiny_chat: Live) -> None:
    for parser, call in (
        ("hermes", 'Well. <tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'),
        ("llama3_json", '{"name": "f", "parameters": %s}'),
    ):
        follow = strict_grammar_of(tiny_chat, STRICT, parser)
        for right in ("just text", "", call % '{"x": "p"}'):
            follow(right)
        for wrong in (call % '{"x": "r"}', call % "{}", (call % '{"x": "p"}').replace('"f"', '"g"')):
            with pytest.raises(RequestError):
                follow(wrong)


def test_one_strict_function_leaves_the_others_free(tiny_chat: Live) -> None:
    follow = strict_grammar_of(tiny_chat, [*STRICT, {"type": "function", "function": {"name": "g"}}], "hermes")
    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    follow(call % ("g", '{"any": [1]}') + "\n" + call % ("f", '{"x": "q"}'))
    with pytest.raises(RequestError):
        follow(call % ("f", '{"any": [1]}'))


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_the_model_writes_are_tool_calls(tiny_chat: Live, says: Callable[[str], None], stream: bool) -> None:
    says(TWO)
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    reply = tiny_chat.chat(tools=tools, stream=stream)
    if stream:
        choices = [event["choices"][0] for event in reply.events[:-1]]
        content = "".join(choice["delta"].get("content") or "" for choice in choices)
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
        assert [call["index"] for call in calls] == [0, 1]
        reason = choices[-1]["finish_reason"]
    else:
        [choice] = reply.json()["choices"]
        content, calls, reason = choice["message"]["content"], choice["message"]["tool_calls"], choice["finish_reason"]
    assert content.strip() == "Let me look."
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls] == [
        ("f", {"a": "<b>"}),
        ("g", {}),
    ]
    assert reason == "tool_calls"
    [single] = tiny_chat.chat(tools=tools, parallel_tool_calls=False).json()["choices"]
    assert [call["function"]["name"] for call in single["message"]["tool_calls"]] == ["f"]
    assert single["finish_reason"] == "tool_calls"
    [plain] = tiny_chat.chat(tools=tools, tool_choice="none").json()["choices"]
    assert (plain["message"]["content"], plain["finish_reason"]) == (TWO, "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_is_made_even_by_a_model_of_random_weights(tiny_chat: Live, stream: bool) -> None:
    reply = tiny_chat.chat(tools=STRICT, tool_choice="required", parallel_tool_calls=False, seed=1, stream=stream)
    if stream:
        events = reply.events[:-1]
        calls = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
        reason = events[-1]["choices"][0]["finish_reason"]
    else:
        [choice] = reply.json()["choices"]
        calls, reason = choice["message"]["tool_calls"], choice["finish_reason"]
    assert reason == "tool_calls"
    assert [call["function"]["name"] for call in calls] == ["f"]
    assert json.loads(calls[0]["function"]["arguments"])["x"] in ("p", "q")


def test_a_call_that_was_cut_is_told_as_cut(tiny_chat: Live) -> None:
    choice = {"type": "function", "function": {"name": "f"}}
    [cut] = tiny_chat.chat(tools=STRICT, tool_choice=choice, max_tokens=3).json()["choices"]
    assert cut["finish_reason"] == "length"
    assert cut["message"]["tool_calls"][0]["function"]["arguments"] == '{"x'


def test_tools_reach_the_template_and_so_do_its_own_options(tiny_chat: Live) -> None:
    def text(**fields: Any) -> str:
        body = {"messages": [{"role": "user", "content": "x"}], **fields}
        tokens = tiny_chat.post("/tokenize", body).json()["tokens"]
        return tiny_chat.post("/detokenize", {"tokens": tokens}).json()["prompt"]

    assert text() == "user: x\nassistant:"
    assert text(chat_template_kwargs={"think": True}) == "user: x\nassistant: hm"
    assert '"name": "f"' in text(tools=STRICT)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "p"}'}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    assert '"arguments": {"x": "p"}' in text(messages=messages)


def test_a_model_that_knows_no_tools_is_told_of_them_only_where_that_is_asked_for(smol: Live, tiny_chat: Live) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": STRICT}
    tokens = smol.post("/tokenize", body).json()["tokens"]  # served with a tool call parser
    assert '"name": "f"' in smol.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    plain = smol.service.settings
    object.__setattr__(plain, "tool_call_parser", None)
    try:
        reply = smol.chat(tools=STRICT, tool_choice="required")
    finally:
        object.__setattr__(plain, "tool_call_parser", "hermes")
    assert (reply.status, reply.param) == (400, "tools")
