"""What an answer has newly got, rather than all of it: for streams that are read while the engine goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mainspring.engine.answers import Answer, Choice
from mainspring.engine.outputs import FinishReason, Logprob


@dataclass(frozen=True)
class ChoiceUpdate:
    """What one choice got since its last update. Fields are those of ``CompletionOutput``, as far as they are new."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class Update:
    """What an answer got since its last update.

    ``at`` is when its tokens arrived, in the seconds of ``time.perf_counter``. ``error`` is what ended it, where it did
    not end by itself; ``prompt_logprobs`` is told once, when all are known.
    """

    choices: Sequence[ChoiceUpdate]
    at: float
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: Sequence[Mapping[int, Logprob] | None] | None = None
    error: BaseException | None = None


@dataclass
class Told:
    """How much of an answer has been told, and the next update of it."""

    answer: Answer
    _tokens: dict[int, int] = field(default_factory=dict)
    _ended: set[int] = field(default_factory=set)
    _prompt_told: bool = False

    def update(self, at: float) -> Update:
        """What is new by now."""
        answer = self.answer
        first = answer.choices[0].request
        prompt_logprobs = None
        if first.params.prompt_logprobs is not None and not first.prompt_logprobs_due and not self._prompt_told:
            self._prompt_told = True
            prompt_logprobs = list(answer.prompt_logprobs)
        return Update(
            choices=[update for choice in answer.choices if (update := self._choice(choice)) is not None],
            at=at,
            finished=answer.finished,
            num_cached_tokens=first.num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
            error=answer.error,
        )

    def _choice(self, choice: Choice) -> ChoiceUpdate | None:
        request = choice.request
        index, known = request.choice, len(request.output_token_ids)
        told = self._tokens.get(index, 0)
        if index in self._ended or (known == told and choice.finish_reason is None):
            return None
        self._tokens[index] = known
        if choice.finish_reason is not None:
            self._ended.add(index)
        return ChoiceUpdate(
            index=index,
            text="" if choice.detokenizer is None else choice.detokenizer.take(),
            token_ids=request.output_token_ids[told:known],
            logprobs=choice.logprobs[told:known] if request.params.logprobs is not None else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
