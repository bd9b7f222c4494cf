"""The one exception that a model which cannot be used raises."""

from __future__ import annotations


class ModelError(ValueError):
    """A model cannot be found, understood or loaded; the message says what, and the way out."""
