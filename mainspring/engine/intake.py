"""What can only be checked, or made, where the model is known: a request's prompt and parameters on their way in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mainspring.engine.asks import Asks, asks_of
from mainspring.engine.errors import RequestError
from mainspring.engine.given_numbers import whole_numbers
from mainspring.engine.logits_state import BAD_WORD_TOKENS, BAD_WORDS_WIDTH, BIAS_WIDTH
from mainspring.engine.sampling_params import SamplingParams
from mainspring.engine.settings import STOP_CHARACTERS, STOP_IDS_WIDTH, STOP_TEXTS
from mainspring.engine.structured import Grammar, GrammarCompiler, StructuredOutputsParams

#: Characters of a bad word: far more than ``BAD_WORD_TOKENS`` tokens have.
BAD_WORD_CHARACTERS = 4096


@dataclass(frozen=True)
class Needs:
    """What a request's parameters come to on this model."""

    stop_ids: tuple[int, ...]
    asks: Asks
    bad_word_ids: tuple[tuple[int, ...], ...]
    grammar: Grammar | None = None


def numbers_of_request(name: str, values: Iterable[Any]) -> list[int]:
    """``values`` as plain integers; a ``RequestError`` where one is something else."""
    try:
        return whole_numbers(values)
    except TypeError as error:
        raise RequestError(f"{name} must be made of whole numbers: {error}") from error


class Intake:
    """Checks requests against one model. Every refusal is a ``RequestError``.

    Args:
        vocab_size: ids in the vocabulary.
        eos_token_ids: the model's own end-of-sequence ids.
        tokenizer: for ``stop`` and ``bad_words``; None where the engine has none.
        max_logprobs: the most that ``logprobs`` and ``prompt_logprobs`` may ask for.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int], tokenizer: Any, max_logprobs: int) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self.max_logprobs = max_logprobs
        self._tokenizer = tokenizer
        self._grammars = GrammarCompiler(tokenizer, vocab_size, eos_token_ids)

    def check_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        """Refuse ids that are outside the vocabulary."""
        self._check_ids("prompt token id", prompt_token_ids)

    def needs(self, params: SamplingParams) -> Needs:
        """Check ``params`` and turn texts into ids."""
        if params.stop and self._tokenizer is None:
            raise RequestError(
                "stop needs a tokenizer to look for texts, and this engine has none (skip_tokenizer_init); give "
                "stop_token_ids"
            )
        self._check_stop(params.stop_strings)
        for name in ("logprobs", "prompt_logprobs"):
            self._check_logprobs(name, getattr(params, name))
        bias = params.logit_bias or {}
        self._check_ids("token id in logit_bias", bias)
        if len(bias) > BIAS_WIDTH:
            raise RequestError(
                f"logit_bias has {len(bias)} entries > {BIAS_WIDTH}, the width of the step's bias buffer; give fewer"
            )
        allowed = params.allowed_token_ids
        self._check_ids("token id in allowed_token_ids", allowed or ())
        wanted = params.structured_outputs
        grammar = self._grammars.compile(wanted) if isinstance(wanted, StructuredOutputsParams) else None
        needs = Needs(self._stop_ids(params), asks_of(params), self._bad_word_ids(params.bad_words or ()), grammar)
        if allowed is not None:
            barred = {word[0] for word in needs.bad_word_ids if len(word) == 1}
            barred |= set(needs.stop_ids) if params.min_tokens > 0 else set()
            if barred.issuperset(allowed):
                raise RequestError(
                    f"all {len(set(allowed))} allowed_token_ids are ruled out by bad_words, or by min_tokens "
                    f"{params.min_tokens} as ids that end the answer; allow another"
                )
        return needs

    def logprobs_count(self, wanted: int) -> int:
        """How many of the most likely tokens ``logprobs`` or ``prompt_logprobs`` stands for; -1 is all."""
        return self.vocab_size if wanted == -1 else wanted

    def _check_ids(self, what: str, token_ids: Iterable[int]) -> None:
        vocab = self.vocab_size
        wrong = next((token for token in token_ids if not 0 <= token < vocab), None)
        if wrong is not None:
            raise RequestError(f"{what} {wrong} is outside the vocabulary of {vocab} (0 to {vocab - 1})")

    def _check_logprobs(self, name: str, wanted: int | None) -> None:
        count = 0 if wanted is None else self.logprobs_count(wanted)
        if count > self.max_logprobs:
            raise RequestError(
                f"{name} {wanted} asks for {count} tokens > max_logprobs {self.max_logprobs}; ask for fewer, or make "
                f"the engine with a larger max_logprobs (-1 is the whole vocabulary)"
            )

    def _check_stop(self, stops: Sequence[str]) -> None:
        if len(stops) > STOP_TEXTS:
            raise RequestError(f"stop has {len(stops)} texts > {STOP_TEXTS}; give fewer")
        length = sum(map(len, stops))
        if length > STOP_CHARACTERS:
            raise RequestError(f"stop is {length} characters long > {STOP_CHARACTERS}; give shorter texts")

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """The token ids that end the request, EOS ids included unless they are to be ignored."""
        self._check_ids("token id in stop_token_ids", params.stop_token_ids or ())
        eos = () if params.ignore_eos else self.eos_token_ids
        stop_ids = tuple(dict.fromkeys((*eos, *(params.stop_token_ids or ()))))
        if len(stop_ids) > STOP_IDS_WIDTH:
            raise RequestError(
                f"{len(stop_ids)} stop token ids (EOS included) > {STOP_IDS_WIDTH}, the width of the step's stop-id "
                f"buffer; give fewer stop_token_ids"
            )
        return stop_ids

    def _bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as token ids, as it is written at the start of a text and after a space."""
        if not words:
            return ()
        if self._tokenizer is None:
            raise RequestError("bad_words needs a tokenizer, and this engine has none (skip_tokenizer_init)")
        sequences: dict[tuple[int, ...], None] = {}
        bodies = dict.fromkeys(word.lstrip() or word for word in words)
        if len(bodies) > BAD_WORDS_WIDTH:
            raise RequestError(f"bad_words has {len(bodies)} words > {BAD_WORDS_WIDTH}; give fewer")
        for word in bodies:
            if len(word) > BAD_WORD_CHARACTERS:
                raise RequestError(
                    f"bad_words has a word of {len(word)} characters > {BAD_WORD_CHARACTERS}; give a shorter part of it"
                )
            for text in (word, " " + word) if word.strip() else (word,):
                ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
                if len(ids) > BAD_WORD_TOKENS:
                    raise RequestError(
                        f"bad word {word!r} is {len(ids)} tokens long > {BAD_WORD_TOKENS}, the width of the step's "
                        f"buffer; give a shorter part of it"
                    )
                if ids:
                    sequences[ids] = None
        if len(sequences) > BAD_WORDS_WIDTH:
            raise RequestError(
                f"bad_words come to {len(sequences)} token sequences > {BAD_WORDS_WIDTH}, the width of the step's "
                f"buffer (a word may have two: with and without a space before it); give fewer"
            )
        return tuple(sequences)
