"""What the caller has set in torch for its own work does not reach the engine's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_KINDS = ("cpu", "cuda")


def caller_casts() -> bool:
    """Whether the caller has autocast on, which would change what the model computes."""
    return any(torch.is_autocast_enabled(kind) for kind in _KINDS)


@contextmanager
def own_torch_state() -> Iterator[None]:
    """Inside, inference mode, gradients and autocast are off, whatever they are around; also a decorator.

    Tensors made in inference mode could not be written outside of it, and casts would be recorded.
    """
    casts = {kind: torch.is_autocast_enabled(kind) for kind in _KINDS}
    try:
        for kind in _KINDS:
            torch.set_autocast_enabled(kind, False)
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        for kind, enabled in casts.items():
            torch.set_autocast_enabled(kind, enabled)
