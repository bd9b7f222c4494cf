"""Answers: what a user asked for, made of one request per choice, and the text that has come so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from mainspring.engine.detokenizer import Detokenizer
from mainspring.engine.outputs import CompletionOutput, FinishReason, RequestOutput
from mainspring.engine.request import Request
from mainspring.engine.step import EXHAUSTED, STOPPED


@dataclass
class Choice:
    """One of an answer's completions."""

    request: Request
    detokenizer: Detokenizer | None
    eos_token_ids: frozenset[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def push(self, token: int, status: int) -> FinishReason | None:
        """Take in the request's newest token; the finish reason if the choice ends with it."""
        if status == STOPPED:
            self.finish_reason = "stop"
            self.stop_reason = None if token in self.eos_token_ids else token
        elif status == EXHAUSTED:
            self.finish_reason = "length"
        if self.detokenizer is not None:
            stop = self.detokenizer.push([token], finished=self.finish_reason is not None)
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
        return CompletionOutput(
            index=self.request.choice,
            text="" if self.detokenizer is None else self.detokenizer.text,
            token_ids=list(self.request.output_token_ids),
            cumulative_logprob=None,
            logprobs=None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


@dataclass
class Answer:
    """One user request with all its choices."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    choices: list[Choice] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish_reason is not None for choice in self.choices)

    def output(self) -> RequestOutput:
        """The answer as it stands now."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[choice.output() for choice in self.choices],
            finished=self.finished,
            num_cached_tokens=self.choices[0].request.num_cached_tokens,
        )
