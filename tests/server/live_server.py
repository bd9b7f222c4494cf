"""A server in this process, on a free port, and what asks it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import uvicorn

from mainspring.engine.async_llm import AsyncLLM
from mainspring.server.app import create_app
from mainspring.server.run import Server, listen, prepare_engine
from mainspring.server.settings import ServerSettings

#: Seconds between two looks.
PAUSE = 0.01


@dataclass
class Reply:
    """A whole response."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of server-sent events; the text ``[DONE]`` as it is."""
        data = [part.removeprefix("data: ") for part in self.body.decode().split("\n\n") if part]
        return [each if each == "[DONE]" else json.loads(each) for each in data]

    @property
    def param(self) -> str | None:
        error = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        return error["param"]


class Live:
    """A server that runs in a thread of this process."""

    def __init__(self, model: str, options: dict[str, Any], settings: ServerSettings, wait: bool = True) -> None:
        self.engine = AsyncLLM(model, prepare=prepare_engine, **options)
        app = create_app(self.engine, settings)
        self.service = app.state.service
        listener = listen("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=int(settings.shutdown_grace) + 3)
        self.server = Server(config, self.service, self.url)
        self.thread = threading.Thread(target=self.server.run, args=([listener],), daemon=True)
        self.thread.start()
        if wait:
            self.wait_for(lambda: self.service.state == "ready", 120)

    def wait_for(self, happened: Callable[[], bool], seconds: float = 60) -> None:
        """Wait until something has happened. Looks are counted, so that a machine that stands still costs none."""
        for _ in range(int(seconds / PAUSE)):
            if happened():
                return
            time.sleep(PAUSE)
        raise AssertionError(f"it did not happen within {seconds} s of waiting")

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and no block is held."""
        core = self.engine.llm.core
        return not core.has_work() and core.scheduler.pool.num_free == core.memory.num_blocks

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(120)
        assert not self.thread.is_alive()

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, names)
            response = connection.getresponse()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Reply:
        return self.request("GET", path, None, **headers)

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        return self.request("POST", path, json.dumps(body).encode(), content_type="application/json", **headers)

    def complete(self, **body: Any) -> Reply:
        return self.post("/v1/completions", body)

    def chat(self, content: str = "Hi", **body: Any) -> Reply:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **body})
