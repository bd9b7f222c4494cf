"""Over HTTP the embedded model gives the answers that are known to be right, streamed and whole alike."""

from __future__ import annotations

from typing import Any

import pytest
from live_server import Live

ALPHABET = "Here is the English alphabet: ABC"
ALPHABET_IDS = [33203, 23960, 57, 58, 59, 34519, 62, 7627]
EMOJI = "Repeat this emoji three times: 😊"


def streamed_text(live: Live, path: str, body: dict[str, Any]) -> str:
    reply = live.post(path, {**body, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.events[-1] == "[DONE]"
    text = ""
    for event in reply.events[:-1]:
        for choice in event["choices"]:
            text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    return text


@pytest.mark.parametrize("max_tokens", [9, 8])
def test_a_streamed_emoji_is_never_cut(smol: Live, max_tokens: int) -> None:
    body = {"messages": [{"role": "user", "content": EMOJI}], "temperature": 0, "max_tokens": max_tokens}
    whole = smol.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    streamed = streamed_text(smol, "/v1/chat/completions", body)
    assert streamed == whole
    if max_tokens == 9:
        assert streamed == "🌟🌟🌟"


@pytest.mark.parametrize(("stop", "text"), [("FG", "DE"), ("DE", ""), (["zz", "FG"], "DE")])
def test_a_stop_string_is_cut_off_wherever_it_lies(smol: Live, stop: Any, text: str) -> None:
    body = {"prompt": ALPHABET, "temperature": 0, "max_tokens": 8, "stop": stop}
    [choice] = smol.complete(**body).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    assert streamed_text(smol, "/v1/completions", body) == text


def test_usage_is_the_last_chunk_and_only_where_it_is_asked_for(smol: Live) -> None:
    events = smol.chat(temperature=0, stream=True, stream_options={"include_usage": True}).events
    assert events[-1] == "[DONE]"
    last = events[-2]
    assert last["choices"] == []
    assert {name: last["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")} == {
        "prompt_tokens": 31,
        "completion_tokens": 10,
        "total_tokens": 41,
    }
    assert all(event["choices"] and event["usage"] is None for event in events[:-2])
    assert events[-3]["choices"][0]["finish_reason"] == "stop"
    for options in ({}, {"include_usage": False}):
        events = smol.chat(temperature=0, stream=True, stream_options=options).events
        assert all(event["choices"] and "usage" not in event for event in events[:-1])
    events = smol.chat(temperature=0, stream=True, stream_options={"continuous_usage_stats": True}).events
    assert [event["usage"]["completion_tokens"] for event in events[:-1]][-1] == 10


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 0])
def test_a_temperature_near_zero_is_greedy(smol: Live, temperature: float) -> None:
    reply = smol.complete(prompt=ALPHABET, temperature=temperature, max_tokens=8, return_token_ids=True)
    assert reply.json()["choices"][0]["token_ids"] == ALPHABET_IDS


def test_filters_that_are_off_agree_and_narrow_ones_are_greedy(smol: Live) -> None:
    def ids(**fields: Any) -> list[int]:
        reply = smol.complete(prompt=ALPHABET, temperature=1, seed=7, max_tokens=8, return_token_ids=True, **fields)
        return reply.json()["choices"][0]["token_ids"]

    assert ids() == ids(top_k=0) == ids(top_k=-1)
    assert ids(top_k=1) == ids(top_p=0.0001) == ALPHABET_IDS


def test_min_tokens_comes_before_a_bias_towards_the_end(smol: Live) -> None:
    reply = smol.complete(prompt="Hello", logit_bias={"2": 100}, min_tokens=4, max_tokens=32, return_token_ids=True)
    [choice] = reply.json()["choices"]
    assert len(choice["token_ids"]) == 5
    assert choice["token_ids"].index(2) == 4
    assert choice["finish_reason"] == "stop"


