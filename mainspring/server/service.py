"""The service apart from HTTP: who may come in, how requests reach the engine, and how they end."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from mainspring.engine.async_llm import AnswerStream, AsyncLLM
from mainspring.engine.errors import RequestError
from mainspring.engine.sampling_params import SamplingParams
from mainspring.engine.updates import Update
from mainspring.server.errors import ApiError, bad_request
from mainspring.server.metrics import ServerMetrics
from mainspring.server.params import refused
from mainspring.server.settings import ServerSettings

logger = logging.getLogger("mainspring.server")


@dataclass
class Prompt:
    """One prompt of a request, and what has come of it."""

    token_ids: Sequence[int]
    text: str | None = None
    stream: AnswerStream | None = None
    cached_tokens: int = 0
    output_tokens: int = 0
    times: dict[int, float] = field(default_factory=dict)


class Service:
    """An engine, and the requests that are being served.

    Args:
        engine: the engine, which may still be loading.
        settings: the limits.
    """

    def __init__(self, engine: AsyncLLM, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = ServerMetrics(engine, settings.served_model_name[0])
        self.started = int(time.time())
        self._draining = False
        self._choices = 0
        self._active: set[Generation] = set()
        self._mean_seconds = 1.0

    @property
    def model_name(self) -> str:
        """The name that answers tell."""
        return self.settings.served_model_name[0]

    @property
    def state(self) -> str:
        """``loading``, ``ready``, ``draining`` or ``failed``."""
        if self.engine.failure is not None:
            return "failed"
        if self._draining:
            return "draining"
        return "ready" if self.engine.is_ready else "loading"

    def refusal(self) -> ApiError | None:
        """Why nothing can be served now, or None."""
        reasons = {
            "loading": "the model is still being loaded; try again in a moment",
            "draining": "the server is shutting down; ask another one",
            "failed": "the engine has stopped; the server has to be started again",
        }
        reason = reasons.get(self.state)
        return None if reason is None else ApiError(503, reason, headers={"Retry-After": "5"})

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served here."""
        if name is not None and name not in self.settings.served_model_name:
            raise ApiError(
                404,
                f"model {name!r} is not served here; ask for {self.model_name!r}",
                param="model",
                code="model_not_found",
            )

    async def start(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        user: str | None = None,
    ) -> Generation:
        """Take in a request; raises ``ApiError`` where there is no room or it can never be served."""
        count = len(prompts) * params.n
        self.make_room(count)
        generation = Generation(self, prompts, params, request_id, user)
        try:
            for prompt in prompts:
                prompt.stream = await self.engine.add(
                    prompt.token_ids, params, request_id=request_id, prompt=prompt.text, priority=priority
                )
        except RequestError as error:
            generation.close("refused")
            raise refused(error) from error
        except BaseException:
            generation.close("abort")
            raise
        generation.begin()
        return generation

    def make_room(self, count: int) -> None:
        """Refuse a request for ``count`` answers where so many may not wait here, or not now: a 400 or a 429."""
        limit = self.engine.llm.core.limits.max_num_seqs + self.settings.max_queue
        if count > limit:
            raise bad_request(f"the request asks for {count} answers > {limit}, all that may wait here; split it")
        if self._choices + count > limit:
            seconds = min(max(math.ceil(self._mean_seconds), 1), 60)
            raise ApiError(
                429,
                f"{self._choices} answers are being made or wait, of at most {limit}; try again in {seconds} s",
                code="queue_full",
                headers={"Retry-After": str(seconds)},
            )

    def opened(self, generation: Generation) -> None:
        """Count a request in."""
        self._choices += generation.num_choices
        self._active.add(generation)

    def closed(self, generation: Generation, seconds: float) -> None:
        """Count a request out."""
        self._choices -= generation.num_choices
        self._active.discard(generation)
        self._mean_seconds += 0.1 * (seconds - self._mean_seconds)

    def drain(self, grace: float) -> None:
        """Take in nothing more; what is not finished after ``grace`` seconds is broken off and told so."""
        self._draining = True
        asyncio.get_running_loop().call_later(grace, self._break_off)

    def _break_off(self) -> None:
        for generation in list(self._active):
            generation.fail(ApiError(503, "the server is shutting down; ask another one"))


