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
from contextlib import AbstractContextManager, contextmanager, nullcontext

#: Switch interval in seconds while the engine sleeps, and while it launches: about what a prefill step takes the CPU.
ASLEEP, AT_WORK = 1e-4, 2e-2


class SwitchInterval:
    """Sets the process's switch interval for as long as somebody asks, and puts back what was there before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: list[list[float]] = []  # each a list of its own, so that equal ones are told apart
        self._usual = 0.0

    @contextmanager
    def of(self, seconds: float) -> Iterator[None]:
        """Inside, the interval is ``seconds``; outside of all such blocks it is as the program has set it.

        Where several overlap, what was asked for last holds.
        """
        if threading.active_count() == 1:
            yield
            return
        asked = [seconds]
        with self._lock:
            if not self._asked:
                self._usual = sys.getswitchinterval()
            self._asked.append(asked)
            sys.setswitchinterval(seconds)
        try:
            yield
        finally:
            with self._lock:
                self._asked = [each for each in self._asked if each is not asked]
                sys.setswitchinterval(self._asked[-1][0] if self._asked else self._usual)


#: There is one interpreter in a process, and so one of these.
switch_interval = SwitchInterval()


def asleep(looping: bool) -> AbstractContextManager[None]:
    """Around a wait, where loops run: the interpreter is to be had soon after it. The device goes on meanwhile."""
    return switch_interval.of(ASLEEP) if looping else nullcontext()


def at_work(looping: bool) -> AbstractContextManager[None]:
    """Around scheduling and launching, where loops run: the device may be waiting for it."""
    return switch_interval.of(AT_WORK) if looping else nullcontext()
