"""What is much too much is refused at little cost: neither memory nor anyone else's time goes into it."""

from __future__ import annotations

from typing import Any

import pytest
from live_server import Live
from pydantic import ValidationError

from mainspring.server.errors import ApiError
from mainspring.server.prompts import encode_text
from mainspring.server.protocol import MAX_ITEMS, ChatRequest, CompletionRequest, DetokenizeRequest

USER = {"role": "user", "content": "Hi"}
MANY = 1000

WRONG: list[tuple[Any, dict[str, Any]]] = [
    (CompletionRequest, {"prompt": [[]] * MANY}),
    (CompletionRequest, {"prompt": [True] * MANY}),
    (CompletionRequest, {"prompt": [["a"]] * MANY}),
    (CompletionRequest, {"prompt": "a", "stop": [0] * MANY}),
    (CompletionRequest, {"prompt": "a", "bad_words": [0] * MANY}),
    (CompletionRequest, {"prompt": "a", "stop_token_ids": [-1] * MANY}),
    (CompletionRequest, {"prompt": "a", "allowed_token_ids": [1.5] * MANY}),
    (CompletionRequest, {"prompt": "a", "structured_outputs": {"choice": [0] * MANY}}),
    (CompletionRequest, {"prompt": "a", "logit_bias": {str(number): "" for number in range(MANY)}}),
    (CompletionRequest, {"prompt": "a", **{f"field{number}": 1 for number in range(MANY)}}),
    (CompletionRequest, {"prompt": "a", "structured_outputs": {f"field{number}": 1 for number in range(MANY)}}),
    (ChatRequest, {"messages": [0] * MANY}),
    (ChatRequest, {"messages": [{**USER, "mood": 1}] * MANY}),
    (ChatRequest, {"messages": [{"role": "user", "content": [0] * MANY}]}),
    (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [0] * MANY}]}),
    (ChatRequest, {"messages": [USER], "tools": [0] * MANY}),
    (ChatRequest, {"messages": [USER], "modalities": ["sound"] * MANY}),
    (DetokenizeRequest, {"tokens": [""] * MANY}),
]


@pytest.mark.parametrize(("kind", "body"), WRONG, ids=lambda value: str(value)[:60])
def test_of_many_faults_only_the_first_is_looked_at(kind: Any, body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as raised:
        kind.model_validate(body)
    assert raised.value.error_count() <= 5  # one for each form that a field may have


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"stop": ["a"] * (MAX_ITEMS + 1)}, "stop", f"at most {MAX_ITEMS}"),
        ({"stop": [f"stop {number}" for number in range(65)]}, "stop", "65 texts > 64"),
        ({"stop": ["x" * 4000, "y" * 97]}, "stop", "4097 characters"),
        ({"bad_words": [f"word{number}" for number in range(65)]}, "bad_words", "65 words > 64"),
        ({"bad_words": ["x" * 4097]}, "bad_words", "4097 characters"),
        ({"logit_bias": {str(number): 1 for number in range(301)}}, "logit_bias", "301 entries"),
        ({"user": "x" * 257}, "user", "256"),
        ({"structured_outputs": {"json": {"enum": list(range(100_001))}}}, "structured_outputs.json", "100000"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_too_many_or_too_long_is_a_400_that_says_how_many(
    smol: Live, fields: dict[str, Any], param: str, said: str
) -> None:
    reply = smol.complete(prompt="a", **fields)
    assert (reply.status, reply.param) == (400, param), reply.body[:300]
    assert said in reply.json()["error"]["message"]


def test_the_most_that_may_be_asked_for_is_served(smol: Live) -> None:
    stop = [f"stop {number:059}" for number in range(64)]
    words = [f"zq{number}" for number in range(32)]
    assert sum(map(len, stop)) == 4096
    assert smol.complete(prompt="a", max_tokens=1, stop=stop, bad_words=words).status == 200


def test_a_choice_among_thousands_is_kept_to(smol: Live) -> None:
    choice = [f"w{number}" for number in range(5000)]
    reply = smol.complete(prompt="a", seed=1, max_tokens=8, structured_outputs={"choice": choice}).json()
    assert reply["choices"][0]["text"] in choice


def test_a_text_that_can_never_fit_is_refused_without_encoding_it() -> None:
    class Tokenizer:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "b" * 100: 1}

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [len(text)]}

    tokenizer = Tokenizer()
    assert encode_text(tokenizer, "b" * 5000, True, "prompt", 50) == [5000]
    with pytest.raises(ApiError, match=r"5001 characters.*max_model_len 50") as raised:
        encode_text(tokenizer, "b" * 5001, True, "prompt", 50)
    assert (raised.value.status, raised.value.param) == (400, "prompt")


def test_prompts_that_can_never_wait_here_together_are_not_encoded(smol: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    import mainspring.server.app as app

    encoded: list[str] = []
    encode = app.encode_text

    def counted(tokenizer: Any, text: str, *rest: Any) -> list[int]:
        encoded.append(text)
        return encode(tokenizer, text, *rest)

    monkeypatch.setattr(app, "encode_text", counted)
    assert smol.complete(prompt=["a"] * 2000).status == 400
    assert encoded == []
    assert smol.complete(prompt=["a", "b"], max_tokens=1).status == 200
    assert encoded == ["a", "b"]
    assert smol.complete(prompt=["a", "a " * 1100, "b"]).status == 400  # the first that is too long is the last
    assert encoded[2:] == ["a", "a " * 1100]


def test_more_messages_than_tokens_are_refused(smol: Live) -> None:
    reply = smol.post("/v1/chat/completions", {"messages": [USER] * 1025})
    assert (reply.status, reply.param) == (400, "messages")
    assert "1025 messages > max_model_len 1024" in reply.json()["error"]["message"]


def test_an_error_does_not_repeat_all_that_was_sent(smol: Live) -> None:
    for body in ({"model": "m" * 100_000}, {"x" * 100_000: 1}, {"structured_outputs": {"regex": "(" * 100_000}}):
        reply = smol.complete(prompt="a", **body)
        assert reply.status in (400, 404)
        assert len(reply.body) < 5000
