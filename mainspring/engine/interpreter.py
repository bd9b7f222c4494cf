"""The interpreter's lock, where other threads of the program want it all the time.

Python hands it over when a waiting thread has waited for the *switch interval* (5 ms). That is long for a thread that
wakes up to hand out a token, and short for one that is queuing the hundreds of kernels of a prefill step, which would
give the lock up in the middle, again and again. So the engine shortens the interval while it sleeps, and lengthens it
while it launches; where the program has no other thread, nothing is touched.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: Switch interval in seconds while the engine sleeps, and while it launches: about what a prefill step takes the CPU.
ASLEEP, AT_WORK = 1e-4, 2e-2


class SwitchInterval:
    """Sets the process's switch interval for as long as somebody asks, and puts back what was there before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._usual = 0.0

    @contextmanager
    def of(self, seconds: float) -> Iterator[None]:
        """Inside, the interval is ``seconds``; behind it, what it was in front, and outside of all such blocks as the
        program has set it. Where blocks of several threads overlap, what was asked for last holds."""
        if threading.active_count() == 1:
            yield
            return
        with self._lock:
            before = sys.getswitchinterval()
            if self._inside == 0:
                self._usual = before
            self._inside += 1
            sys.setswitchinterval(seconds)
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                sys.setswitchinterval(before if self._inside else self._usual)


#: There is one interpreter in a process, and so one of these.
switch_interval = SwitchInterval()
