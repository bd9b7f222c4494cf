"""The interpreter's lock, where other threads of the program want it all the time.

Whoever wants it back asks for it after the *switch interval* (5 ms). The engine lets go of it again and again: in every
operation that it queues, of which a prefill step has hundreds, in every copy, and whenever it sleeps. Most of the time
it has it back before another thread has woken up. Each time that it has not, it waits for one interval; so the interval
is short while the engine has something to do. Not shorter than this: the other threads ask after the same interval, and
each operation lets go of the lock before they do.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: Switch interval in seconds while the engine has something to do.
BRISK = 1e-4


class SwitchInterval:
    """Sets the process's switch interval for as long as somebody asks, and puts back what was there before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: list[list[float]] = []  # each a list of its own, so that equal ones are told apart
        self._usual = 0.0
        self._set = 0.0

    @contextmanager
    def of(self, seconds: float) -> Iterator[None]:
        """Inside, the interval is ``seconds``; outside of all such blocks it is as the program has set it, be it before
        or meanwhile.

        Where several overlap, what was asked for last holds.
        """
        if threading.active_count() == 1:
            yield
            return
        asked = [seconds]
        try:
            with self._lock:
                self._note_usual()
                self._asked.append(asked)
                self._put(seconds)
            yield
        finally:
            with self._lock:
                if any(each is asked for each in self._asked):
                    self._note_usual()
                    self._asked = [each for each in self._asked if each is not asked]
                    self._put(self._asked[-1][0] if self._asked else self._usual)

    def forget(self) -> None:
        """In a child process after a fork, which has none of the threads that asked: put back the usual interval."""
        self._lock = threading.Lock()
        if self._asked:
            self._note_usual()
            self._asked = []
            self._put(self._usual)

    def _note_usual(self) -> None:
        now = sys.getswitchinterval()
        if not self._asked or now != self._set:  # then the program has set it
            self._usual = now

    def _put(self, seconds: float) -> None:
        sys.setswitchinterval(seconds)
        self._set = sys.getswitchinterval()  # the interpreter keeps whole microseconds


#: There is one interpreter in a process, and so one of these.
switch_interval = SwitchInterval()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=switch_interval.forget)
