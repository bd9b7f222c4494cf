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
from torch import Tensor

#: A call over given tensors that is ready to be made again and again, and the tensors that it writes its results to.
Prepared = tuple[Callable[[], None], tuple[Tensor, ...]]

_LIBRARY = torch.library.Library("mainspring", "FRAGMENT")


def fast_path() -> bool:
    """Whether CUDA tensors take the fused and skinny kernels; ``MAINSPRING_FAST=0`` in the environment turns them off.

    Without them a step runs the plain operations one after another: the way to compare, and to find a fault.
    """
    return os.environ.get("MAINSPRING_FAST", "1") != "0"


def register(
    schema: str,
    *,
    cuda: str,
    cpu: Callable[..., Any] | None = None,
    prepare: Callable[..., Prepared] | None = None,
    plain: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Define one operation and return the callable that runs it.

    A step on the CPU makes hundreds of calls over the same tensors, and what they cost is mostly Python: crossing the
    dispatcher and making views. An operation that is given as ``prepare`` does its views once and is then called
    without the dispatcher where a recording is replayed; everywhere else it is prepared and called at once, so that
    both compute the same.

    Args:
        schema: name and schema in torch's syntax, such as ``"neg(Tensor x) -> Tensor"``.
        cpu: the implementation for CPU tensors; this or ``prepare`` is given.
        prepare: takes the operation's arguments and ``out``, tensors for its results or None for new ones; returns
            the call and the results. It is the returned operation's attribute ``prepare``, which is where a recorder
            of operations finds it.
        cuda: ``"module:function"`` of the implementation for CUDA tensors, imported at its first use, so
            that a machine without Triton can import this room.
        plain: what CUDA tensors get instead where ``fast_path`` is off: other operations of this room, or of
            torch.
    """
    name = schema.split("(", 1)[0]
    if (cpu is None) == (prepare is None):
        raise ValueError(f"operation {name!r} needs an implementation for the CPU: give cpu or prepare, not both")
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, cpu if prepare is None else _prepared_and_called(prepare), "CPU")
    fast = _imported_at_first_use(cuda)
    _LIBRARY.impl(name, fast if plain is None else _switched(fast, plain), "CUDA")
    operation: Callable[..., Any] = getattr(torch.ops.mainspring, name).default
    if prepare is not None:
        operation.prepare = prepare  # type: ignore[attr-defined]
    return operation


def _prepared_and_called(prepare: Callable[..., Prepared]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        run, results = prepare(*args)
        run()
        return results[0] if len(results) == 1 else results or None

    return call


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
