"""What a request gives back: its answers, as far as they have come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Logprob:
    """The log-probability of one token at one position.

    ``logprob`` is the natural logarithm, ``rank`` the token's place in the vocabulary at that position (1
    is the most likely), ``decoded_token`` its text.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One answer to a request: all of it so far, not only what is new.

    ``index`` tells the ``n`` answers of one request apart. ``token_ids`` holds everything that was
    sampled, with the token that ended the answer; ``text`` leaves that token out, and a stop string too
    unless ``include_stop_str_in_output`` asked for it. ``logprobs`` has one mapping of token id to
    ``Logprob`` for each token in ``token_ids``, where they were asked for.

    ``finish_reason`` is None while the answer goes on; ``"stop"`` after an end-of-sequence token, a stop
    id or a stop string; ``"length"`` at ``max_tokens`` or at the end of the context; ``"abort"`` where it
    was broken off. ``stop_reason`` is the stop string or stop id that ended it; None for end of sequence
    and all else.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[Mapping[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput:
    """A request and its answers so far.

    ``prompt`` is None where the prompt came as token ids. ``num_cached_tokens`` counts the tokens of the
    prompt whose keys and values the prefix cache already had. ``prompt_logprobs`` has one mapping for
    each token of the prompt, None for the first, where they were asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: Sequence[Mapping[int, Logprob] | None] | None = None
