"""What the service is run with, apart from the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mainspring.engine.errors import SettingsError
from mainspring.server.tools import PARSERS


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of the service, checked when made; raises ``SettingsError``.

    Times are in seconds, sizes in bytes. ``served_model_name`` are the names under which clients may ask for the model,
    the first of which is told in answers. ``max_queue`` is how many answers may wait beyond those that have a seat.
    ``request_timeout`` of None is no limit. ``shutdown_grace`` is how long running answers may take to finish when the
    service is asked to end. ``tool_call_parser`` of None chooses by the chat template.
    """

    served_model_name: Sequence[str]
    api_key: Sequence[str] = ()
    max_queue: int = 1024
    request_timeout: float | None = None
    shutdown_grace: float = 30.0
    max_body_bytes: int = 16 << 20
    body_timeout: float = 30.0
    allowed_origins: Sequence[str] = ()
    tool_call_parser: str | None = None
    page: bool = True

    def __post_init__(self) -> None:
        if not self.served_model_name or not all(self.served_model_name):
            raise SettingsError("served_model_name is empty; give the model a name")
        for name, low in (("max_queue", 0), ("max_body_bytes", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise SettingsError(f"{name} is {value!r}; it must be a whole number of at least {low}")
        for name in ("request_timeout", "body_timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise SettingsError(f"{name} is {value!r}; it must be a number of seconds above 0")
        if not 0 <= self.shutdown_grace < float("inf"):
            raise SettingsError(f"shutdown_grace is {self.shutdown_grace!r}; it must be a number of seconds from 0 on")
        if not all(self.api_key):
            raise SettingsError("api_key is empty; give a text, or leave it out")
        if self.tool_call_parser is not None and self.tool_call_parser not in PARSERS:
            raise SettingsError(
                f"tool_call_parser is {self.tool_call_parser!r}; it must be one of {', '.join(sorted(PARSERS))}"
            )
