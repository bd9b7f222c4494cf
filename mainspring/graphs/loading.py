"""Kernels that are not on the GPU yet: noticed before they spoil a capture."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["NotLoaded", "loading_raises"]


class NotLoaded(BaseException):
    """A kernel would have had to be compiled or loaded; no `Exception`, so that what is run does not catch it."""


@contextmanager
def loading_raises() -> Iterator[bool]:
    """Let Triton raise `NotLoaded` where this thread would have it compile a kernel or load one.

    CUDA refuses to load a module while a stream of the thread is captured, and the capture is lost. A kernel that was
    refused is as it was before. CUDA's own libraries and torch load their kernels with the launch, which a capture
    allows.

    Yields:
        Whether that can be told: true without Triton, false with a version of it that has no such hooks.
    """
    triton = sys.modules.get("triton")
    if triton is None:
        yield True
        return
    runtime: Any = getattr(getattr(triton, "knobs", None), "runtime", None)
    if not hasattr(runtime, "jit_cache_hook"):
        yield False
        return
    thread = threading.get_ident()
    lasting = True
    earlier = runtime.jit_cache_hook

    def is_refused() -> bool:
        return lasting and threading.get_ident() == thread

    def compiling(**what: Any) -> Any:
        if is_refused() and not what.get("is_manual_warmup"):  # a warm-up compiles and launches nothing
            raise NotLoaded(f"the kernel {_name_of(what)} was not loaded")
        return None if earlier is None else earlier(**what)

    def loading(module: Any, function: Any, name: str, *rest: Any) -> None:
        if is_refused():
            raise NotLoaded(f"the kernel {name} was not loaded")

    chain: Any = getattr(runtime, "kernel_load_start_hook", None)
    # A kernel that was refused here is loaded by a later launch only where launches look for a hook of their own.
    is_chained = hasattr(chain, "add") and getattr(runtime, "launch_enter_hook", None) is not None
    runtime.jit_cache_hook = compiling
    if is_chained:
        chain.add(loading)
    try:
        yield True
    finally:
        lasting = False
        if runtime.jit_cache_hook is compiling:
            runtime.jit_cache_hook = earlier
        if is_chained:
            chain.remove(loading)


def _name_of(what: dict[str, Any]) -> str:
    return str(getattr(what.get("fn"), "name", None) or what.get("repr", "of no name"))
