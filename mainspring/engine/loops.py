"""Loops over recorded steps: one for each rung that ran in one, made when first needed, and the launches under way."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from mainspring.engine.ambient import own_torch_state
from mainspring.engine.loop_times import Rung
from mainspring.engine.plan import TableWrite
from mainspring.engine.request import Request
from mainspring.engine.request_state import seat_of
from mainspring.engine.samplers import variant_for
from mainspring.graphs import CpuGraph, CudaGraph, Loop, LoopEnd, LoopError, LoopStuckError, Mailbox

if TYPE_CHECKING:
    from mainspring.engine.model_runner import ModelRunner

#: Bytes of pinned memory that a ring of records may take, and the records that it has at least and at most. A loop
#: ends when its ring is full, so the depth is how long the CPU may look away, in steps.
RING_BYTES = 8 << 20
RING_DEPTH = (64, 1024)


class Post:
    """A mailbox, and what came out of it and has not been attributed to a launch yet."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.waiting = np.empty((0, *mailbox.record_shape), dtype=np.int32)

    @property
    def pending(self) -> int:
        """Records that nobody has taken."""
        return len(self.waiting) + self.mailbox.pending

    def take(self, count: int) -> np.ndarray:
        """The oldest ``count`` records, or as many as there are: int32 ``[records, rows, width]``."""
        new = self.mailbox.read_block()
        known = np.concatenate([self.waiting, new]) if len(self.waiting) else new
        self.waiting = known[count:]
        return known[:count]

    def clear(self) -> None:
        """Drop what nobody has taken."""
        self.take(self.pending)


@dataclass(eq=False)
class RunningLoop:
    """One launch of a loop: its rows, how far it may go, and how far the CPU has followed.

    ``until`` is the step, counted over the engine's life, at which the blocks reserved for its rows are used up but for
    ``spare`` steps, which are for launches that take over its rows and its blocks. ``longest`` is after how many steps
    its last row ends. ``mark`` is the same for two loops between which nothing else was launched.

    ``taken`` steps were taken note of, the last at the time ``seen``. ``ringing`` says that it was asked to end, and
    ``why``; ``answered`` that what comes after it was settled then, ``tied`` that this is a launch which takes over.
    ``stale`` says that the CPU has ended a row that the device goes on with, ``settled`` that no more blocks can be
    had. ``history`` keeps all records where someone wants them.
    """

    loop: Loop
    post: Post
    launch: int
    requests: tuple[Request, ...]
    rung: Rung
    until: int
    spare: int
    longest: int
    stuck_after: float
    mark: tuple[int, int]
    taken: int = 0
    ringing: bool = False
    why: str = ""
    answered: bool = False
    tied: bool = False
    stale: bool = False
    settled: bool = False
    end: LoopEnd | None = None
    history: list[np.ndarray] | None = None
    seen: float = field(default_factory=time.perf_counter)

    def ring(self) -> None:
        """Ask the device to end this launch, the newest of its loop, after the iteration under way."""
        self.ringing = True
        self.loop.ring_doorbell()

    def has_news(self, enough: int = 1) -> bool:
        """Whether there are ``enough`` records to take, or the launch has ended, in whichever way."""
        try:
            return self.post.pending >= enough or not self.loop.running(self.launch)
        except LoopError:  # which `take` raises, where it is dealt with
            return True

    def take(self) -> np.ndarray:
        """The records of the iterations done since the last call, int32 ``[records, rows, width]``; ``end`` is set once
        all were taken.

        Raises:
            LoopError: the launch failed.
            LoopStuckError: it made no step for ``stuck_after`` seconds.
        """
        progress = self.loop.poll(self.launch)
        records = self.post.take(progress.iterations - self.taken)
        self.taken += len(records)
        if self.history is not None:
            self.history.extend(records)
        now = time.perf_counter()
        if len(records):
            self.seen = now
        if not progress.running and self.taken == progress.iterations:
            self.end = self.loop.join(self.stuck_after, self.launch)
        elif now - self.seen > self.stuck_after:
            raise LoopStuckError(
                f"launch {self.launch} of {self.loop.name} made no step for {self.stuck_after} s, the engine's "
                f"loop_timeout, after {self.taken} steps; it may still be running",
                self.launch,
            )
        return records

    def wait(self) -> None:
        """Wait until the launch has ended; its records stay to be taken."""
        self.loop.join(self.stuck_after, self.launch)


