"""Ctrl-C between steps, never in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

#: Makes a context; see ``HeldInterrupts.may_cut``.
Region = Callable[[], AbstractContextManager[None]]


class HeldInterrupts:
    """Counts the SIGINTs that have come, and says when one raises."""

    def __init__(self) -> None:
        self._received = 0
        self._may_cut = False
        self._has_cut = False

    def note(self, signum: int, frame: FrameType | None) -> None:
        """The signal handler: from the second one on it raises where that may be, once."""
        self._received += 1
        self._cut()

    def check(self) -> None:
        """Raise ``KeyboardInterrupt`` if a SIGINT has come."""
        if self._received:
            self._received = 0
            raise KeyboardInterrupt

    @contextmanager
    def may_cut(self) -> Iterator[None]:
        """Around what may last and can be cut at any moment: here a second SIGINT does not wait for its end."""
        self._may_cut = True
        try:
            self._cut()
            yield
        finally:
            self._may_cut = False

    def _cut(self) -> None:
        if self._may_cut and self._received > 1 and not self._has_cut:
            self._has_cut = True
            raise KeyboardInterrupt


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
