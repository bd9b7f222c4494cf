"""What every request passes before it reaches a route: the key, the service's state, the size and pace of its body."""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from mainspring.server.errors import ApiError, dumps

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Paths that are served without a key, and while the model is being loaded.
OPEN_PATHS = ("/", "/health", "/ready", "/metrics", "/version", "/openapi.json", "/favicon.ico")
#: The other paths, for counting.
SERVED_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize")


_JSON = re.compile(rb"\s*application/([^;,\s]+\+)?json\s*(;|$)", re.IGNORECASE)
#: Bytes beyond the limit that are read and thrown away, so that a client that sends first and reads then is told.
DISCARDED_BYTES = 64 << 20
#: Seconds for which a body is still read, and thrown away, after its refusal was sent: where a connection is closed
#: while data comes, the client may get a reset in place of the refusal.
LINGER = 5.0


class Guard:
    """Answers instead of the app where a request may not pass.

    Args:
        app: what is behind it.
        api_keys: the keys that are accepted; none means that no key is asked for.
        refuse: gives an ``ApiError`` while requests cannot be served.
        max_body_bytes, body_timeout: limits of a body, in bytes and seconds.
        responded: told the path and the status of every response; paths that clients made up are ``other``.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Sequence[str],
        refuse: Callable[[], ApiError | None],
        max_body_bytes: int,
        body_timeout: float,
        responded: Callable[[str, int], None] = lambda path, status: None,
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._refuse = refuse
        self._max_body_bytes = max_body_bytes
        self._body_timeout = body_timeout
        self._responded = responded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, or answer it."""
        if scope["type"] == "http":
            send = self._counting(scope["path"], send)
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
            return
        headers = {name: value for name, value in scope["headers"]}
        receive = incoming = _Incoming(receive)
        try:
            self._check_key(headers.get(b"authorization", b""))
            refusal = self._refuse()
            if refusal is not None:
                raise refusal
            if scope["method"] == "POST":
                if not _JSON.match(headers.get(b"content-type", b"")):
                    raise ApiError(415, "the body has to be JSON; send the header Content-Type: application/json")
                receive = await self._whole_body(headers, receive)
        except ApiError as error:
            await send_error(send, error, rest=incoming)
            return
        except ConnectionError:
            return
        await self._app(scope, receive, send)

    def _counting(self, path: str, send: Send) -> Send:
        counted = path if path in (*OPEN_PATHS, *SERVED_PATHS) else "other"

        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._responded(counted, message["status"])
            await send(message)

        return count

    def _check_key(self, authorization: bytes) -> None:
        if not self._keys:
            return
        scheme, _, key = authorization.partition(b" ")
        key = key.strip()
        matches = [hmac.compare_digest(key, known) for known in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(
                401,
                "the API key is missing or wrong; send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _whole_body(self, headers: dict[bytes, bytes], receive: Receive) -> Receive:
        """Read the body within its limits; what gives it to the app, and after it what comes from the client."""
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self._max_body_bytes + DISCARDED_BYTES:
            raise self._too_large()
        try:
            body = await asyncio.wait_for(self._read(receive), self._body_timeout)
        except TimeoutError:
            raise ApiError(
                408, f"the body did not come within {self._body_timeout:g} seconds; send it faster"
            ) from None
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        return replay

    async def _read(self, receive: Receive) -> bytes:
        body, length = bytearray(), 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError
            piece = message.get("body", b"")
            length += len(piece)
            if length <= self._max_body_bytes:
                body += piece
            elif length > self._max_body_bytes + DISCARDED_BYTES:
                raise self._too_large()
            if not message.get("more_body", False):
                break
        if length > self._max_body_bytes:
            raise self._too_large()
        return bytes(body)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_body_bytes} bytes; send less")


class _Incoming:
    """Gives on what comes from the client, and knows whether all of the body has come."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.whole = False

    async def __call__(self) -> Message:
        message = await self._receive()
        self.whole = self.whole or not message.get("more_body", False)
        return message

    async def discard(self) -> None:
        """Read the rest of the body for nothing, as far as it is bounded."""
        length = 0
        while not self.whole and length <= DISCARDED_BYTES:
            length += len((await self()).get("body", b""))


async def send_error(send: Send, error: ApiError, *, rest: _Incoming | None = None) -> None:
    """Send an error as a whole response. With ``rest`` the connection is closed, once the rest of the body has come."""
    body = dumps(error.body())
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    if rest is not None:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": rest is not None})
    if rest is not None:
        with suppress(TimeoutError):
            await asyncio.wait_for(rest.discard(), LINGER)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