def test_every_form_of_a_prompt_gives_the_same_answer(smol: Live) -> None:
    ids = smol.post("/tokenize", {"prompt": ALPHABET}).json()["tokens"]
    forms = [ALPHABET, ids, [ALPHABET, ALPHABET], [ids, ids]]
    texts = [
        [choice["text"] for choice in smol.complete(prompt=form, temperature=0, max_tokens=8).json()["choices"]]
        for form in forms
    ]
    assert texts == [["DEFGHIJKLMNOP"]] * 2 + [["DEFGHIJKLMNOP"] * 2] * 2


def test_choices_of_several_prompts_are_numbered_in_order_streamed_and_whole(smol: Live) -> None:
    body = {"prompt": [ALPHABET, "The capital of France is"], "n": 2, "seed": 3, "max_tokens": 5}
    whole = {choice["index"]: choice["text"] for choice in smol.complete(**body).json()["choices"]}
    assert sorted(whole) == [0, 1, 2, 3]
    streamed = dict.fromkeys(whole, "")
    for event in smol.complete(**body, stream=True).events[:-1]:
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == whole
    alone = smol.complete(**{**body, "prompt": "The capital of France is"}).json()["choices"]
    assert [choice["text"] for choice in alone] == [whole[2], whole[3]]


def test_echo_gives_the_prompt_first_and_its_log_probabilities(smol: Live) -> None:
    reply = smol.complete(prompt=ALPHABET, echo=True, max_tokens=2, temperature=0, logprobs=1).json()
    [choice] = reply["choices"]
    assert choice["text"] == ALPHABET + "DEFGH"
    told = choice["logprobs"]
    assert told["token_logprobs"][0] is None and all(value <= 0 for value in told["token_logprobs"][1:])
    assert "".join(told["tokens"]) == ALPHABET + "DEFGH"
    places = zip(told["text_offset"], told["tokens"], strict=True)
    assert all(choice["text"][start:].startswith(token) for start, token in places)
    streamed = streamed_text(smol, "/v1/completions", {"prompt": ALPHABET, "echo": True, "temperature": 0})
    assert streamed.startswith(ALPHABET + "DEFGH")


@pytest.mark.parametrize("stream", [False, True])
def test_text_offsets_count_characters_of_the_text(smol: Live, stream: bool) -> None:
    body = {"prompt": "Smile: 😊😊😊 -> 😊", "temperature": 0, "max_tokens": 8, "logprobs": 1, "stream": stream}
    reply = smol.complete(**body)
    choices = [event["choices"][0] for event in reply.events[:-1]] if stream else reply.json()["choices"]
    text = "".join(choice["text"] for choice in choices)
    told = [choice["logprobs"] for choice in choices]
    tokens, offsets = (sum((each[name] for each in told), []) for name in ("tokens", "text_offset"))
    assert len(tokens) == 8 and "\ufffd" in tokens  # an emoji is several tokens
    whole = [(start, token) for start, token in zip(offsets, tokens, strict=True) if "\ufffd" not in token]
    assert whole and all(text[start:].startswith(token) for start, token in whole)
    assert offsets == sorted(offsets) and offsets[-1] < len(text)


def test_text_offsets_of_an_echo_count_characters_of_prompt_and_answer(smol: Live) -> None:
    prompt = "a😊b é <|im_start|>c"
    [choice] = smol.complete(prompt=prompt, echo=True, max_tokens=3, logprobs=1, temperature=0).json()["choices"]
    told = choice["logprobs"]
    assert choice["text"].startswith(prompt)
    assert told["tokens"][:5] == ["a", "\ufffd", "\ufffd", "\ufffd", "b"]
    assert told["text_offset"][:5] == [0, 1, 1, 1, 2]
    assert told["tokens"][5:9] == [" é", " ", "<|im_start|>", "c"]
    assert told["text_offset"][5:10] == [3, 5, 6, 18, len(prompt)]  # the fifth is the answer's first


