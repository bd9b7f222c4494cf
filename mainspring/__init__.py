"""mainspring: a language-model decoding engine that is wound once and then runs by itself.

``import mainspring`` is cheap on purpose: it imports neither ``torch`` nor ``transformers`` and starts
no device. The names below are resolved when they are first used.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    "LLM": "mainspring.engine.llm",
    "SamplingParams": "mainspring.engine.sampling_params",
    "RequestOutput": "mainspring.engine.outputs",
    "CompletionOutput": "mainspring.engine.outputs",
    "AsyncLLM": "mainspring.engine.async_llm",
    "StructuredOutputsParams": "mainspring.engine.structured",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

if TYPE_CHECKING:
    from mainspring.engine.async_llm import AsyncLLM
    from mainspring.engine.llm import LLM
    from mainspring.engine.outputs import CompletionOutput, RequestOutput
    from mainspring.engine.sampling_params import SamplingParams
    from mainspring.engine.structured import StructuredOutputsParams


def _let_waiting_threads_sleep() -> None:
    """Shorten how long GNU OpenMP's threads spin at a barrier, before torch loads it, unless the user chose otherwise.

    By default they spin for milliseconds. A decode step has a barrier every few hundred microseconds, so on a machine
    whose cores are shared with anything else, threads that spin keep the one that is waited for from running.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def _ask_for_large_pages() -> None:
    """Let torch's CPU allocator ask Linux for pages of 2 MiB, unless the user chose otherwise; read when it first
    allocates.

    A decode step reads every weight once. With pages of 4 KiB the core waits for address translation nearly as often
    as for data, in a virtual machine above all.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


_let_waiting_threads_sleep()
_ask_for_large_pages()


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
