"""Errors of the engine. Each message says the value, the limit and the way out."""

from __future__ import annotations


class EngineError(Exception):
    """Something that the engine cannot do, or can no longer do."""


class SettingsError(EngineError, ValueError):
    """A setting that the engine cannot be made with."""


class RequestError(EngineError, ValueError):
    """A request that cannot be served; no other request is touched."""
