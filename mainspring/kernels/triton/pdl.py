"""Programmatic dependent launch (PDL): a kernel may start while the one in front of it still runs.

The rule for every kernel launched with it: first let the next kernel start, then wait, and only then read anything
that changes or write anything at all. What never changes (weights, the table of rotations) may be read before the
wait. Waiting means that *all* kernels in front are done and their writes visible, since each of them waited too.

Kernels take the mode as a constant: 0 is without PDL, 1 with it, and 2 starts early but leaves the wait out, which is
wrong and there for the tests that show that each wait is needed.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from mainspring.kernels.library import fast_path

OFF, ON, WITHOUT_WAIT = 0, 1, 2


@cache
def _device_has_pdl(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter (``TRITON_INTERPRET=1``)."""
    return bool(triton.knobs.runtime.interpret)


def pdl_supported(device: torch.device) -> bool:
    """Whether kernels on ``device`` may use programmatic dependent launch.

    Needs compute capability 9.0; ``MAINSPRING_PDL=0`` in the environment turns it off, and so does
    ``MAINSPRING_FAST=0``.
    """
    if device.type != "cuda" or interpreting() or os.environ.get("MAINSPRING_PDL", "1") == "0" or not fast_path():
        return False
    return _device_has_pdl(torch.cuda.current_device() if device.index is None else device.index)


def mode(device: torch.device) -> int:
    """The mode for kernels on ``device``: ``ON`` where it is supported, else ``OFF``."""
    return ON if pdl_supported(device) else OFF


def options(chosen: int) -> dict[str, Any]:
    """Arguments of a launch in a mode: the constant ``PDL``, and what tells the driver."""
    return {"PDL": chosen, "launch_pdl": True} if chosen else {"PDL": OFF}


@triton.jit
def pdl_wait(ENABLED: tl.constexpr):
    """Block until the kernels before this one are done and their writes are visible."""
    if ENABLED == 1:
        tl.extra.cuda.gdc_wait()


@triton.jit
def pdl_launch_dependents(ENABLED: tl.constexpr):
    """Allow the next kernel's programs to start where there is room."""
    if ENABLED != 0:
        tl.extra.cuda.gdc_launch_dependents()