def test_a_token_put_before_the_prompt_has_no_place_in_its_text() -> None:
    from mainspring.server.token_text import prompt_offsets

    class Decoder:
        special_ids = frozenset({0})

        def text(self, token_ids: list[int], at_start: bool) -> str:
            return "".join(("<s>", "ab", "c")[token] for token in token_ids)

    decoder: Any = Decoder()
    assert prompt_offsets(decoder, [0, 1, 2], "abc") == [0, 0, 2]
    assert prompt_offsets(decoder, [0, 1, 2], "<s>abc") == [0, 3, 5]
    assert prompt_offsets(None, [0, 1], "") == [0, 0]


def test_echo_without_new_tokens_scores_the_prompt(smol: Live) -> None:
    reply = smol.complete(prompt=ALPHABET, echo=True, max_tokens=0, logprobs=1, temperature=0).json()
    [choice] = reply["choices"]
    assert choice["text"] == ALPHABET
    assert len(choice["logprobs"]["tokens"]) == reply["usage"]["prompt_tokens"] == 7
    assert reply["usage"]["completion_tokens"] == 0


def test_log_probabilities_of_a_chat_tell_tokens_bytes_and_rivals(smol: Live) -> None:
    body = {"temperature": 0, "max_tokens": 9, "logprobs": True, "top_logprobs": 2}
    content = smol.chat(EMOJI, **body).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 9
    assert bytes(octet for entry in content for octet in entry["bytes"]).decode() == "🌟🌟🌟"
    for entry in content:
        assert [rival["logprob"] for rival in entry["top_logprobs"]] == sorted(
            (rival["logprob"] for rival in entry["top_logprobs"]), reverse=True
        )
        assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]
    streamed = [
        entry
        for event in smol.chat(EMOJI, **body, stream=True).events[:-1]
        for choice in event["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content


def test_the_cache_tells_how_much_of_a_prompt_it_had(smol: Live) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 8
    first, second = (smol.complete(prompt=prompt, max_tokens=2, temperature=0).json() for _ in range(2))
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < second["usage"]["prompt_tokens"]
    assert cached % 16 == 0


def test_a_seed_gives_the_answer_that_the_engine_gives_offline(smol: Live) -> None:
    from mainspring import SamplingParams

    params = SamplingParams(seed=11, max_tokens=12, top_p=0.9)
    stream = smol.engine.llm  # the same weights and the same rules; only the way in differs
    reply = smol.complete(prompt=ALPHABET, seed=11, max_tokens=12, top_p=0.9, return_token_ids=True).json()
    smol.wait_for(lambda: smol.is_idle)
    expected = list(stream.generate(ALPHABET, params)[0].outputs[0].token_ids)
    assert reply["choices"][0]["token_ids"] == expected


def test_tokens_and_texts_go_both_ways(smol: Live) -> None:
    told = smol.post("/tokenize", {"prompt": "Steps:\n\n1. a", "return_token_strs": True}).json()
    assert told["tokens"] == [21831, 42, 1116, 33, 30, 253]
    assert (told["count"], len(told["token_strs"]), told["max_model_len"]) == (6, 6, 1024)
    assert smol.post("/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": "Steps:\n\n1. a"}
    chat = smol.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}).json()
    assert chat["count"] == 31


def test_a_conversation_may_end_with_the_beginning_of_the_answer(smol: Live) -> None:
    messages = [
        {"role": "user", "content": "Recite the alphabet."},
        {"role": "assistant", "content": "Here is the English alphabet: ABC"},
    ]
    body = {"messages": messages, "continue_final_message": True, "temperature": 0, "max_tokens": 2}
    reply = smol.post("/v1/chat/completions", body).json()
    assert reply["choices"][0]["message"]["content"].startswith("DEF")


def test_content_may_come_in_parts(smol: Live) -> None:
    parts = [{"type": "text", "text": "Hi"}]
    body = {"messages": [{"role": "user", "content": parts}], "temperature": 0}
    assert smol.post("/v1/chat/completions", body).json()["usage"]["total_tokens"] == 41
