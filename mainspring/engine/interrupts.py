"""Ctrl-C between steps, never in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Hold SIGINT back inside the block; the yielded function raises ``KeyboardInterrupt`` if one has come.

    A step that is cut in half would leave blocks and seats half assigned. A second SIGINT, for a step that does not
    end, raises at once. Outside the main thread, or where the program has a handler of its own, nothing is changed.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield lambda: None
        return
    received = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal received
        if received:
            raise KeyboardInterrupt
        received = True

    def check() -> None:
        nonlocal received
        if received:
            received = False
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    check()
