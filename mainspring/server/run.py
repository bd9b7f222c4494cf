"""Running the service: the port is bound at once, the model is loaded meanwhile, and SIGTERM lets answers finish."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

import uvicorn

from mainspring.engine.async_llm import AsyncLLM
from mainspring.engine.llm import LLM
from mainspring.server.app import create_app
from mainspring.server.service import Service
from mainspring.server.settings import ServerSettings

logger = logging.getLogger("mainspring.server")

#: Seconds beyond the grace, for telling clients that their answer was broken off.
AFTER_GRACE = 3
#: Seconds between two looks at whether the engine is alive.
WATCH = 0.5


def prepare_engine(llm: LLM) -> None:
    """Record what most requests need before the service is ready: also the steps that sample."""
    core = llm.core
    if core.launch_mode != "eager":
        for runner in core.runner.all_runners:
            runner.capture()
        loops = getattr(core.runner, "loops", None)
        if core.launch_mode == "loop" and loops is not None:
            for variant in core.runner.runners:
                loops.prepare_ladder(variant)


class Server(uvicorn.Server):
    """uvicorn's server, which also ends when the engine has stopped, and tells the service when it begins to end."""

    def __init__(self, config: uvicorn.Config, service: Service, url: str) -> None:
        super().__init__(config)
        self._service = service
        self._url = url
        self._watcher: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and watch the engine from then on."""
        await super().startup(sockets=sockets)
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        engine = self._service.engine
        logger.info("listening on %s; the model is being loaded", self._url)
        try:
            await engine.ready()
        except Exception:  # told by serve()
            self.should_exit = True
            return
        logger.info("ready: %s serves %s", self._url, ", ".join(self._service.settings.served_model_name))
        while engine.failure is None:
            await asyncio.sleep(WATCH)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, let running answers finish for the stated time, then break them off."""
        logger.info("shutting down: running answers may take %g s to finish", self._service.settings.shutdown_grace)
        self._service.drain(self._service.settings.shutdown_grace)
        if self._watcher is not None:
            self._watcher.cancel()
        # An end that was asked for and went well is exit status 0; uvicorn would raise the signal again.
        self._captured_signals.clear()
        await super().shutdown(sockets=sockets)
        if not self.force_exit:  # what came meanwhile asked for the same end
            self._captured_signals.clear()


def serve(
    model: str,
    options: Mapping[str, Any],
    settings: ServerSettings,
    *,
    host: str,
    port: int,
    log_level: str = "info",
) -> None:
    """Serve until asked to end. Raises what loading the model raised, or ``EngineError`` where the engine stopped."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("mainspring").setLevel(log_level.upper())
    listener = listen(host, port)
    name = f"[{host}]" if ":" in host else host
    engine = AsyncLLM(model, prepare=prepare_engine, **options)
    app = create_app(engine, settings)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        loop="uvloop" if importlib.util.find_spec("uvloop") else "asyncio",
        timeout_graceful_shutdown=int(settings.shutdown_grace) + AFTER_GRACE,
        server_header=False,
    )
    Server(config, app.state.service, f"http://{name}:{listener.getsockname()[1]}").run(sockets=[listener])
    if not engine.is_ready and engine.failure is None:
        # Loading cannot be broken off, and nothing waits for its end.
        logger.info("ended while the model was being loaded")
        sys.stderr.flush()
        os._exit(0)
    failure = engine.failure
    engine.close()
    if failure is not None and not engine.closed:
        raise failure


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises ``OSError`` where the port is taken or the host is not this machine's."""
    try:
        [family, *_], *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(f"cannot listen on {host} port {port}: {error}; give another --host or --port") from error
