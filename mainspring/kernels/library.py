"""Registration of the project's operations with torch's dispatcher, under the ``mainspring`` namespace.

Operations are defined with ``Library.define`` and ``Library.impl`` rather than with
``torch.library.custom_op``: the latter's checks cost tens of microseconds a call. Being real operations,
they are seen whole by a ``TorchDispatchMode``, and an operation that writes into an argument says so in its
schema.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("mainspring", "FRAGMENT")


def fast_path() -> bool:
    """Whether CUDA tensors take the fused and skinny kernels; ``MAINSPRING_FAST=0`` in the environment turns them off.

    Without them a step runs the plain operations one after another: the way to compare, and to find a fault.
    """
    return os.environ.get("MAINSPRING_FAST", "1") != "0"


def register(
    schema: str, *, cpu: Callable[..., Any], cuda: str, plain: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Define one operation and return the callable that runs it.

    Args:
        schema: name and schema in torch's syntax, such as ``"neg(Tensor x) -> Tensor"``.
        cpu: the implementation for CPU tensors, which is the reference.
        cuda: ``"module:function"`` of the implementation for CUDA tensors, imported at its first use, so
            that a machine without Triton can import this room.
        plain: what CUDA tensors get instead where ``fast_path`` is off: other operations of this room, or of
            torch.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, cpu, "CPU")
    fast = _imported_at_first_use(cuda)
    _LIBRARY.impl(name, fast if plain is None else _switched(fast, plain), "CUDA")
    operation: Callable[..., Any] = getattr(torch.ops.mainspring, name).default
    return operation


def _switched(fast: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return fast(*args) if fast_path() else plain(*args)

    return call


def _imported_at_first_use(location: str) -> Callable[..., Any]:
    module_name, function_name = location.split(":")
    found: list[Callable[..., Any]] = []

    def call(*args: Any) -> Any:
        if not found:
            try:
                module = importlib.import_module(module_name)
            except ModuleNotFoundError as error:
                if error.name != "triton":
                    raise
                raise RuntimeError(
                    f"mainspring's CUDA kernels need Triton, which is not installed (wanted {location}); "
                    "install a CUDA build of torch, which brings it, or run on the CPU"
                ) from error
            found.append(getattr(module, function_name))
        return found[0](*args)

    return call
