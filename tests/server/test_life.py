"""Requests end when they should, and leave nothing; the service begins and ends in order."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from live_server import Live, Reply

from mainspring.engine.errors import SettingsError
from mainspring.server.settings import ServerSettings

ServeTiny = Callable[..., Live]
LONG: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True}


def open_request(live: Live, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", live.port), timeout=60)
    connection.sendall(head.encode() + raw)
    return connection


def slow_steps(
    live: Live, seconds: float, monkeypatch: pytest.MonkeyPatch, held_from: int | None = None
) -> tuple[list[int], threading.Event]:
    """Make each step last, and count them; from one on they wait until the event is set."""
    core, steps, go_on = live.engine.llm.core, [0], threading.Event()
    step = core.step

    def slow() -> Any:
        steps[0] += 1
        time.sleep(seconds)
        if held_from is not None and steps[0] >= held_from:
            go_on.wait(120)
        return step()

    monkeypatch.setattr(core, "step", slow)
    return steps, go_on


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_request_within_two_steps(
    serve_tiny: ServeTiny, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    live = serve_tiny()
    steps, go_on = slow_steps(live, 0.01, monkeypatch, held_from=4)
    connection = open_request(live, {**LONG, "stream": stream, "n": 2})
    if stream:
        while b"data: " not in connection.recv(4096):
            pass
    live.wait_for(lambda: steps[0] == 4)
    connection.close()
    live.wait_for(lambda: len(live.engine._commands) > 0)  # the server has seen it
    go_on.set()
    live.wait_for(lambda: live.is_idle)
    assert steps[0] - 4 <= 2
    live.wait_for(lambda: b'finished_reason="abort"' in live.get("/metrics").body)


def test_a_client_that_goes_away_while_it_waits_leaves_the_queue(
    serve_tiny: ServeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = serve_tiny(max_num_seqs=1)
    slow_steps(live, 0.1, monkeypatch)
    first = open_request(live, {**LONG, "stream": True})
    live.wait_for(lambda: live.engine.llm.core.scheduler.num_running == 1)
    second = open_request(live, LONG)
    live.wait_for(lambda: live.engine.llm.core.scheduler.num_waiting == 1)
    second.close()
    live.wait_for(lambda: live.engine.llm.core.scheduler.num_waiting == 0)
    assert live.engine.llm.core.scheduler.num_running == 1
    first.close()
    live.wait_for(lambda: live.is_idle)


def test_a_full_queue_is_a_429_that_says_when_to_come_back(
    serve_tiny: ServeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = serve_tiny(max_num_seqs=1, max_queue=1)
    slow_steps(live, 0.1, monkeypatch)
    held = [open_request(live, {**LONG, "stream": True}) for _ in range(2)]
    live.wait_for(lambda: live.service._choices == 2)
    reply = live.complete(prompt=[5])
    assert (reply.status, reply.json()["error"]["code"]) == (429, "queue_full")
    assert 1 <= int(reply.headers["retry-after"]) <= 60
    for connection in held:
        connection.close()
    live.wait_for(lambda: live.is_idle and live.service._choices == 0)
    assert live.complete(prompt=[5]).status == 200
    too_many = live.complete(prompt=[[5]] * 3)
    assert too_many.status == 400


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_takes_too_long_is_broken_off_and_told_so(
    serve_tiny: ServeTiny, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    live = serve_tiny(request_timeout=0.3)
    slow_steps(live, 0.05, monkeypatch)
    reply = live.complete(**LONG, stream=stream)
    if stream:
        assert reply.status == 200
        assert reply.events[-2]["error"]["type"] == "timeout_error"
        assert reply.events[-1] == "[DONE]"
    else:
        assert (reply.status, reply.json()["error"]["type"]) == (504, "timeout_error")
    live.wait_for(lambda: live.is_idle)


def test_running_answers_finish_when_the_server_is_to_end(
    serve_tiny: ServeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = serve_tiny(shutdown_grace=60.0)
    slow_steps(live, 0.1, monkeypatch)
    replies: list[Reply] = []
    threads = [
        threading.Thread(target=lambda s=stream: replies.append(live.complete(**{**LONG, "max_tokens": 40}, stream=s)))
        for stream in (False, True)
    ]
    for thread in threads:
        thread.start()
    live.wait_for(lambda: live.engine.llm.core.scheduler.num_running == 2)
    live.stop()
    for thread in threads:
        thread.join(120)
    assert [reply.status for reply in replies] == [200, 200]
    whole = next(reply for reply in replies if reply.headers["content-type"] == "application/json")
    assert whole.json()["usage"]["completion_tokens"] == 40
    with pytest.raises(OSError):
        live.get("/health")


def test_what_does_not_finish_within_the_grace_is_told_so(
    serve_tiny: ServeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = serve_tiny(shutdown_grace=0.2)
    slow_steps(live, 0.1, monkeypatch)
    replies: list[Reply] = []
    thread = threading.Thread(target=lambda: replies.append(live.complete(**LONG, stream=True)))
    thread.start()
    live.wait_for(lambda: live.engine.llm.core.scheduler.num_running == 1)
    live.stop()
    thread.join(120)
    assert replies[0].events[-2]["error"]["type"] == "service_unavailable_error"


def test_the_port_answers_while_the_model_is_being_loaded(
    serve_tiny: ServeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    import live_server

    go_on = threading.Event()
    prepare = live_server.prepare_engine
    monkeypatch.setattr(live_server, "prepare_engine", lambda llm: go_on.wait(60) and prepare(llm))
    live = serve_tiny(wait=False)
    live.wait_for(lambda: live.server.started)
    assert [live.get(path).status for path in ("/health", "/ready", "/version", "/metrics")] == [503, 503, 200, 200]
    reply = live.complete(prompt=[5])
    assert (reply.status, reply.headers["retry-after"]) == (503, "5")
    go_on.set()
    live.wait_for(lambda: live.get("/ready").status == 200)
    assert live.get("/health").json() == {"status": "ready"}
    core = live.engine.llm.core
    for runner in core.runner.runners.values():  # both steps were recorded before it said that it is ready
        assert set(runner.counters.captures) == set(core.limits.ladder.sizes)


def test_a_step_that_fails_is_a_500_and_the_server_goes_on(
    serve_tiny: ServeTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = serve_tiny()
    monkeypatch.setattr(live.engine.llm.core.runner, "launch", lambda plan: 1 / 0)
    assert live.complete(prompt=[5]).status == 500
    streamed = live.complete(prompt=[5], stream=True).events
    assert streamed[0]["error"]["type"] == "server_error"
    monkeypatch.undo()
    assert live.complete(prompt=[5]).status == 200
    assert live.get("/health").status == 200


def test_an_engine_that_cannot_go_on_ends_the_server(serve_tiny: ServeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    live = serve_tiny()

    def lost(*_: object) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(live.engine.llm.core.runner, "launch", lost)
    monkeypatch.setattr(live.engine.llm.core.runner, "resynchronize", lost)
    assert live.complete(prompt=[5]).status == 500
    live.thread.join(120)
    assert not live.thread.is_alive()
    assert live.engine.failure is not None and not live.engine.closed


def test_a_key_is_asked_for_where_one_is_set(serve_tiny: ServeTiny) -> None:
    live = serve_tiny(api_key=["secret", "other"])
    assert live.complete(prompt=[5]).status == 401
    for wrong in ("Bearer no", "Basic secret", "Bearer", "secret", "Bearer secret2"):
        reply = live.post("/v1/completions", {"prompt": [5]}, authorization=wrong)
        assert (reply.status, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    for right in ("Bearer secret", "bearer other"):
        assert live.post("/v1/completions", {"prompt": [5]}, authorization=right).status == 200
    assert live.get("/v1/models").status == 401
    assert [live.get(path).status for path in ("/health", "/ready", "/metrics", "/version", "/")] == [200] * 5


def test_pages_of_other_origins_may_ask_only_where_that_is_set(serve_tiny: ServeTiny, tiny: Live) -> None:
    origin = "https://chat.example"
    assert "access-control-allow-origin" not in tiny.get("/health", origin=origin).headers
    live = serve_tiny(allowed_origins=[origin], api_key=["k"])
    asked = live.request("OPTIONS", "/v1/completions", origin=origin, access_control_request_method="POST")
    assert (asked.status, asked.headers["access-control-allow-origin"]) == (200, origin)
    refused = live.post("/v1/completions", {"prompt": [5]}, origin=origin)
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, origin)  # it can read the error


def test_a_connection_serves_one_request_after_the_other(tiny: Live) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", tiny.port, timeout=60)
    for body in (b'{"prompt": [5], "max_tokens": 1}', b'{"prompt": "', b'{"prompt": [5], "max_tokens": 1}'):
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
    assert response.status == 200
    connection.close()


@pytest.mark.parametrize(
    ("setting", "value"),
    [("max_queue", -1), ("max_body_bytes", 0), ("request_timeout", 0), ("body_timeout", -1), ("shutdown_grace", -1)]
    + [("api_key", [""]), ("served_model_name", []), ("tool_call_parser", "none")],
)
def test_a_setting_that_cannot_be_is_an_error_that_names_it(setting: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=setting):
        ServerSettings(**{"served_model_name": ["m"], setting: value})
