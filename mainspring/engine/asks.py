"""What a request asks of sampling beyond temperature and filters; each kind brings buffers and operations with it."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mainspring.engine.sampling_params import SamplingParams


class Asks(enum.IntFlag):
    """Kinds of requests to the sampling, as bits that stand in a request's seat."""

    NOTHING = 0
    PENALTIES = 1
    LOGIT_BIAS = 2
    ALLOWED_IDS = 4
    BAD_WORDS = 8
    LOGPROBS = 16
    #: Python logits processors: the recorded step leaves the row's logits to the CPU.
    PROCESSORS = 32
    #: A grammar: the row's ``ALLOWED_IDS`` are written anew before each step.
    GRAMMAR = 64

    @property
    def need_cpu(self) -> bool:
        """Whether every token waits for the CPU to have seen the one before it."""
        return bool(self & (Asks.PROCESSORS | Asks.GRAMMAR))


def asks_of(params: SamplingParams) -> Asks:
    """The kinds that ``params`` makes use of."""
    penalties = params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    used = {
        Asks.PENALTIES: penalties,
        Asks.LOGIT_BIAS: bool(params.logit_bias),
        Asks.ALLOWED_IDS: params.allowed_token_ids is not None or params.structured_outputs is not None,
        Asks.BAD_WORDS: bool(params.bad_words),
        Asks.LOGPROBS: params.logprobs is not None,
        Asks.PROCESSORS: bool(params.logits_processors),
        Asks.GRAMMAR: params.structured_outputs is not None,
    }
    asks = Asks.NOTHING
    for kind, asked in used.items():
        if asked:
            asks |= kind
    return asks
