"""What a request may say: everything is honoured or refused by name, and nothing is accepted and ignored."""

from __future__ import annotations

from typing import Any

import pytest
from live_server import Live

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f"}}
BAD = {"type": "no"}
DEEP: dict[str, Any] = {}
for _ in range(150):
    DEEP = {"properties": {"a": DEEP}}

#: Wrong fields of a completion -> the field that the error names.
WRONG: list[tuple[dict[str, Any], str | None]] = [
    ({"top_q": 1}, "top_q"),
    ({"suffix": "x"}, "suffix"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"best_of": 2}, "best_of"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"min_tokens": 20}, "min_tokens"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"logit_bias": {"3": 101}}, "logit_bias"),
    ({"logit_bias": {"3": 1, "03": 2}}, "logit_bias"),
    ({"logit_bias": {"\u0663": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop.0"),
    ({"stop": ["a"]}, "stop"),
    ({"seed": 1 << 70}, "seed"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
    ({"stop_token_ids": [256]}, "stop_token_ids"),
    ({"allowed_token_ids": [5000]}, "allowed_token_ids"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"stream": 1}, "stream"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_object"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"json": DEEP}}, "structured_outputs.json"),
    ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt.0"),
    ({"prompt": [256]}, "prompt"),
    ({"prompt": [-1]}, "prompt.0"),
    ({"prompt": "text"}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [3] * 600}, "prompt"),
    ({"prompt": [[3]] * 20, "n": 100}, None),
    ({"prompt": None}, "prompt"),
    ({"request_id": "x" * 300}, "request_id"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: str(value)[:60])
def test_a_wrong_field_is_a_400_that_names_it(tiny: Live, fields: dict[str, Any], param: str | None) -> None:
    reply = tiny.complete(**{"prompt": [5, 6], **fields})
    assert (reply.status, reply.param) == (400, param), reply.body
    assert reply.json()["error"]["type"] == "invalid_request_error"


#: The same for a chat with the embedded model.
WRONG_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "boss", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages.0.mood"),
    ({"messages": [{"role": "user", "content": "x" * 9000}]}, "max_model_len"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"store": True}, "store"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"modalities": ["audio"]}, "modalities.0"),
    ({"functions": []}, "functions"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"parallel_tool_calls": True}, "parallel_tool_calls"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "tools"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
    ({"continue_final_message": True}, "continue_final_message"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": BAD}}},
        "structured_outputs",
    ),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "start: ??"}}, "structured_outputs"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG_CHATS, ids=lambda value: str(value)[:60])
def test_a_wrong_field_of_a_chat_is_a_400_that_names_it(smol: Live, fields: dict[str, Any], param: str) -> None:
    reply = smol.chat(**fields)
    assert reply.status == 400, reply.body
    assert param in (reply.param, *reply.json()["error"]["message"].split()), reply.body


def test_a_null_is_a_field_left_out(tiny: Live) -> None:
    nothing = dict.fromkeys(("suffix", "n", "stop", "seed", "logit_bias", "stream", "user", "best_of", "unheard_of"))
    assert tiny.complete(prompt=[5, 6], **nothing).status == 200


def test_what_means_what_is_done_anyway_is_taken(smol: Live) -> None:
    fields = {"store": False, "service_tier": "auto", "modalities": ["text"], "best_of": 1, "tool_choice": "none"}
    assert smol.chat(max_tokens=1, **fields).status == 200


def test_every_limit_is_kept_to(tiny: Live) -> None:
    def finish(**fields: Any) -> tuple[int, str, Any]:
        [choice] = tiny.complete(prompt=[5, 6], return_token_ids=True, temperature=0, **fields).json()["choices"]
        return len(choice["token_ids"]), choice["finish_reason"], choice["stop_reason"]

    assert finish(ignore_eos=True) == (16, "length", None)
    assert finish(ignore_eos=True, max_tokens=3) == (3, "length", None)
    every = list(range(256))
    assert finish(allowed_token_ids=[9], stop_token_ids=[9]) == (1, "stop", 9)
    assert finish(allowed_token_ids=every, stop_token_ids=[9], logit_bias={"9": 100}, min_tokens=2)[0] == 3
    assert finish(max_tokens=1000, ignore_eos=True)[0] == 510  # the context of 512, less the prompt


def test_without_a_tokenizer_token_ids_go_in_and_come_out(tiny: Live) -> None:
    body = {"prompt": [5, 6], "temperature": 0, "max_tokens": 4, "ignore_eos": True}
    [choice] = tiny.complete(**body, return_token_ids=True, logprobs=1).json()["choices"]
    assert choice["text"] == "" and len(choice["token_ids"]) == 4 and choice["prompt_token_ids"] == [5, 6]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    streamed = tiny.complete(**body, return_token_ids=True, stream=True).events[:-1]
    assert [token for event in streamed for token in event["choices"][0]["token_ids"]] == choice["token_ids"]
    assert len(tiny.complete(**body, stream=True).events) == 5  # a chunk a token, though without text
    assert tiny.chat().status == 400


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", CHAT])
def test_what_needs_a_tokenizer_says_so(tiny: Live, path: str) -> None:
    body: dict[str, Any] = {
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [5]},
        CHAT: {"messages": [{"role": "user", "content": "x"}]},
    }[path]
    reply = tiny.post(path, body)
    assert reply.status == 400
    assert "tokenizer" in reply.json()["error"]["message"]


@pytest.mark.parametrize("tokens", [[1 << 31], [-1], [60000], ["a"], "a"])
def test_ids_that_are_none_are_refused(smol: Live, tokens: Any) -> None:
    reply = smol.post("/detokenize", {"tokens": tokens})
    assert (reply.status, (reply.param or "").split(".")[0]) == (400, "tokens")
