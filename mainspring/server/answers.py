"""What goes back to the client: whole answers and chunks of streams, in the forms of the ``openai`` package's types."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from mainspring import __version__
from mainspring.engine.detokenizer import TokenDecoder
from mainspring.engine.outputs import Logprob
from mainspring.engine.updates import ChoiceUpdate, Update
from mainspring.server.protocol import ChatRequest, CompletionRequest
from mainspring.server.service import Prompt
from mainspring.server.token_text import TextOffsets, TokenText, prompt_offsets
from mainspring.server.tool_use import ToolUse
from mainspring.server.tools import Call, ToolReader

FINGERPRINT = f"mainspring-{__version__}"


class Writer(Protocol):
    """Turns updates into chunks of a stream, or into one whole answer."""

    def chunks(self, place: int, update: Update) -> list[dict[str, Any]]:
        """The chunks that an update of prompt ``place`` comes to."""
        ...

    def take(self, place: int, update: Update) -> None:
        """Keep an update for ``whole``."""
        ...

    def whole(self) -> dict[str, Any]:
        """The whole answer, of all that was taken."""
        ...

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk that has only the usage."""
        ...


def usage(prompts: Sequence[Prompt], discarded: int = 0) -> dict[str, Any]:
    """Tokens of prompts and answers; of ``discarded`` tokens nothing was given back."""
    given = sum(len(prompt.token_ids) for prompt in prompts)
    made = sum(prompt.output_tokens for prompt in prompts) - discarded
    return {
        "prompt_tokens": given,
        "completion_tokens": made,
        "total_tokens": given + made,
        "prompt_tokens_details": {"cached_tokens": sum(prompt.cached_tokens for prompt in prompts)},
    }


class _Base:
    """What both kinds of answer have in common."""

    def __init__(self, kind: str, request_id: str, model: str, prompts: Sequence[Prompt], options: Any) -> None:
        self._head = {
            "id": request_id,
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self._prompts = prompts
        self._usage_wanted = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._discarded = 0

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "choices": choices}
        if self._usage_always:
            chunk["usage"] = usage(self._prompts, self._discarded)
        elif self._usage_wanted:
            chunk["usage"] = None
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        """See ``Writer``."""
        return {**self._head, "choices": [], "usage": usage(self._prompts, self._discarded)}


