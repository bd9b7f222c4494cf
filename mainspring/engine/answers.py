"""Answers: what a user asked for, made of one request per choice, and the text that has come so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mainspring.engine.detokenizer import Detokenizer
from mainspring.engine.errors import RequestError
from mainspring.engine.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput
from mainspring.engine.request import Request
from mainspring.engine.step import EXHAUSTED, STOPPED


@dataclass
class Choice:
    """One of an answer's completions."""

    request: Request
    eos_token_ids: frozenset[int]
    detokenizer: Detokenizer | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0

    @property
    def watches_text(self) -> bool:
        """Whether the text may end the choice: a stop string was asked for."""
        return self.detokenizer is not None and bool(self.request.params.stop)

    def push_logprobs(self, told: dict[int, Logprob], token: int) -> None:
        """Take in what is told of the newest ``token`` and its rivals."""
        self.logprobs.append(told)
        self.cumulative_logprob += told[token].logprob

    def push(self, tokens: Sequence[int], status: int) -> FinishReason | None:
        """Take in the request's newest tokens, of which the last left ``status``; the finish reason if the choice ends
        with them. Where it watches its text, one token at a time."""
        if status == STOPPED:
            self.finish_reason = "stop"
            self.stop_reason = None if tokens[-1] in self.eos_token_ids else tokens[-1]
        elif status == EXHAUSTED:
            self.finish_reason = "length"
        if self.detokenizer is not None:
            stop = self.detokenizer.push(
                tokens, finished=self.finish_reason is not None, ended_by_stop_id=status == STOPPED
            )
            if stop is not None:
                self.finish_reason, self.stop_reason = "stop", stop
        return self.finish_reason

    def end(self, reason: FinishReason) -> None:
        """End the choice from outside (an abort, an error); what text there is stays."""
        if self.finish_reason is None:
            self.finish_reason = reason
            if self.detokenizer is not None:
                self.detokenizer.push([], finished=True)

    def output(self) -> CompletionOutput:
        """The choice as users see it."""
        wanted = self.request.params.logprobs is not None
        return CompletionOutput(
            index=self.request.choice,
            text="" if self.detokenizer is None else self.detokenizer.text,
            token_ids=list(self.request.output_token_ids),
            cumulative_logprob=self.cumulative_logprob if wanted else None,
            logprobs=list(self.logprobs) if wanted else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


@dataclass
class Answer:
    """One user request with all its choices.

    ``prompt_logprobs`` has a place for each token of the prompt, None until it is told, and always for the first.
    ``error`` is what a function of the request's own raised; the answer is broken off then.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    choices: list[Choice] = field(default_factory=list)
    error: RequestError | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_logprobs = [None] * len(self.prompt_token_ids)

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish_reason is not None for choice in self.choices)

    def output(self) -> RequestOutput:
        """The answer as it stands now; ``prompt_logprobs`` once all are known."""
        first = self.choices[0].request
        told = first.params.prompt_logprobs is not None and not first.prompt_logprobs_due
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[choice.output() for choice in self.choices],
            finished=self.finished,
            num_cached_tokens=first.num_cached_tokens,
            prompt_logprobs=list(self.prompt_logprobs) if told else None,
        )
