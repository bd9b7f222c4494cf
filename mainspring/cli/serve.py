"""``mainspring serve``: the OpenAI-compatible HTTP service."""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from mainspring.cli.options import DEFAULT_MODEL, EngineOptions, parse_bytes

if TYPE_CHECKING:
    from mainspring.server.settings import ServerSettings

_WHERE = "Where"
_WHO = "Who may ask"
_LIMITS = "Limits"

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class ServerOptions:
    """How the service is reached, and its limits."""

    host: Annotated[
        str, Option(help="Address to listen on; 0.0.0.0 is every one of this machine.", rich_help_panel=_WHERE)
    ] = "127.0.0.1"
    port: Annotated[int, Option(help="Port to listen on; 0 takes a free one.", rich_help_panel=_WHERE)] = 8000
    served_model_name: Annotated[
        list[str] | None,
        Option(
            help="Name that clients ask for; may be given several times, the first is told.", rich_help_panel=_WHERE
        ),
    ] = None
    api_key: Annotated[
        list[str] | None,
        Option(
            envvar="MAINSPRING_API_KEY",
            show_envvar=True,
            help="Key that clients have to send; may be given several times.",
            rich_help_panel=_WHO,
        ),
    ] = None
    allowed_origins: Annotated[
        list[str] | None,
        Option(help="Origin whose pages may ask (CORS), or *; may be given several times.", rich_help_panel=_WHO),
    ] = None
    page: Annotated[bool, Option("--page/--no-page", help="A chat box for a person at /.", rich_help_panel=_WHO)] = True
    max_queue: Annotated[
        int, Option(help="Answers that may wait beyond --max-num-seqs; more get status 429.", rich_help_panel=_LIMITS)
    ] = 1024
    request_timeout: Annotated[
        float | None, Option(help="Seconds that a request may take; none is no limit.", rich_help_panel=_LIMITS)
    ] = None
    shutdown_grace: Annotated[
        float, Option(help="Seconds that running answers get when the server is to end.", rich_help_panel=_LIMITS)
    ] = 30.0
    max_body_size: Annotated[
        str, Option(metavar="BYTES", help="Largest request, such as 16MiB.", rich_help_panel=_LIMITS)
    ] = "16MiB"
    body_timeout: Annotated[
        float, Option(help="Seconds within which a request has to arrive.", rich_help_panel=_LIMITS)
    ] = 30.0
    tool_call_parser: Annotated[
        str | None,
        Option(metavar="hermes|llama3_json", help="Form of tool calls; by default the chat template's."),
    ] = None
    skip_tokenizer_init: Annotated[
        bool, Option("--skip-tokenizer-init", help="Without tokenizer: token ids in, token ids out.")
    ] = False
    log_level: Annotated[str, Option(help="debug, info, warning or error.", rich_help_panel=_WHERE)] = "info"

    def settings(self, model: str) -> ServerSettings:
        """The checked settings of the service. Raises ``ValueError``."""
        from mainspring.server.settings import ServerSettings

        if self.log_level not in LOG_LEVELS:
            raise ValueError(f"--log-level is {self.log_level!r}; it is one of {', '.join(LOG_LEVELS)}")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port is {self.port}; it is a number from 0 to 65535")
        return ServerSettings(
            served_model_name=self.served_model_name or [model],
            api_key=self.api_key or (),
            allowed_origins=self.allowed_origins or (),
            page=self.page,
            max_queue=self.max_queue,
            request_timeout=self.request_timeout,
            shutdown_grace=self.shutdown_grace,
            max_body_bytes=parse_bytes(self.max_body_size),
            body_timeout=self.body_timeout,
            tool_call_parser=self.tool_call_parser,
        )


def serve(
    engine: EngineOptions,
    server: ServerOptions,
    model_name: Annotated[
        str | None, Argument(metavar="[MODEL]", help="As --model; smollm2 where neither is given.", show_default=False)
    ] = None,
) -> None:
    """Serve a model over HTTP, as the OpenAI API does: chat, completions, models, and a page at / for a person.

    The port answers at once; /ready has status 200 when the model is loaded and its step recorded. Ctrl-C or SIGTERM
    lets running answers finish. /metrics is for Prometheus.
    """
    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"serve needs {', '.join(missing)}: pip install 'mainspring[server]'")
    if model_name is not None:
        if engine.model not in (DEFAULT_MODEL, model_name):
            raise ValueError(f"the model is given twice, as {model_name!r} and as --model {engine.model!r}")
        engine = dataclasses.replace(engine, model=model_name)
    settings = server.settings(engine.model)
    options = engine.keywords()
    del options["model"]
    if server.skip_tokenizer_init:
        options["skip_tokenizer_init"] = True

    from mainspring.server.run import serve as run

    run(engine.model, options, settings, host=server.host, port=server.port, log_level=server.log_level)
