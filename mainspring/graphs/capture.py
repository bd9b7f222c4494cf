"""What every recording needs: the collector held, no fork, errors that name the user's line."""

from __future__ import annotations

import gc
import os
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mainspring.graphs.errors import CaptureError, GraphError

__all__ = [
    "GraphHolds",
    "capture_error",
    "held_collector",
    "recording_of",
    "refuse_forked",
    "refuse_nested",
    "user_line",
    "watched_streams",
    "way_out",
]

_SKIPPED = (str(Path(__file__).parent) + os.sep, str(Path(torch.__file__).parent) + os.sep, "<")
_PROJECT = str(Path(__file__).parent.parent) + os.sep


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
    """The line of user code that raised `error`, as "file.py:12 in forward (`y = x.item()`)".

    That is the innermost line outside of torch and of this project; where there is none, outside of this package.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_SKIPPED)]
    return _described(frames)


def calling_line() -> str | None:
    """The line of user code that is calling now, in the same form."""
    frames = [frame for frame in traceback.extract_stack()[:-1] if not frame.filename.startswith(_SKIPPED)]
    return _described(frames)


def _described(frames: Sequence[traceback.FrameSummary]) -> str | None:
    users = [frame for frame in frames if not frame.filename.startswith(_PROJECT)]
    for frame in reversed(users or frames):
        source = f" (`{frame.line}`)" if frame.line else ""
        return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}{source}"
    return None


def capture_error(name: str, error: Exception, where: str | None = None) -> CaptureError:
    """The `CaptureError` to raise from `error`, which stopped the recording of `name`.

    Args:
        name: what was being recorded.
        error: what was raised.
        where: the line of user code, where the traceback does not tell.
    """
    line = where or user_line(error)
    at = f" at {line}" if line else ""
    if isinstance(error, CaptureError):
        return CaptureError(f"recording {name!r} failed{at}: {error}")
    advice = way_out(str(error))
    return CaptureError(
        f"recording {name!r} failed{at}: {type(error).__name__}: {error}" + (f". {advice}" if advice else "")
    )


_WAYS_OUT = (
    (
        ("unjoined", "StreamCaptureUnjoined"),
        "Work was put on another stream and not joined: before the callable returns, let its own stream wait for the "
        "other, torch.cuda.current_stream().wait_stream(side)",
    ),
    (
        ("StreamCaptureIsolation", "uncaptured work", "StreamCaptureMerge", "separate capture"),
        "Streams were mixed: let the other stream wait for the callable's own before work is put on it, "
        "side.wait_stream(torch.cuda.current_stream()), and the callable's own wait for it at the end",
    ),
    (
        ("synchroniz", "StreamCaptureUnsupported", "not permitted when stream is capturing", "StreamCaptureImplicit"),
        "The line waits for the GPU, reads a value (item(), cpu(), print, nonzero, a boolean index, an if on a tensor) "
        "or allocates around torch: keep values in tensors, with torch.where or masked_fill, and do what must wait, or "
        "allocate, before or after the recorded callable",
    ),
    (
        ("StreamCaptureInvalidated", "StreamCaptureWrongThread"),
        "An earlier call broke the capture, perhaps in another thread or on the legacy default stream: put all work "
        "on the callable's own stream",
    ),
    (
        ("Offset increment", "generator", "seed"),
        "Compute random numbers from a seed and a counter that are tensors",
    ),
)


def way_out(message: str) -> str:
    """What to do about an error of CUDA's or torch's during a capture; empty where nothing is known."""
    for signs, advice in _WAYS_OUT:
        if any(sign in message for sign in signs):
            return advice
    return ""


_ACTIVE = threading.local()


@contextmanager
def recording_of(name: str) -> Iterator[None]:
    """In this thread, `name` is being recorded."""
    outer = getattr(_ACTIVE, "name", None)
    _ACTIVE.name = name
    try:
        yield
    finally:
        _ACTIVE.name = outer


def refuse_nested(name: str) -> None:
    """Refuse that runner `name` is called by what another is recording.

    Raises:
        CaptureError: this thread is recording something.
    """
    outer = getattr(_ACTIVE, "name", None)
    if outer is not None:
        raise CaptureError(
            f"runner {name!r} was called while {outer!r} is being recorded, and a recording cannot hold another. Call "
            f"the module or function that {name!r} runs instead of the runner, so that its operations become part of "
            f"{outer!r}; or call the two runners one after the other, outside of both"
        )


@contextmanager
def watched_streams(own: Any) -> Iterator[dict[int, str]]:
    """Note which streams other than `own` are made current meanwhile, and on which line of user code.

    Yields:
        That line by `stream_id`, filled while the context lasts.
    """
    entered: dict[int, str] = {}
    original = torch.cuda.set_stream
    thread = threading.get_ident()

    def set_stream(stream: Any) -> None:
        if threading.get_ident() == thread and stream is not None and stream.stream_id != own.stream_id:
            entered.setdefault(stream.stream_id, calling_line() or "an unknown line")
        original(stream)

    torch.cuda.set_stream = set_stream
    try:
        yield entered
    finally:
        torch.cuda.set_stream = original
