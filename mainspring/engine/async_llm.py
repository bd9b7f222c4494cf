"""An engine that runs in a thread of its own, for programs that are built on asyncio.

The thread steps as long as there is work. Between two steps it takes in what event loops have asked for, and after each
step it hands all that is new to each event loop in one call.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from mainspring.engine.answers import Answer
from mainspring.engine.conversations import Messages
from mainspring.engine.errors import EngineError
from mainspring.engine.llm import LLM, Prompt
from mainspring.engine.outputs import RequestOutput
from mainspring.engine.sampling_params import SamplingParams
from mainspring.engine.stats import EngineStats
from mainspring.engine.updates import Told, Update

logger = logging.getLogger("mainspring")

Result = TypeVar("Result")

#: Seconds for which a snapshot of the engine's statistics serves while it is busy.
STATS_AGE = 0.5


class AnswerStream:
    """One answer on its way to an event loop: an async iterator of ``Update``, which ends with a finished one.

    What came while nobody read is given as several updates in turn. An update whose ``error`` is set raises it.
    """

    def __init__(self, engine: AsyncLLM, request_id: str) -> None:
        self.request_id = request_id
        self.answer: Answer | None = None
        self.loop = asyncio.get_running_loop()
        self.told: Told | None = None
        self._engine = engine
        self._updates: deque[Update] = deque()
        self._news = asyncio.Event()
        self._over = False

    def push(self, update: Update) -> None:
        """Take in an update; on the stream's event loop only."""
        if not self._over:
            self._updates.append(update)
            self._news.set()

    def fail(self, error: BaseException) -> None:
        """End the request, and let whoever reads the stream get ``error``; on the stream's event loop only."""
        self.push(Update((), time.perf_counter(), finished=True, error=error))
        self._engine.abort(self)

    def close(self) -> None:
        """End the request where it has not ended yet; what it holds is free after the step under way."""
        if not self._over:
            self._over = True
            self._engine.abort(self)

    def __aiter__(self) -> AnswerStream:
        return self

    async def __anext__(self) -> Update:
        while not self._updates:
            if self._over:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        update = self._updates.popleft()
        if update.error is not None:
            self._over = True
            raise update.error
        if update.finished:
            self._over = True
        return update


