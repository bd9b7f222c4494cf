"""Sending answers: whole, or as server-sent events; either way a client that goes away ends its request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from fastapi import Response

from mainspring.engine.errors import EngineError, RequestError
from mainspring.server.answers import Writer
from mainspring.server.errors import ApiError, dumps
from mainspring.server.middleware import send_error
from mainspring.server.params import refused
from mainspring.server.service import Generation

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

logger = logging.getLogger("mainspring.server")

DONE = b"data: [DONE]\n\n"


class AnswerResponse(Response):
    """The answer to a request that was taken in.

    Args:
        generation: the request; it is closed when this response has been sent, or cannot be.
        writer: what makes the answer of its updates.
        stream: whether to send events as the answer grows.
        include_usage: whether a stream closes with a chunk of usage.
    """

    def __init__(self, generation: Generation, writer: Writer, *, stream: bool, include_usage: bool) -> None:
        super().__init__()
        self._generation = generation
        self._writer = writer
        self._stream = stream
        self._include_usage = include_usage
        self._outcome = "abort"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; stop where the client has gone."""
        work = asyncio.create_task(self._send_stream(send) if self._stream else self._send_whole(send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
        finally:
            self._generation.close(self._outcome)
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _send_whole(self, send: Send) -> None:
        try:
            async for place, update in self._generation.updates():
                self._writer.take(place, update)
            self._outcome = "finished"
            body = dumps(self._writer.whole())
        except Exception as error:
            self._outcome = "error"
            await send_error(send, told(error))
            return
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", _header(self._generation.request_id)),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _send_stream(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            (b"x-request-id", _header(self._generation.request_id)),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for event in self._events():
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            async for place, update in self._generation.updates():
                chunks = self._writer.chunks(place, update)
                if chunks:
                    yield b"".join(b"data: %b\n\n" % dumps(chunk) for chunk in chunks)
            self._outcome = "finished"
            last = b"data: %b\n\n" % dumps(self._writer.usage_chunk()) if self._include_usage else b""
            yield last + DONE
        except Exception as error:
            self._outcome = "error"
            yield b"data: %b\n\n" % dumps(told(error).body()) + DONE


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def told(error: Exception) -> ApiError:
    """What a client is told of an error; what the server did not foresee goes to the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return refused(error)
    logger.error("a request failed", exc_info=error)
    text = str(error) if isinstance(error, EngineError) else "the server failed in a way that it did not foresee"
    return ApiError(500, f"{text}; the server's log says more")


def _header(text: str) -> bytes:
    """A text that came from a client, as a header may hold it."""
    return "".join(character if " " <= character <= "~" else "?" for character in text).encode()
