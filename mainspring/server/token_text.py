"""What single tokens read as in answers: text and bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from mainspring.engine.detokenizer import TextStream, TokenDecoder
from mainspring.engine.outputs import Logprob


@lru_cache(maxsize=1)
def _byte_of() -> Mapping[str, int]:
    """Byte-level BPE's alphabet: the character that stands for each byte, as GPT-2 has it."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


class TokenText:
    """Text and bytes of tokens. ``as_ids`` tells ``token_id:7`` in place of text."""

    def __init__(self, tokenizer: Any, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None
        self.without_text = tokenizer is None
        """Whether answers have no text at all."""

    def text(self, token_id: int, told: Logprob) -> str:
        """The token as text."""
        return f"token_id:{token_id}" if self._as_ids or told.decoded_token is None else told.decoded_token

    def octets(self, token_id: int, told: Logprob) -> list[int] | None:
        """The token's bytes; None where there is no text."""
        if told.decoded_token is None:
            return None
        if "\ufffd" in told.decoded_token and self._tokenizer is not None:
            piece = self._tokenizer.convert_ids_to_tokens(token_id)
            if piece and (match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece)):
                return [int(match[1], 16)]
            if piece and all(character in _byte_of() for character in piece):
                return [_byte_of()[character] for character in piece]
        return list(told.decoded_token.encode("utf-8", "replace"))

    # -- OpenAI's two forms --------------------------------------------------------------------------------

    def chat(self, token_ids: Sequence[int], told: Sequence[Mapping[int, Logprob]], top: int) -> list[dict[str, Any]]:
        """``logprobs.content`` of a chat answer."""
        content = []
        for token_id, each in zip(token_ids, told, strict=True):
            entry = self._chat_entry(token_id, each[token_id])
            entry["top_logprobs"] = [self._chat_entry(rival, each[rival]) for rival in most_likely(each, top)]
            content.append(entry)
        return content

    def _chat_entry(self, token_id: int, told: Logprob) -> dict[str, Any]:
        return {
            "token": self.text(token_id, told),
            "logprob": finite(told.logprob),
            "bytes": self.octets(token_id, told),
        }

    def completion(
        self,
        token_ids: Sequence[int],
        told: Sequence[Mapping[int, Logprob] | None],
        top: int,
        offsets: Sequence[int],
    ) -> dict[str, Any]:
        """``logprobs`` of a completion; ``offsets`` are those of ``TextOffsets``."""
        tokens: list[str] = []
        chosen: list[float | None] = []
        rivals: list[dict[str, float] | None] = []
        for token_id, each in zip(token_ids, told, strict=True):
            if each is None:  # the first token of a prompt, which nothing predicts
                text = self._alone(token_id)
                chosen.append(None)
                rivals.append(None)
            else:
                text = self.text(token_id, each[token_id])
                chosen.append(finite(each[token_id].logprob))
                # The token itself is there too, as OpenAI's and vLLM's are.
                ids = dict.fromkeys([*most_likely(each, top), token_id])
                rivals.append({self.text(rival, each[rival]): finite(each[rival].logprob) for rival in ids})
            tokens.append(text)
        return {"text_offset": list(offsets), "token_logprobs": chosen, "tokens": tokens, "top_logprobs": rivals}

    def _alone(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))


class TextOffsets:
    """Where tokens begin in the text of an answer, in characters. Those of one character all begin where it does, and
    one that is left out of the text where the next one does.

    Args:
        decoder: the engine's; None where it has none, and answers have no text.
        skip_special_tokens: whether special tokens are left out.
        start: where the first token begins.
    """

    def __init__(self, decoder: TokenDecoder | None, skip_special_tokens: bool, start: int) -> None:
        self._stream = None if decoder is None else TextStream(decoder, skip_special_tokens)
        self._at = start

    def take(self, token_ids: Sequence[int]) -> list[int]:
        """The offsets of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._at)
            if self._stream is not None:
                self._at += len(self._stream.push(token_id))
        return offsets


def prompt_offsets(decoder: TokenDecoder | None, token_ids: Sequence[int], text: str) -> list[int]:
    """Where a prompt's tokens begin in its ``text``; special ones that were put before it begin where it does."""
    added = 0
    if decoder is not None:
        for token_id in token_ids:
            if token_id not in decoder.special_ids or text.startswith(decoder.text([token_id], at_start=True)):
                break
            added += 1
    return [0] * added + TextOffsets(decoder, False, 0).take(token_ids[added:])


def most_likely(told: Mapping[int, Logprob], top: int) -> list[int]:
    """The ``top`` most likely of the tokens that were told, the likeliest first."""
    ranked = sorted(told, key=lambda token_id: (-told[token_id].logprob, told[token_id].rank or 0))
    return ranked[:top]


def finite(logprob: float) -> float:
    """A log-probability that JSON can carry."""
    return max(logprob, -9999.0)
