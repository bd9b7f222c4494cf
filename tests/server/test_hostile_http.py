"""Whatever bytes come in, the server answers in OpenAI's form or closes, and goes on serving."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable

import pytest
from live_server import Live

ServeTiny = Callable[..., Live]

GOOD = json.dumps({"prompt": [5, 6], "max_tokens": 1}).encode()

BODIES = {
    "empty": b"",
    "no JSON": b"hello",
    "half": GOOD[:-3],
    "twice": GOOD + GOOD,
    "a list": b"[1, 2]",
    "a number": b"7",
    "null": b"null",
    "not UTF-8": b'{"prompt": "\xff\xfe\xfa"}',
    "latin-1": '{"prompt": "é"}'.encode("latin-1"),
    "null bytes": b"\x00" * 1000,
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "deep prompt": b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "deep schema": b'{"prompt": [5], "structured_outputs": {"json": ' + b'{"a":' * 900 + b"1" + b"}" * 902,
    "half a surrogate pair": b'{"prompt": [5], "user": "\\ud800", "stop": "\\udfff"}',
    "a huge number": b'{"prompt": [5], "seed": ' + b"9" * 10_000 + b"}",
    "infinity": b'{"prompt": [5], "temperature": 1e999}',
    "not a number": b'{"prompt": [5], "temperature": NaN}',
    "a huge id": b'{"prompt": [99999999999999999999]}',
    "a key twice": b'{"prompt": [5], "prompt": "x", "max_tokens": 0}',
}


def assert_serves(live: Live) -> None:
    assert live.complete(prompt=[5, 6], max_tokens=1).status == 200


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_garbage_is_a_400(tiny: Live, path: str, kind: str) -> None:
    reply = tiny.request("POST", path, BODIES[kind], content_type="application/json")
    assert reply.status == 400, reply.body
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_half_a_surrogate_pair_is_refused_wherever_text_goes(smol: Live) -> None:
    for body in (
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"\\ud800": 1}}',
        b'{"messages": [{"role": "user", "content": "x"}], "\\ud800": 1}',
        b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": '
        b'{"name": "f", "parameters": {"type": "object", "description": "\\ud800"}}}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema", '
        b'"json_schema": {"name": "f", "schema": {"enum": ["\\ud800"]}}}}',
    ):
        reply = smol.request("POST", "/v1/chat/completions", body, content_type="application/json")
        assert reply.status == 400, reply.body


def test_a_body_that_is_too_large_is_a_413(tiny: Live) -> None:
    large = b'{"prompt": "' + b"x" * (2 << 20) + b'"}'
    assert tiny.request("POST", "/v1/completions", large, content_type="application/json").status == 413
    # Also where its length is not told beforehand.
    with socket.create_connection(("127.0.0.1", tiny.port), timeout=120) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        for _ in range(40):
            connection.sendall(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
        connection.sendall(b"0\r\n\r\n")
        assert b" 413 " in connection.recv(100)
    # A body that is announced as far too large is not read at all.
    with socket.create_connection(("127.0.0.1", tiny.port), timeout=120) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 99999999999\r\n\r\n"
        )
        assert b" 413 " in connection.recv(100)
    assert_serves(tiny)


@pytest.mark.parametrize("kind", ["text/plain", "text/json", "application/jsonp", "application/x-www-form-urlencoded"])
def test_a_body_of_another_kind_is_a_415(tiny: Live, kind: str) -> None:
    reply = tiny.request("POST", "/v1/completions", GOOD, content_type=kind)
    assert reply.status == 415
    assert "application/json" in reply.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.x+json"])
def test_every_name_of_json_is_taken(tiny: Live, kind: str) -> None:
    assert tiny.request("POST", "/v1/completions", GOOD, content_type=kind).status == 200


def test_a_client_that_is_refused_before_its_body_has_come_is_told_why(serve_tiny: ServeTiny) -> None:
    live = serve_tiny(api_key=["k"])
    body = b"x" * (15 << 20)  # more than the connection holds on its way
    for _ in range(3):
        assert live.request("POST", "/v1/completions", body, content_type="application/json").status == 401
        reply = live.request("POST", "/v1/completions", body, content_type="text/plain", authorization="Bearer k")
        assert reply.status == 415
    # Where the body does not come the refusal does not wait for it.
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n")
        assert b" 401 " in connection.recv(100)


def test_a_slow_body_is_given_up_and_holds_nobody_up(serve_tiny: ServeTiny) -> None:
    live = serve_tiny(body_timeout=0.5)
    with socket.create_connection(("127.0.0.1", live.port), timeout=120) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
        assert_serves(live)
        assert b" 408 " in connection.recv(100)
    assert_serves(live)


@pytest.mark.parametrize(
    "raw",
    [
        b"garbage\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
    ],
    ids=["text", "version", "TLS", "negative length", "cut short", "long header"],
)
def test_what_is_no_http_ends_alone(tiny: Live, raw: bytes) -> None:
    with socket.create_connection(("127.0.0.1", tiny.port), timeout=120) as connection:
        connection.sendall(raw)
        time.sleep(0.05)
    assert_serves(tiny)


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/completions"), ("DELETE", "/health"), ("GET", "/nothing")])
def test_what_is_no_route_says_so(tiny: Live, method: str, path: str) -> None:
    reply = tiny.request(method, path)
    assert reply.status in (404, 405)
    assert reply.param is None


def test_what_a_client_made_up_adds_no_series_to_the_metrics(tiny: Live) -> None:
    for number in range(5):
        tiny.get(f"/made-up-{number}")
    assert b"made-up" not in tiny.get("/metrics").body


def test_an_id_from_a_client_cannot_break_a_header_or_the_log(tiny: Live) -> None:
    reply = tiny.complete(prompt=[5, 6], max_tokens=1, request_id="a\r\nX-Evil: 1\n☃", user="me\nINFO forged")
    assert reply.status == 200
    assert "x-evil" not in reply.headers
    assert reply.headers["x-request-id"] == "a??X-Evil: 1??"