class CompletionWriter(_Base):
    """``text_completion``."""

    def __init__(
        self,
        request: CompletionRequest,
        request_id: str,
        model: str,
        prompts: Sequence[Prompt],
        n: int,
        tokens: TokenText,
        decoder: TokenDecoder | None,
    ) -> None:
        super().__init__("text_completion", request_id, model, prompts, request.stream_options)
        self._request = request
        self._n = n
        self._tokens = tokens
        self._without_text = tokens.without_text
        self._shown = [request.echo and prompt.text or "" for prompt in prompts]
        self._kept: dict[int, list[ChoiceUpdate]] = {place: [] for place in range(len(prompts) * n)}
        self._decoder = decoder
        skip = request.skip_special_tokens is not False
        self._offsets = [TextOffsets(decoder, skip, len(self._shown[place // n])) for place in range(len(prompts) * n)]
        self._begun: set[int] = set()
        self._prompt_logprobs: dict[int, Any] = {}
        self._discard = bool(request.echo and request.max_tokens == 0)

    def chunks(self, place: int, update: Update) -> list[dict[str, Any]]:
        """See ``Writer``."""
        made = []
        for choice in update.choices:
            if self._discard:
                self._discarded += len(choice.token_ids)
            index = place * self._n + choice.index
            first = index not in self._begun
            text = (self._shown[place] if first else "") + ("" if self._discard else choice.text)
            wanted = self._request.logprobs is not None or self._request.return_token_ids or self._without_text
            if not (text or choice.finish_reason or wanted):
                continue
            self._begun.add(index)
            entry: dict[str, Any] = {
                "index": index,
                "text": text,
                "logprobs": self._logprobs(index, choice),
                "finish_reason": "length" if self._discard and choice.finish_reason else choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            if self._request.return_token_ids:
                entry["token_ids"] = [] if self._discard else list(choice.token_ids)
                if first:
                    entry["prompt_token_ids"] = list(self._prompts[place].token_ids)
            made.append(entry)
        return [self._chunk([entry]) for entry in made]

    def take(self, place: int, update: Update) -> None:
        """See ``Writer``."""
        if update.prompt_logprobs is not None:
            self._prompt_logprobs[place] = update.prompt_logprobs
        for choice in update.choices:
            self._kept[place * self._n + choice.index].append(choice)
            if self._discard:
                self._discarded += len(choice.token_ids)

    def whole(self) -> dict[str, Any]:
        """See ``Writer``."""
        choices = [self._whole_choice(index, kept) for index, kept in self._kept.items()]
        return {**self._head, "choices": choices, "usage": usage(self._prompts, self._discarded)}

    def _whole_choice(self, index: int, kept: Sequence[ChoiceUpdate]) -> dict[str, Any]:
        place = index // self._n
        prompt, last = self._prompts[place], kept[-1]
        text = "" if self._discard else "".join(each.text for each in kept)
        token_ids = [] if self._discard else [token for each in kept for token in each.token_ids]
        told = [] if self._discard else [one for each in kept for one in each.logprobs or ()]
        entry: dict[str, Any] = {
            "index": index,
            "text": self._shown[place] + text,
            "logprobs": None,
            "finish_reason": "length" if self._discard else last.finish_reason,
            "stop_reason": last.stop_reason,
        }
        top = self._request.logprobs
        of_prompt = self._prompt_logprobs.get(place)
        if top is not None:
            before = list(prompt.token_ids) if self._request.echo else []
            told_before = (of_prompt or [None] * len(before)) if before else []
            offsets = prompt_offsets(self._decoder, before, self._shown[place])
            offsets += self._offsets[index].take(token_ids)
            entry["logprobs"] = self._tokens.completion([*before, *token_ids], [*told_before, *told], top, offsets)
        if self._request.prompt_logprobs is not None:
            entry["prompt_logprobs"] = prompt_logprobs(of_prompt)
        if self._request.return_token_ids:
            entry["token_ids"] = token_ids
            entry["prompt_token_ids"] = list(prompt.token_ids)
        return entry

    def _logprobs(self, index: int, choice: ChoiceUpdate) -> dict[str, Any] | None:
        if self._request.logprobs is None or choice.logprobs is None:
            return None
        offsets = self._offsets[index].take(choice.token_ids)
        return self._tokens.completion(choice.token_ids, choice.logprobs, self._request.logprobs, offsets)


class ChatWriter(_Base):
    """``chat.completion``, or in streams ``chat.completion.chunk``."""

    def __init__(
        self,
        request: ChatRequest,
        request_id: str,
        model: str,
        prompts: Sequence[Prompt],
        n: int,
        tokens: TokenText,
        tools: ToolUse,
    ) -> None:
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        super().__init__(kind, request_id, model, prompts, request.stream_options)
        self._request = request
        self._tokens = tokens
        self._readers: list[ToolReader | None] = [tools.reader() if tools.reader else None for _ in range(n)]
        self._kept: list[list[ChoiceUpdate]] = [[] for _ in range(n)]
        self._begun: set[int] = set()
        self._prompt_logprobs: Any = None

    def chunks(self, place: int, update: Update) -> list[dict[str, Any]]:
        """See ``Writer``."""
        made = []
        for choice in update.choices:
            first = choice.index not in self._begun
            self._begun.add(choice.index)
            if first:
                entry: dict[str, Any] = {
                    "index": choice.index,
                    "delta": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                }
                if self._request.return_token_ids:
                    entry["prompt_token_ids"] = list(self._prompts[0].token_ids)
                made.append(entry)
            delta = self._delta(choice)
            logprobs = self._logprobs([choice])
            if delta or choice.finish_reason or logprobs or self._request.return_token_ids:
                made.append(
                    {
                        "index": choice.index,
                        "delta": delta,
                        "logprobs": logprobs,
                        "finish_reason": self._finish_reason(choice),
                    }
                    | ({"stop_reason": choice.stop_reason} if choice.stop_reason is not None else {})
                    | ({"token_ids": list(choice.token_ids)} if self._request.return_token_ids else {})
                )
        return [self._chunk([entry]) for entry in made]

    def take(self, place: int, update: Update) -> None:
        """See ``Writer``."""
        if update.prompt_logprobs is not None:
            self._prompt_logprobs = update.prompt_logprobs
        for choice in update.choices:
            self._kept[choice.index].append(choice)

    def whole(self) -> dict[str, Any]:
        """See ``Writer``."""
        answer = {
            **self._head,
            "choices": [self._whole_choice(index, kept) for index, kept in enumerate(self._kept)],
            "usage": usage(self._prompts),
        }
        if self._request.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(self._prompt_logprobs)
        if self._request.return_token_ids:
            answer["prompt_token_ids"] = list(self._prompts[0].token_ids)
        return answer

    def _whole_choice(self, index: int, kept: Sequence[ChoiceUpdate]) -> dict[str, Any]:
        text = "".join(each.text for each in kept)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        reader = self._readers[index]
        if reader is not None:
            piece = reader.push(text, finished=True)
            if piece.calls:
                message["tool_calls"] = [_whole_call(call) for call in piece.calls]
            message["content"] = (piece.content.strip() if piece.calls else piece.content) or None
        entry: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(kept),
            "finish_reason": self._finish_reason(kept[-1]),
            "stop_reason": kept[-1].stop_reason,
        }
        if self._request.return_token_ids:
            entry["token_ids"] = [token for each in kept for token in each.token_ids]
        return entry

    def _delta(self, choice: ChoiceUpdate) -> dict[str, Any]:
        reader = self._readers[choice.index]
        if reader is None:
            return {"content": choice.text} if choice.text else {}
        piece = reader.push(choice.text, finished=choice.finish_reason is not None)
        delta: dict[str, Any] = {"content": piece.content} if piece.content else {}
        if piece.calls:
            delta["tool_calls"] = [_call_delta(call) for call in piece.calls]
        return delta

    def _finish_reason(self, choice: ChoiceUpdate) -> str | None:
        reader = self._readers[choice.index]
        called = reader is not None and reader.called
        return "tool_calls" if called and choice.finish_reason == "stop" else choice.finish_reason

    def _logprobs(self, updates: Sequence[ChoiceUpdate]) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        content: list[dict[str, Any]] = []
        for update in updates:
            if update.logprobs is not None:
                content += self._tokens.chat(update.token_ids, update.logprobs, self._request.top_logprobs or 0)
        return {"content": content, "refusal": None} if content else None


def prompt_logprobs(told: Sequence[dict[int, Logprob] | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's form of a prompt's log-probabilities: one mapping per token, by id."""
    if told is None:
        return None
    return [
        None
        if each is None
        else {
            str(token_id): {"logprob": max(one.logprob, -9999.0), "rank": one.rank, "decoded_token": one.decoded_token}
            for token_id, one in each.items()
        }
        for each in told
    ]


def _whole_call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_delta(call: Call) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_whole_call(call)}
