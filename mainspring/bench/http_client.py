"""A small HTTP/1.1 client on asyncio, which can also do what no client should: go away midway, or send anything."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Address:
    """Where a server listens; ``prefix`` stands before every path."""

    host: str
    port: int
    prefix: str = ""

    @classmethod
    def of(cls, url: str) -> Address:
        """From ``http://host:port``. Raises ``ValueError`` for anything else."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is not the address of an HTTP server; write http://127.0.0.1:8000")
        return cls(parts.hostname, parts.port or 80, parts.path.rstrip("/").removesuffix("/v1"))


class Response:
    """A response whose body is still to be read."""

    def __init__(self, status: int, headers: Mapping[str, str], reader: asyncio.StreamReader) -> None:
        self.status = status
        self.headers = headers
        self._reader = reader

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        if "chunked" in self.headers.get("transfer-encoding", ""):
            while size := int(await self._reader.readline(), 16):
                yield await self._reader.readexactly(size)
                await self._reader.readexactly(2)
            return
        left = int(self.headers.get("content-length", 1 << 62))
        while left and (piece := await self._reader.read(min(left, 1 << 16))):
            left -= len(piece)
            yield piece

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([piece async for piece in self.pieces()])

    async def events(self) -> AsyncIterator[tuple[float, Any]]:
        """Server-sent events as (seconds of arrival, data), up to ``[DONE]``."""
        rest = b""
        async for piece in self.pieces():
            now = time.perf_counter()
            *whole, rest = (rest + piece).split(b"\n\n")
            for event in whole:
                data = event.removeprefix(b"data: ")
                if data == b"[DONE]":
                    return
                if data:
                    yield now, json.loads(data)


@asynccontextmanager
async def opened(
    address: Address, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> AsyncIterator[Response]:
    """Send one request on a connection of its own; leaving the block closes it, whatever has been read.

    Raises ``OSError`` or ``asyncio.IncompleteReadError`` where the server does not answer.
    """
    reader, writer = await asyncio.open_connection(address.host, address.port, limit=1 << 20)
    try:
        writer.write(_request(address, method, path, body, headers or {}))
        await writer.drain()
        first, *rest = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        pairs = [line.split(":", 1) for line in rest if ":" in line]
        yield Response(int(first.split(" ")[1]), {name.lower(): value.strip() for name, value in pairs}, reader)
    finally:
        writer.transport.abort()


async def abandon(address: Address, path: str, body: bytes, after: float) -> None:
    """POST a request, and go away ``after`` seconds without having read anything."""
    _, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(_request(address, "POST", path, body, {}))
        await writer.drain()
        await asyncio.sleep(after)
    finally:
        writer.transport.abort()


def _request(address: Address, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    lines = [f"{method} {address.prefix}{path} HTTP/1.1", f"Host: {address.host}:{address.port}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"] if method == "POST" else []
    return "\r\n".join([*lines, "", ""]).encode() + body


async def get(address: Address, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
    """Status and body of a GET."""
    async with opened(address, "GET", path, headers=headers) as response:
        return response.status, await response.read()
