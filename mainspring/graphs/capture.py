"""What every recording needs: the collector held, no fork, errors that name the user's line."""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mainspring.graphs.errors import CaptureError, GraphError

__all__ = ["GraphHolds", "capture_error", "held_collector", "refuse_forked", "user_line"]

_HERE = str(Path(__file__).parent) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep


@contextmanager
def held_collector(collect: bool = True) -> Iterator[None]:
    """Keep Python's garbage collector off: memory freed by it amid a CUDA capture breaks the capture.

    Args:
        collect: collect what there is first, so that less piles up; on the CPU nothing is gained by it.
    """
    if not gc.isenabled():
        yield  # held already, by an outer block or by the program
        return
    if collect:
        gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class GraphHolds:
    """Names of the loops that repeat a graph, and that keep it from being released under them."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def add(self, key: int, name: str) -> None:
        """The loop `name`, known by `key`, holds the graph."""
        self._names[key] = name

    def remove(self, key: int) -> None:
        """The loop known by `key` holds the graph no longer."""
        self._names.pop(key, None)

    def refuse(self) -> None:
        """See that nobody holds the graph.

        Raises:
            GraphError: a loop does.
        """
        for name in self._names.values():
            raise GraphError(f"the loop {name!r} repeats this graph; release the loop first")


def refuse_forked() -> None:
    """Refuse to touch CUDA in a process forked after CUDA came up.

    Raises:
        CaptureError: this is such a process.
    """
    if torch.cuda._is_in_bad_fork():
        raise CaptureError(
            "this process was forked after CUDA was initialised, so CUDA cannot be used in it; start it "
            "with the 'spawn' method (multiprocessing.get_context('spawn')), or fork before CUDA is first "
            "used"
        )


def user_line(error: BaseException) -> str | None:
    """The innermost line outside torch and this package in the traceback, as "file.py:12 in forward"."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((_HERE, _TORCH, "<")):
            return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
    return None


def capture_error(name: str, error: Exception) -> CaptureError:
    """The `CaptureError` to raise from `error`, which stopped the recording of `name`."""
    line = user_line(error)
    where = f" at {line}" if line else ""
    if isinstance(error, CaptureError):
        return CaptureError(f"recording {name!r} failed{where}: {error}")
    return CaptureError(f"recording {name!r} failed{where}: {type(error).__name__}: {error}")
