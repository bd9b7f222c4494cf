"""A loop's contract on the CPU: one thread that repeats a recording and does what the kernel does on a GPU."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import weakref
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mainspring.graphs.cpu_graph import CpuGraph
from mainspring.graphs.errors import GraphError
from mainspring.graphs.loop_layout import REASONS, Slot, State, Words, slot_at
from mainspring.graphs.mailbox import LoopMemory, Mailbox

__all__ = ["CpuLoop", "begin", "end_iteration"]

Array = npt.NDArray[np.int32]


def begin(memory: LoopMemory, state: list[int], records: bool, now: int) -> int:
    """What happens before the first iteration of a launch.

    Args:
        memory: shared words.
        state: `State` words.
        records: whether iterations leave records.
        now: time in nanoseconds.

    Returns:
        Index into `REASONS`: not 0 if the launch is over already. The caller publishes it, last of all.
    """
    words = memory.words
    state[State.LAUNCH] += 1
    launch = state[State.LAUNCH]
    at = slot_at(launch)
    state[State.ITERATIONS] = 0
    state[State.MAX_STEPS] = words[at + Slot.MAX_STEPS]
    words[at + Slot.FIRST] = state[State.TOTAL]
    words[at + Slot.STARTED] = now
    reason = ""
    if words[at + Slot.NUMBER] != launch:
        reason = "lost"
    elif memory.load(Words.DOORBELL) >= launch:
        reason = "doorbell"
    elif records and state[State.WRITTEN] - memory.load(Words.READ) >= memory.depth:
        reason = "ring_full"
    return REASONS.index(reason)


def end_iteration(memory: LoopMemory, state: list[int], flag: int, record: Array | None, now: int) -> int:
    """What happens after an iteration: its record and counters go out, and whether it was the last is decided.

    Args:
        memory: shared words.
        state: `State` words.
        flag: the recording's flag.
        record: its record, int32 [words], or None.
        now: time in nanoseconds.

    Returns:
        Index into `REASONS`: 0 to go on. The caller publishes it, last of all.
    """
    words = memory.words
    at = slot_at(state[State.LAUNCH])
    if record is not None:
        if record.size:
            memory.ring_array[state[State.WRITTEN] % memory.depth] = record
        state[State.WRITTEN] += 1
    words[Words.STAMPS_AT + state[State.TOTAL] % Words.STAMPS] = now
    state[State.TOTAL] += 1
    state[State.ITERATIONS] += 1
    doorbell, read = memory.load(Words.DOORBELL), memory.load(Words.READ)
    memory.store(Words.WRITTEN, state[State.WRITTEN])
    memory.store(at + Slot.ITERATIONS, state[State.ITERATIONS])
    reason = ""
    if flag == 0:
        reason = "flag"
    elif doorbell >= state[State.LAUNCH]:
        reason = "doorbell"
    elif state[State.ITERATIONS] >= state[State.MAX_STEPS]:
        reason = "max_steps"
    elif record is not None and state[State.WRITTEN] - read >= memory.depth:
        reason = "ring_full"
    return REASONS.index(reason)


@dataclass(slots=True)
class _Job:
    """One launch to run."""

    number: int
    graph: CpuGraph
    flag: Array
    record: Array | None


_WORKERS: weakref.WeakSet[_Worker] = weakref.WeakSet()
"""Threads that may be under way."""

_LAST_LAUNCH = (1 << 62) - 1
"""A number above that of every launch, for the doorbell at the end of the process."""

_LONGEST_STEP = 10.0
"""Seconds for which the end of the process waits for a step under way."""


@atexit.register
def _end_workers() -> None:
    """Let every thread end before the interpreter does: one that is stopped within torch takes the process down."""
    for worker in list(_WORKERS):
        if worker.memory.process == os.getpid():
            worker.memory.store(Words.DOORBELL, _LAST_LAUNCH)
            worker.jobs.put(None)
            worker.thread.join(_LONGEST_STEP)


class _Worker:
    """The thread of one mailbox, which runs its launches one after another."""

    def __init__(self, memory: LoopMemory) -> None:
        self.memory = memory
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=_work, args=(memory, self.jobs), name="mainspring-loop", daemon=True)
        self.thread.start()
        _WORKERS.add(self)


def _work(memory: LoopMemory, jobs: queue.SimpleQueue[_Job | None]) -> None:
    state = [0] * State.WORDS
    while (job := jobs.get()) is not None:
        _run(memory, state, job)
        job = None  # a thread that waits holds nothing of the last launch


def _run(memory: LoopMemory, state: list[int], job: _Job) -> None:
    try:
        reason = begin(memory, state, job.record is not None, time.perf_counter_ns())
        while not reason:
            job.graph.replay()
            reason = end_iteration(memory, state, int(job.flag[0]), job.record, time.perf_counter_ns())
    except BaseException as error:
        memory.failures[job.number] = error
        reason = REASONS.index("failed")
    job.graph.pool.end_loop()  # whoever sees the end may use the graph
    memory.store(slot_at(job.number) + Slot.REASON, reason)


class CpuLoop:
    """Runs launches of one recording in the mailbox's thread."""

    def __init__(self, graph: CpuGraph, flag: Tensor, record: Tensor | None, mailbox: Mailbox) -> None:
        self._graph: CpuGraph | None = graph
        self._flag: Array = flag.detach().numpy()
        self._record: Array | None = None if record is None else record.detach().numpy().reshape(-1)
        self._memory = mailbox.memory
        if mailbox.runner is None:
            mailbox.runner = _Worker(mailbox.memory)
            weakref.finalize(mailbox, mailbox.runner.jobs.put, None)
        self._worker: _Worker = mailbox.runner

    def start(self, max_steps: int) -> int:
        """Queue a launch; the caller holds the memory's lock.

        Raises:
            GraphError: another mailbox's loop is using the graph's arena.
        """
        if self._graph is None:
            raise GraphError("this loop was released; make a new one")
        self._graph.pool.begin_loop(self._worker.thread.ident)
        try:
            number = self._memory.number_launch(max_steps)
        except BaseException:
            self._graph.pool.end_loop()
            raise
        self._worker.jobs.put(_Job(number, self._graph, self._flag, self._record))
        return number

    def fault(self, launch: int) -> BaseException | None:
        """What stopped `launch` otherwise than its reason tells: nothing does here."""
        return None

    def may_wait(self) -> bool:
        """Whether the caller may wait for this loop: not the thread that runs it."""
        return threading.get_ident() != self._worker.thread.ident

    def free(self) -> None:
        """Let go of the recording."""
        self._graph = None
