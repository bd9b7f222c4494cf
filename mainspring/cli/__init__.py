"""The ``mainspring`` command."""

from __future__ import annotations

from mainspring.cli.app import main

__all__ = ["main"]