class AsyncLLM:
    """A model that answers while an event loop goes on.

    Args:
        model: see ``LLM``.
        options: see ``LLM``.
        prepare: called in the engine's thread with the new ``LLM``, before it counts as ready.

    The model is loaded in the engine's thread, from the moment the object is made; ``await ready()`` waits for it.
    Usable as an async context manager.
    """

    def __init__(self, model: str, *, prepare: Callable[[LLM], None] | None = None, **options: Any) -> None:
        self._make: Callable[[], LLM] = partial(LLM, model, **options)
        self._prepare = prepare
        self._made: Future[LLM] = Future()
        self._condition = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._closing = False
        self.closed = False
        """Whether the engine ended because it was asked to."""
        self._live: dict[str, AnswerStream] = {}
        self._ids = itertools.count()
        self._stats: tuple[float, EngineStats | None] = (0.0, None)
        self._text_worker = ThreadPoolExecutor(1, thread_name_prefix="mainspring-text")
        self.failure: BaseException | None = None
        """What stopped the engine for good, or None."""
        self._thread = threading.Thread(target=self._run, name="mainspring-engine", daemon=True)
        self._thread.start()

    # -- for event loops -----------------------------------------------------------------------------------

    async def ready(self) -> LLM:
        """Wait until the model is loaded and its step recorded; raises what went wrong there."""
        return await asyncio.shield(asyncio.wrap_future(self._made))

    @property
    def is_ready(self) -> bool:
        """Whether requests can be served."""
        return self._made.done() and self.failure is None

    @property
    def llm(self) -> LLM:
        """The engine itself, once it is ready. Raises ``EngineError`` before."""
        if not self._made.done():
            raise EngineError("the model is still being loaded; await ready() first")
        return self._made.result()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Complete one prompt, yielding the answer so far (cumulative) whenever it has grown.

        Leaving the iteration, by ``break``, cancellation or an exception, ends the request (for ``break`` where the
        iterator is closed or dropped).
        """
        text, token_ids = await self.encode(prompt)
        params = sampling_params or self.llm.default_params()
        stream = await self.add(token_ids, params, request_id=request_id, prompt=text)
        try:
            async for _ in stream:
                if stream.answer is not None:
                    yield stream.answer.output()
        finally:
            stream.close()

    async def encode(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        """A prompt's text, where it has one, and its token ids. Raises ``RequestError``."""
        llm = await self.ready()
        return await self.in_text_thread(lambda: llm._encode(prompt))

    async def encode_chat(self, messages: Messages) -> tuple[str, list[int]]:
        """A conversation as the chat template writes it, and its token ids. Raises ``RequestError``."""
        llm = await self.ready()
        return await self.in_text_thread(lambda: llm._encode_chat(messages))

    async def in_text_thread(self, function: Callable[[], Result]) -> Result:
        """Run what works on text in the one thread that uses the tokenizer's encoder."""
        return await asyncio.get_running_loop().run_in_executor(self._text_worker, function)

    async def add(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        prompt: str | None = None,
        priority: int = 0,
    ) -> AnswerStream:
        """Take in one request; its stream has to be read to its end, or closed.

        Raises ``RequestError`` where it can never be served, ``EngineError`` where the engine has stopped.
        """
        llm = await self.ready()
        if params.structured_outputs is not None:
            await asyncio.get_running_loop().run_in_executor(None, llm.core.check, params)
        number = str(next(self._ids))
        stream = AnswerStream(self, request_id or number)

        def admit() -> None:
            answer = llm.core.add(number, prompt_token_ids, params, prompt=prompt, priority=priority)
            stream.answer, stream.told = answer, Told(answer)
            self._live[number] = stream

        admitted = self._call(admit)
        try:
            await asyncio.wrap_future(admitted)
        except asyncio.CancelledError:
            # It may be admitted already, or be on its way.
            admitted.cancel()
            stream.close()
            raise
        return stream

    def abort(self, stream: AnswerStream) -> None:
        """End a request, from any thread; see ``AnswerStream.close``."""

        def end() -> None:
            if stream.answer is not None:
                self._live.pop(stream.answer.request_id, None)
                self.llm.core.abort(stream.answer)

        self._submit(end)

    def stats(self) -> EngineStats | None:
        """What the engine has done, as of at most a moment ago; None until it is ready."""
        return self._stats[1]

    async def aclose(self) -> None:
        """End every request, give the memory back and end the thread."""
        await asyncio.get_running_loop().run_in_executor(None, self.close)

    def close(self) -> None:
        """``aclose`` for programs without an event loop."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._interrupt()
        self._thread.join()
        self._text_worker.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> AsyncLLM:
        await self.ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # -- the engine's thread -------------------------------------------------------------------------------

    def _submit(self, command: Callable[[], None]) -> None:
        with self._condition:
            self._commands.append(command)
            self._condition.notify()
        self._interrupt()

    def _interrupt(self) -> None:
        """Ask an engine that repeats steps by itself to come back for news, where it is of that kind."""
        if self._made.done() and self._made.exception() is None:
            interrupt = getattr(self._made.result().core, "interrupt", None)
            if interrupt is not None:
                interrupt()

    def _call(self, function: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        self._submit(run)
        if self.failure is not None and not future.done():
            self._drain()
        return future

    def _run(self) -> None:
        try:
            llm = self._make()
            try:
                if self._prepare is not None:
                    self._prepare(llm)
            except BaseException:
                llm.close()
                raise
        except BaseException as error:
            self.failure = error
            self._made.set_exception(error)
            return
        self._take_stats(llm)
        self._made.set_result(llm)
        try:
            while self._wait_for_work(llm):
                with llm.core.brisk():
                    for command in self._take_commands():
                        command()
                    self._step(llm)
                    self._take_stats(llm, idle=not llm.core.has_work())
        except BaseException as error:
            logger.exception("the engine has stopped")
            self.failure = error
        finally:
            self.closed = self.failure is None
            self.failure = self.failure or EngineError("the engine was closed")
            self._fail_all(self.failure)
            self._drain()
            llm.close()

    def _wait_for_work(self, llm: LLM) -> bool:
        with self._condition:
            while not (self._closing or self._commands or llm.core.has_work()):
                self._condition.wait()
            return not self._closing

    def _take_commands(self) -> list[Callable[[], None]]:
        with self._condition:
            commands = list(self._commands)
            self._commands.clear()
        return commands

    def _drain(self) -> None:
        """Run what is still asked for: after the engine has stopped, each such call is told so."""
        for command in self._take_commands():
            try:
                command()
            except Exception as error:
                logger.debug("ignored after the engine has stopped: %r", error)

    def _step(self, llm: LLM) -> None:
        if not llm.core.has_work():
            return
        try:
            touched = llm.core.step()
        except Exception as error:
            # Every request under way was aborted. The engine goes on unless it says that it cannot.
            logger.exception("a step failed")
            self._fail_all(error)
            llm.core._check_alive()
            return
        now = time.perf_counter()
        batches: dict[asyncio.AbstractEventLoop, list[tuple[AnswerStream, Update]]] = {}
        for answer in touched:
            stream = self._live.get(answer.request_id)
            if stream is None or stream.told is None:
                continue
            update = stream.told.update(now)
            if update.finished or update.error is not None:
                del self._live[answer.request_id]
            batches.setdefault(stream.loop, []).append((stream, update))
        self._deliver(batches)

    def _deliver(self, batches: dict[asyncio.AbstractEventLoop, list[tuple[AnswerStream, Update]]]) -> None:
        for loop, batch in batches.items():
            try:
                loop.call_soon_threadsafe(_push_all, batch)
            except RuntimeError:  # the loop is closed: nobody waits for these any more
                for stream, _ in batch:
                    self.abort(stream)

    def _fail_all(self, error: BaseException) -> None:
        batches: dict[asyncio.AbstractEventLoop, list[tuple[AnswerStream, Update]]] = {}
        for stream in self._live.values():
            update = Update((), time.perf_counter(), finished=True, error=EngineError(f"a step failed: {error}"))
            batches.setdefault(stream.loop, []).append((stream, update))
        self._live.clear()
        self._deliver(batches)

    def _take_stats(self, llm: LLM, idle: bool = True) -> None:
        now = time.perf_counter()
        if idle or now - self._stats[0] > STATS_AGE:
            self._stats = (now, llm.stats())


def _push_all(batch: Sequence[tuple[AnswerStream, Update]]) -> None:
    for stream, update in batch:
        stream.push(update)
