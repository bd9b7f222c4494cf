"""The ``openai`` package's clients, and curl, work with the server as with OpenAI's own."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import Live
from pydantic import BaseModel

openai = pytest.importorskip("openai")

from openai.types import Completion  # noqa: E402
from openai.types.chat import ChatCompletion, ChatCompletionChunk  # noqa: E402

HI: list[Any] = [{"role": "user", "content": "Hi"}]
GREETING = "Hello! How can I assist you today?"
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time"}},
]


@pytest.fixture(scope="module")
def client(smol: Live) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{smol.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def check_form(kind: type[BaseModel], answer: BaseModel) -> None:
    """The client itself checks nothing: an answer has to pass its type's validation as it came."""
    raw = answer.model_dump(mode="json", exclude_unset=True, warnings=False)
    if kind is Completion:  # has no type of its own for chunks, whose reason is null until the last
        raw["choices"] = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in raw["choices"]]
    kind.model_validate(raw)


def test_a_chat_whole(client: Any) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=HI, temperature=0)
    check_form(ChatCompletion, answer)
    assert answer.choices[0].message.content == GREETING
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == 41


def test_a_chat_streamed(client: Any) -> None:
    chunks = list(client.chat.completions.create(model="smollm2", messages=HI, temperature=0, stream=True))
    for chunk in chunks:
        check_form(ChatCompletionChunk, chunk)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == GREETING
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "stop"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_completion_whole_and_streamed(client: Any) -> None:
    fields: dict[str, Any] = {"model": "also", "prompt": "Here is the English alphabet: ABC", "temperature": 0}
    whole = client.completions.create(**fields, max_tokens=8, logprobs=1)
    check_form(Completion, whole)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("DEFGHIJKLMNOP", "length")
    chunks = list(client.completions.create(**fields, max_tokens=8, stream=True))
    for chunk in chunks:
        check_form(Completion, chunk)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "DEFGHIJKLMNOP"


def test_many_at_once_without_waiting(smol: Live) -> None:
    async def ask() -> tuple[list[str], str]:
        async with openai.AsyncOpenAI(base_url=f"{smol.url}/v1", api_key="none") as client:
            create = client.chat.completions.create
            whole = await asyncio.gather(
                *(create(model="smollm2", messages=HI, temperature=0, max_tokens=4) for _ in range(6))
            )
            stream = await create(model="smollm2", messages=HI, temperature=0, stream=True)
            return [each.choices[0].message.content for each in whole], "".join(
                [chunk.choices[0].delta.content or "" async for chunk in stream]
            )

    texts, streamed = asyncio.run(ask())
    assert texts == ["Hello! How can"] * 6
    assert streamed == GREETING


def test_json_that_keeps_to_a_schema(client: Any) -> None:
    class Weather(BaseModel):
        city: str
        days: int

    answer = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Where shall I go? Answer in JSON."}],
        seed=1,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER, "strict": True}},
    )
    assert answer.choices[0].finish_reason == "stop"
    weather = Weather.model_validate_json(answer.choices[0].message.content)
    assert weather.city in ("Paris", "Rome") and 1 <= weather.days <= 9


def test_an_answer_parsed_into_a_model(client: Any) -> None:
    class Flag(BaseModel):
        up: bool

    answer = client.chat.completions.parse(model="smollm2", messages=HI, seed=1, max_tokens=20, response_format=Flag)
    assert isinstance(answer.choices[0].message.parsed, Flag)


def test_any_json_object(smol: Live, client: Any) -> None:
    brace, end = smol.post("/tokenize", {"prompt": "}"}).json()["tokens"][0], 2
    answer = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Give me a JSON object with your name."}],
        temperature=0,
        logit_bias={brace: 100, end: 100},  # alone, this would end the answer at once
        response_format={"type": "json_object"},
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("{}", "stop")


def test_a_tool_that_has_to_be_called(client: Any) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=HI, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=2
    )
    check_form(ChatCompletion, answer)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls
    assert call.type == "function" and call.id
    assert call.function.name in ("get_weather", "get_time")
    if call.function.name == "get_weather":
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


def test_one_function_streamed_and_its_result_given_back(client: Any) -> None:
    fields: dict[str, Any] = {"model": "smollm2", "tools": TOOLS, "seed": 2, "temperature": 0.7}
    choice = {"type": "function", "function": {"name": "get_weather"}}
    chunks = list(client.chat.completions.create(messages=HI, tool_choice=choice, stream=True, **fields))
    for chunk in chunks:
        check_form(ChatCompletionChunk, chunk)
    pieces = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [piece.function.name for piece in pieces if piece.function.name] == ["get_weather"]
    arguments = "".join(piece.function.arguments for piece in pieces)
    assert json.loads(arguments)["city"] in ("Paris", "Rome")
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    call = {"id": pieces[0].id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": pieces[0].id, "content": "sunny"},
    ]
    answer = client.chat.completions.create(messages=messages, max_tokens=4, **fields)
    assert answer.choices[0].finish_reason in ("length", "stop")


def test_a_whole_message_of_ours_may_be_sent_back(client: Any) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=HI, temperature=0)
    messages = [*HI, answer.choices[0].message, {"role": "user", "content": "Bye"}]
    assert client.chat.completions.create(model="smollm2", messages=messages, max_tokens=1).choices


def test_models_and_what_is_wrong(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2", "also"]
    assert client.models.retrieve("also").id == "also"
    with pytest.raises(openai.NotFoundError) as not_found:
        client.chat.completions.create(model="gpt-4", messages=HI)
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="smollm2", messages=HI, extra_body={"top_q": 1})
    assert (bad.value.param, bad.value.code) == ("top_q", "unknown_parameter")


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl(smol: Live) -> None:
    body = json.dumps({"messages": HI, "temperature": 0, "stream": True})
    command = ["curl", "-sN", "-m", "60", "-H", "Content-Type: application/json", "-d", body]
    done = subprocess.run([*command, f"{smol.url}/v1/chat/completions"], capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == GREETING
