"""mainspring: a language-model decoding engine that is wound once and then runs by itself.

``import mainspring`` is cheap on purpose: it imports neither ``torch`` nor ``transformers`` and starts
no device. The names below are resolved when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    "LLM": "mainspring.engine.llm",
    "SamplingParams": "mainspring.engine.sampling_params",
    "RequestOutput": "mainspring.engine.outputs",
    "CompletionOutput": "mainspring.engine.outputs",
}

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from mainspring.engine.llm import LLM
    from mainspring.engine.outputs import CompletionOutput, RequestOutput
    from mainspring.engine.sampling_params import SamplingParams


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that ``import mainspring`` stays free of ``torch``."""
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'mainspring' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LAZY))
