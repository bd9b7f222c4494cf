"""From the tokens of a step to the answers: block accounting, text, stop strings, log-probabilities, the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from mainspring.engine.answers import Answer, Choice
from mainspring.engine.detokenizer import TokenDecoder
from mainspring.engine.errors import EngineError, RequestError
from mainspring.engine.intake import Intake
from mainspring.engine.launched import PromptRead, RowResult, row_results
from mainspring.engine.logprobs import TokenText, unpack_logprobs
from mainspring.engine.request import FinishReason, Request
from mainspring.engine.scheduler import Scheduler
from mainspring.engine.step import EXHAUSTED, IDLE, RUNNING, STOPPED

#: Why an answer ends, by the status that its last step left.
END_REASONS: Mapping[int, FinishReason] = {STOPPED: "stop", EXHAUSTED: "length"}
#: Answers that got something, by request id.
Touched = dict[str, Answer]


class Untold(NamedTuple):
    """Tokens that are accounted for and whose text is still to be made; ``status`` is the last one's."""

    choice: Choice
    tokens: Sequence[int]
    status: int


class Delivery:
    """Hands out tokens in the order in which their steps were launched.

    Attributes:
        choices: the open requests, each with its answer and its place there.
        tokens: how many were handed out.
    """

    def __init__(self, scheduler: Scheduler, intake: Intake, decoder: TokenDecoder | None) -> None:
        self.choices: dict[Request, tuple[Answer, Choice]] = {}
        self.tokens = 0
        self._scheduler = scheduler
        self._intake = intake
        self._decoder = decoder
        self._untold: list[Untold] = []

    def take(self, results: Iterable[RowResult], touched: Touched) -> list[Request]:
        """Account for the tokens of one step; text that nothing depends on is left to `tell`.

        A row whose request has ended is passed over. Returns the requests that ended with a stop string, of which the
        device does not know.

        Raises:
            EngineError: the step did nothing for a request that has not ended.
        """
        ended_here: list[Request] = []
        for request, token, status, logprobs in results:
            entry = self.choices.get(request)
            if entry is None:
                continue
            answer, choice = entry
            if status == IDLE:
                raise EngineError(f"the step did nothing for request {request.request_id}, which has not ended")
            self._scheduler.append_token(request, token)
            self.tokens += 1
            touched[answer.request_id] = answer
            if logprobs is not None and request.params.logprobs is not None:
                k = self._intake.logprobs_count(request.params.logprobs)
                choice.push_logprobs(unpack_logprobs(logprobs, token, k, self._token_text(request)), token)
            reason: FinishReason | None
            if choice.watches_text:
                reason = choice.push((token,), status)
                if reason is not None and status not in (STOPPED, EXHAUSTED):
                    ended_here.append(request)
            else:
                reason = END_REASONS.get(status)
                self._untold.append(Untold(choice, (token,), status))
            if reason is not None:
                self._scheduler.finish(request, reason)
                del self.choices[request]
        return ended_here

    def take_steps(self, requests: Sequence[Request], records: np.ndarray, touched: Touched) -> list[Request]:
        """`take` for the ``records`` ``[steps, rows or more, 2 or more]`` int32 of a loop: the same outcome, at the
        price of a call for each row instead of each token, where no row's text or log-probabilities are asked for."""
        entries = [self.choices.get(request) for request in requests]
        if any(
            entry is not None and (entry[1].watches_text or entry[1].request.params.logprobs is not None)
            for entry in entries
        ):
            ended_here: list[Request] = []
            for record in records:
                ended_here += self.take(row_results(requests, record), touched)
            return ended_here
        finished: list[tuple[int, int, Request, FinishReason]] = []
        steps = len(records)
        rows = records[:, : len(requests), :2].transpose(1, 2, 0).tolist()
        for row, (request, entry, (tokens, statuses)) in enumerate(zip(requests, entries, rows, strict=True)):
            if entry is None:
                continue
            answer, choice = entry
            if statuses.count(RUNNING) != steps:
                last = next(index for index, status in enumerate(statuses) if status != RUNNING)
                if statuses[last] == IDLE:
                    raise EngineError(f"the step did nothing for request {request.request_id}, which has not ended")
                tokens, statuses = tokens[: last + 1], statuses[: last + 1]
                finished.append((last, row, request, END_REASONS[statuses[last]]))
            self._scheduler.append_tokens(request, tokens)
            self.tokens += len(tokens)
            touched[answer.request_id] = answer
            self._untold.append(Untold(choice, tokens, statuses[-1]))
        for _, _, request, reason in sorted(finished, key=lambda end: end[:2]):  # as the device ended them
            self._scheduler.finish(request, reason)
            del self.choices[request]
        return []

    def tell(self) -> None:
        """Make the text of what was taken. Nothing is scheduled by it, so the next step is launched before."""
        untold, self._untold = self._untold, []
        for choice, tokens, status in untold:
            choice.push(tokens, status)

    def take_prompt(self, read: PromptRead) -> None:
        """Hand out log-probabilities of a prompt's tokens."""
        entry, wanted = self.choices.get(read.request), read.request.params.prompt_logprobs
        if entry is None or wanted is None:
            return
        k, told, prompt = self._intake.logprobs_count(wanted), entry[0].prompt_logprobs, entry[0].prompt_token_ids
        text = self._token_text(read.request)
        for position, row in enumerate(read.packed.wait(), start=read.start):
            told[position] = unpack_logprobs(row, prompt[position], k, text)
        read.request.prompt_logprobs_due = told[-1] is None

    def fail(self, failures: Mapping[Request, RequestError], touched: Touched) -> None:
        """End the answers whose own functions failed."""
        for request, error in failures.items():
            if request in self.choices:
                answer, _ = self.choices[request]
                touched[answer.request_id] = answer
                answer.error = error
                self.end(answer)

    def end(self, answer: Answer) -> list[Request]:
        """End an answer from outside; the requests that this ended."""
        self.tell()
        ended = []
        for choice in answer.choices:
            if choice.finish_reason is None:
                self._scheduler.abort(choice.request)
                self.choices.pop(choice.request, None)
                choice.end("abort")
                ended.append(choice.request)
        return ended

    def end_all(self) -> list[Answer]:
        """End every open choice; the scheduler is the caller's to clear. Returns their answers, one for each choice."""
        for _, choice in self.choices.values():
            choice.end("abort")
        answers = [answer for answer, _ in self.choices.values()]
        self.choices.clear()
        untold, self._untold = self._untold, []
        for choice, tokens, status in untold:
            with suppress(Exception):  # which may be what everything is ended for
                choice.push(tokens, status)
            choice.end("abort")
        return answers

    def _token_text(self, request: Request) -> TokenText:
        decoder = self._decoder
        if decoder is None or not request.params.detokenize:
            return lambda token: None
        return lambda token: decoder.text([token], at_start=False)
