"""The one exception that a model which cannot be used raises."""

from __future__ import annotations


class ModelError(ValueError):
    """A model cannot be found, understood or loaded. The message names the value, the limit and the way out."""