class Loops:
    """Makes loops over a runner's recordings, launches them, and keeps those that may still be under way."""

    def __init__(self, runner: ModelRunner) -> None:
        self.launched: list[RunningLoop] = []
        self.launches = 0
        self._runner = runner
        self._loops: dict[Rung, tuple[CpuGraph | CudaGraph, Loop]] = {}
        self._posts: dict[int, Post] = {}
        self._generation = runner.buffers.generation
        self._beside: torch.cuda.Stream | None = None
        self._wrote_beside = False

    def fits(self, requests: Sequence[Request]) -> bool:
        """Whether what a step of these requests leaves is small enough for a ring of it."""
        return self._runner.record_of(variant_for(requests)).nbytes * RING_DEPTH[0] <= RING_BYTES

    def prepare(self, rung: Rung) -> tuple[Loop, Post]:
        """The loop over a rung's recording, made now if it is not there, and where its records arrive."""
        record = self._runner.record_of(rung[0])
        post = self._posts.get(record.shape[1])
        if post is None:
            low, high = RING_DEPTH
            depth = max(low, min(high, RING_BYTES // record.nbytes))
            mailbox = Mailbox(self._runner.limits.device, record_shape=tuple(record.shape), depth=depth)
            post = self._posts[record.shape[1]] = Post(mailbox)
        graph = self._runner.runners[rung[0]].graph(rung[1])
        known = self._loops.get(rung)
        if known is not None and known[0] is not graph:
            known[1].release()
            known = None
        if known is None:
            name = f"decode.{rung[0]}[{rung[1]}]"
            loop = Loop(graph, flag=self._runner.note.go_on, mailbox=post.mailbox, record=record, name=name)
            known = self._loops[rung] = (graph, loop)
        return known[1], post

    def prepare_ladder(self, variant: str) -> None:
        """Make the loops over all recordings of a variant that are there."""
        for size in self._runner.runners[variant].graphs:
            self.prepare((variant, size))

    @own_torch_state()
    def launch(
        self,
        requests: Sequence[Request],
        table_writes: Sequence[TableWrite],
        *,
        until: int,
        spare: int,
        leave_on_end: bool,
        stuck_after: float,
    ) -> RunningLoop:
        """Launch the step of these requests, to be repeated, behind everything that was launched before."""
        runner = self._runner
        self.make_way()
        runner.seats.write_tables(table_writes, runner.upload)
        variant = variant_for(requests)
        rung = variant, runner.limits.ladder.rung_for(len(requests))
        loop, post = self.prepare(rung)
        runner.runners[variant].load(rows=[seat_of(request) for request in requests])
        runner.upload.into(runner.note.policy, np.array([until, leave_on_end], dtype=np.int64))
        number = loop.launch(runner.limits.max_model_len)
        self.launches += 1
        longest = max(request.max_total_tokens - request.num_tokens for request in requests)
        mark = runner.prefill_tokens, runner.downloads
        running = RunningLoop(loop, post, number, tuple(requests), rung, until, spare, longest, stuck_after, mark)
        self.launched.append(running)
        if runner.log is not None:
            runner.log.loop_launched(running, table_writes)
        return running

    @own_torch_state()
    def extend(self, running: RunningLoop, table_writes: Sequence[TableWrite], until: int) -> None:
        """Let a running loop go on to the step ``until``, for which ``table_writes`` bring the blocks.

        On a GPU both are written from a stream beside the one on which the loop runs, the blocks first. The entries are
        read by no step before ``until`` allows for it, and each is one word.
        """
        runner = self._runner
        with self._stream_beside():
            runner.seats.write_tables(table_writes, runner.upload)
            runner.upload.into(runner.note.policy[:1], np.array([until], dtype=np.int64))
        running.until = until
        if runner.log is not None:
            runner.log.loop_extended(running, table_writes)

    @contextmanager
    def _stream_beside(self) -> Iterator[None]:
        device = self._runner.limits.device
        if device.type != "cuda":
            yield
            return
        if self._beside is None:
            self._beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._wrote_beside = True
        with torch.cuda.stream(self._beside):
            yield

    def make_way(self) -> None:
        """Before anything else is launched: it must come after what runs, and after what was written beside it.

        On a GPU the stream sees to the first; on a CPU the loops under way are waited for. Where buffers have moved,
        the loops over their recordings are given up, since those are about to be made again.
        """
        if self._runner.buffers.generation != self._generation:
            self.release()
            self._generation = self._runner.buffers.generation
        if self._runner.limits.device.type != "cuda":
            self.wait()
        elif self._wrote_beside:
            torch.cuda.current_stream().wait_stream(self._beside)  # type: ignore[arg-type]
            self._wrote_beside = False

    def forget(self, running: RunningLoop) -> None:
        """A launch has ended and its records were taken: count its steps."""
        self.launched.remove(running)
        variant, size = running.rung
        self._runner.runners[variant].count_repeats(size, len(running.requests), running.taken)
        self._runner.steps_launched += running.taken
        if self._runner.log is not None:
            self._runner.log.loop_ended(running)

    def wait(self) -> None:
        """Wait until no launch is under way; their records stay to be taken."""
        for running in self.launched:
            running.wait()

    def end(self) -> None:
        """Ask every launch to end and wait until all have; their records stay to be taken."""
        for running in self.launched:
            running.why = running.why or "pause"
            running.ring()
        self.wait()

    def abandon(self) -> None:
        """End every launch and drop its records: after a step that failed, or when the engine goes."""
        launched, self.launched = self.launched, []
        for running in launched:
            running.ring()
        for running in launched:
            running.wait()
        for post in self._posts.values():
            post.clear()

    def release(self, variant: str | None = None) -> None:
        """Give up the loops over one variant's recordings, or over all, when those under way have ended."""
        if self.launched:
            self.end()
        for rung in [rung for rung in self._loops if variant in (None, rung[0])]:
            self._loops.pop(rung)[1].release()
