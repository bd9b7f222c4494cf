"""Ctrl-C between steps, never in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class HeldInterrupts:
    """Counts the SIGINTs that have come, and says when one may raise."""

    def __init__(self) -> None:
        self._received = 0
        self._in_step = False

    def note(self, signum: int, frame: FrameType | None) -> None:
        """The signal handler: the second one in a step raises, once."""
        self._received += 1
        if self._received == 2 and self._in_step:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raise ``KeyboardInterrupt`` if a SIGINT has come."""
        if self._received:
            self._received = 0
            raise KeyboardInterrupt

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step, which may last: here a second SIGINT does not wait for its end."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False


@contextmanager
def interrupts_between_steps() -> Iterator[HeldInterrupts]:
    """Hold SIGINT back inside the block and raise it at its end, or where the block asks for it.

    A step, an admission or an abort that is cut in half would leave blocks and seats half assigned. Outside the main
    thread, or where the program has a handler of its own, nothing is changed.
    """
    held = HeldInterrupts()
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield held
        return
    signal.signal(signal.SIGINT, held.note)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    held.check()