class Generation:
    """One request under way: its prompts' streams as one, its times, its end."""

    def __init__(
        self, service: Service, prompts: Sequence[Prompt], params: SamplingParams, request_id: str, user: str | None
    ) -> None:
        self.service = service
        self.prompts = prompts
        self.params = params
        self.request_id = request_id
        self.user = user
        self.arrival = time.perf_counter()
        self._timer: asyncio.TimerHandle | None = None
        self._open = True
        self._tasks: list[asyncio.Task[None]] = []
        service.opened(self)

    @property
    def num_choices(self) -> int:
        """Answers in all."""
        return len(self.prompts) * self.params.n

    def begin(self) -> None:
        """Start the clock of ``request_timeout``, and count what came in."""
        timeout = self.service.settings.request_timeout
        if timeout is not None:
            error = ApiError(504, f"the answer was not finished within request_timeout {timeout:g} s; ask for less")
            self._timer = asyncio.get_running_loop().call_later(timeout, self.fail, error)
        metrics = self.service.metrics
        metrics.choices.observe(self.params.n)
        for prompt in self.prompts:
            metrics.prompt_length.observe(len(prompt.token_ids))
            metrics.prompt_tokens.inc(len(prompt.token_ids))

    def fail(self, error: ApiError) -> None:
        """Break off what is not finished; whoever reads gets ``error``."""
        for prompt in self.prompts:
            if prompt.stream is not None:
                prompt.stream.fail(error)

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """What comes, with the number of its prompt, until every prompt's answers have ended."""
        if len(self.prompts) == 1:
            async for update in self._stream(0):
                self._observe(self.prompts[0], update)
                yield 0, update
            return
        queue: asyncio.Queue[tuple[int, Update | BaseException | None]] = asyncio.Queue()
        self._tasks = [asyncio.create_task(self._forward(place, queue)) for place in range(len(self.prompts))]
        waiting = len(self._tasks)
        while waiting:
            place, item = await queue.get()
            if item is None:
                waiting -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                self._observe(self.prompts[place], item)
                yield place, item

    async def _forward(self, place: int, queue: asyncio.Queue[tuple[int, Update | BaseException | None]]) -> None:
        try:
            async for update in self._stream(place):
                queue.put_nowait((place, update))
            queue.put_nowait((place, None))
        except Exception as error:
            queue.put_nowait((place, error))

    def _stream(self, place: int) -> AnswerStream:
        stream = self.prompts[place].stream
        if stream is None:
            raise RuntimeError(f"request {self.request_id} was not taken in")
        return stream

    def _observe(self, prompt: Prompt, update: Update) -> None:
        metrics = self.service.metrics
        if not prompt.times:
            metrics.first_token.observe(update.at - self.arrival)
        prompt.cached_tokens = update.num_cached_tokens
        for choice in update.choices:
            count = len(choice.token_ids)
            before = prompt.times.get(choice.index)
            prompt.times[choice.index] = update.at
            prompt.output_tokens += count
            metrics.generation_tokens.inc(count)
            if before is not None and count:
                for _ in range(count):
                    metrics.inter_token.observe((update.at - before) / count)
            if choice.finish_reason is not None:
                metrics.finished(choice.finish_reason)

    def close(self, outcome: str) -> None:
        """End what is not finished, and tell the log; a second call changes nothing."""
        if not self._open:
            return
        self._open = False
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        for prompt in self.prompts:
            if prompt.stream is not None:
                prompt.stream.close()
        seconds = time.perf_counter() - self.arrival
        self.service.closed(self, seconds)
        tokens = sum(prompt.output_tokens for prompt in self.prompts)
        if outcome == "finished":
            metrics = self.service.metrics
            metrics.answer.observe(seconds)
            metrics.answer_length.observe(tokens / self.num_choices)
            if tokens > self.num_choices:
                metrics.per_token.observe(seconds * self.num_choices / tokens)
        else:
            self.service.metrics.finished(outcome)
        logger.info(
            "%s %s: %d prompt tokens, %d answer tokens, %.3f s, user %r",
            self.request_id,
            outcome,
            sum(len(prompt.token_ids) for prompt in self.prompts),
            tokens,
            seconds,
            self.user,
        )
