"""A recording that the device repeats by itself."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mainspring.graphs import loop_cuda
from mainspring.graphs.buffers import Signature
from mainspring.graphs.cpu_graph import CpuGraph
from mainspring.graphs.cuda_graph import CudaGraph
from mainspring.graphs.errors import GraphError, LoopError, LoopStuckError, StaleAddressError
from mainspring.graphs.loop_backend import LoopBackend, check_tensors, finish
from mainspring.graphs.loop_cpu import CpuLoop
from mainspring.graphs.loop_layout import REASONS, Slot, Words, slot_at
from mainspring.graphs.mailbox import Mailbox

__all__ = ["Loop", "LoopEnd", "LoopProgress"]


@dataclass(frozen=True, slots=True)
class LoopProgress:
    """How far a launch is.

    Attributes:
        launch: its number, from 1, among the launches of its mailbox; 0 if there was none.
        iterations: done so far.
        running: it is queued or runs.
        reason: why it ended, as in `LoopEnd`; None until then.
    """

    launch: int
    iterations: int
    running: bool
    reason: str | None


@dataclass(frozen=True, slots=True)
class LoopEnd:
    """How a launch ended.

    Attributes:
        launch: its number among the launches of its mailbox.
        iterations: done in all.
        reason: "flag" (the recording said stop), "doorbell", "max_steps" or "ring_full" (the mailbox has no room for
            another record). The first of these that held, in this order.
    """

    launch: int
    iterations: int
    reason: str


class Loop:
    """Repeats a recording on the device until its flag says stop, the doorbell rings, `max_steps` are done or the
    mailbox is full.

    On CUDA that is one launch of one graph, whose WHILE node holds the recording; the CPU is not needed in between.
    On the CPU a thread does the same.

        x, flag = torch.zeros(n), torch.ones(1, dtype=torch.int32)  # on any device

        def sweep():                                                # Jacobi: x = (b - R x) / d
            new = (b - r @ x) / d
            flag.copy_(((new - x).abs().max() > 1e-6).reshape(1))   # go on?
            x.copy_(new)

        loop = Loop(CpuGraph.capture(sweep), flag=flag)             # or CudaGraph.capture
        loop.launch(max_steps=10_000)                               # returns at once
        end = loop.join()                                           # LoopEnd(iterations=..., reason="flag")

    An iteration is run before the flag is first read, so its value before a launch does not matter. A doorbell that
    rang for this launch, and a full ring, are seen before the first iteration: such a launch ends with none.

    Launches of one mailbox, on whichever of its loops, run in the order of `launch`; a second one may be queued behind
    the first, up to 16. On CUDA they are ordered on the stream that is current at `launch` like anything else there.
    On the CPU there is no stream: use what the recording uses only after `join`.

    Args:
        graph: what to repeat, held until `release`; a graph under a loop refuses to be released.
        flag: int32 [1] on the device; the recording leaves 0 there to stop, anything else to go on.
        mailbox: where records go, and the doorbell; its own one by default.
        record: int32 of the mailbox's `record_shape` on the device, contiguous; copied into the mailbox's ring after
            each iteration. Without it a loop leaves no records and is never ended by a full ring.
        name: for messages.

    Raises:
        GraphError: a loop cannot be had on this device (`available` says why), or the tensors do not fit.
    """

    def __init__(
        self,
        graph: CudaGraph | CpuGraph,
        *,
        flag: Tensor,
        mailbox: Mailbox | None = None,
        record: Tensor | None = None,
        name: str = "loop",
    ) -> None:
        device = graph.pool.device
        if (why := self.available(device)) is not None:
            raise GraphError(f"no loop can be had on {device}: {why}")
        if mailbox is None:
            mailbox = Mailbox(device, record_shape=(0,) if record is None else tuple(record.shape))
        mailbox.memory.refuse_forked()
        check_tensors(name, mailbox, flag, record)
        if device.type != mailbox.device.type or (device.index is not None and device != mailbox.device):
            raise GraphError(f"loop {name!r} is on {device} and its mailbox on {mailbox.device}; they must be the same")
        self.name = name
        self.mailbox = mailbox
        self.graph = graph
        self.flag = flag
        self.record = record
        self._signatures = [(t, Signature.of(t)) for t in (flag, record) if t is not None]
        self._newest = [0]  # shared with what ends the loop when it is given up
        self._backend = _backend(graph, flag, record, mailbox, name)
        graph.holds.add(id(self._newest), name)
        self._finish: Callable[..., object] = weakref.finalize(
            self, finish, self._backend, graph, mailbox.memory, self._newest, (mailbox, flag, record)
        )

    @staticmethod
    def available(device: torch.device | str) -> str | None:
        """Why a loop cannot be had on `device`, or None if it can."""
        device = torch.device(device)
        if device.type == "cpu":
            return None
        if device.type == "cuda":
            return loop_cuda.unavailable(device)
        return "only CPU and CUDA devices have one"

    def launch(self, max_steps: int) -> int:
        """Start repeating, behind the mailbox's earlier launches; returns at once.

        Args:
            max_steps: iterations after which it ends at the latest, >= 1.

        Returns:
            The number of this launch, for `poll` and `join`.

        Raises:
            GraphError: `max_steps` is too small, the loop was released, too many launches are under way, the device
                failed before, or this is a fork.
            StaleAddressError: flag or record have moved.
        """
        memory = self.mailbox.memory
        memory.refuse_forked()
        if max_steps < 1:
            raise GraphError(f"loop {self.name!r}: max_steps is {max_steps}; it must be >= 1")
        for role, (tensor, recorded) in zip(("flag", "record"), self._signatures, strict=False):
            if not recorded.matches(tensor):
                raise StaleAddressError(f"{self.name}.{role}", str(recorded), str(Signature.of(tensor)))
        with memory.lock:
            if memory.broken is not None:
                raise GraphError(f"loop {self.name!r} cannot run: {memory.broken}")
            self._newest[0] = self._backend.start(max_steps)
            return self._newest[0]

    def ring_doorbell(self) -> None:
        """Ask this loop's newest launch to end, and every earlier launch of the mailbox; see `Mailbox.ring_doorbell`.

        Launches made after it, on any loop, are not affected.
        """
        self.mailbox.memory.refuse_forked()
        self.mailbox.memory.ring_doorbell(self._newest[0])

    def poll(self, launch: int | None = None) -> LoopProgress:
        """How far a launch is, without waiting for the device.

        Args:
            launch: its number, one of the mailbox's last 16; by default this loop's newest.

        Raises:
            LoopError: it failed.
            GraphError: it is not known any more, or this is a fork.
        """
        memory = self.mailbox.memory
        memory.refuse_forked()
        number = self._newest[0] if launch is None else launch
        if number == 0 and launch is None:
            return LoopProgress(0, 0, False, None)
        reason = self._reason(number)
        return LoopProgress(number, memory.iterations(number), reason == 0, REASONS[reason] or None)

    def running(self, launch: int) -> bool:
        """Whether a launch is queued or runs: what `poll` tells of it, for those who look often. Raises as `poll`."""
        self.mailbox.memory.refuse_forked()
        return self._reason(launch) == 0

    def join(self, timeout: float | None = None, launch: int | None = None, interval: float = 1e-4) -> LoopEnd:
        """Wait for the end of a launch.

        Work that is put on the same stream afterwards finds the last iteration complete.

        Args:
            timeout: seconds in which no launch of the mailbox finishes an iteration before the loop counts as stuck;
                None waits for ever. What runs on the stream in front of the loop takes part of it.
            launch: its number; by default this loop's newest.
            interval: seconds between two looks.

        Raises:
            LoopStuckError: nothing came forward for `timeout` seconds.
            LoopError: the launch failed.
            GraphError: there was no launch.
        """
        if launch is None and self._newest[0] == 0:
            raise GraphError(f"loop {self.name!r} was never launched")
        memory = self.mailbox.memory
        heartbeat, since = memory.heartbeat(), time.monotonic()
        while True:
            progress = self.poll(launch)
            if progress.reason is not None:
                return LoopEnd(progress.launch, progress.iterations, progress.reason)
            if timeout is not None:
                if (beat := memory.heartbeat()) != heartbeat:
                    heartbeat, since = beat, time.monotonic()
                elif time.monotonic() - since >= timeout:
                    raise LoopStuckError(
                        f"launch {progress.launch} of {self.name!r} finished no iteration for {timeout:g} s, after "
                        f"{progress.iterations}; it may still be running",
                        progress.launch,
                    )
            time.sleep(interval)

    def stamps(self, launch: int | None = None) -> npt.NDArray[np.int64]:
        """When a launch began and when each of its iterations ended, in nanoseconds of the device's clock.

        Returns:
            int64 [iterations + 1]; of more than 4095 iterations only the ends of the last 4096. The clock is
            `%globaltimer` on CUDA and `time.perf_counter_ns` on the CPU.
        """
        progress = self.poll(launch)
        memory = self.mailbox.memory
        if progress.launch == 0:
            return np.empty(0, dtype=np.int64)
        at = slot_at(progress.launch)
        first, count = int(memory.words[at + Slot.FIRST]), progress.iterations
        kept = range(max(first, first + count - Words.STAMPS), first + count)
        ends = [memory.words[Words.STAMPS_AT + index % Words.STAMPS] for index in kept]
        start = [memory.words[at + Slot.STARTED]] if count < Words.STAMPS else []
        return np.array(start + ends, dtype=np.int64)

    def release(self) -> None:
        """Ring the doorbell, wait for the end (10 s at most) and let go of the graph. Happens by itself with the last
        reference. A loop that does not end keeps its memory for good."""
        self._finish()

    def _reason(self, launch: int) -> int:
        """Why a launch ended, as an index into `REASONS`; 0 while it is under way. Raises where it failed."""
        memory = self.mailbox.memory
        if not memory.known(launch):
            raise GraphError(
                f"loop {self.name!r}: nothing is known of launch {launch}; the last {Words.LAUNCHES} of the "
                f"mailbox's {memory.newest} are"
            )
        reason = memory.reason(launch)
        if reason == 0:
            self._look_for_fault(launch)
        elif REASONS[reason] in ("lost", "failed"):
            raise self._error(launch, memory.failures.get(launch))
        return reason

    def _look_for_fault(self, launch: int) -> None:
        """Raise what the device says about a launch that has not ended."""
        if (broken := self.mailbox.memory.broken) is not None:
            raise LoopError(broken, launch, fatal=True)
        error = self._backend.fault(launch)
        if error is not None and not self.mailbox.memory.reason(launch):
            raise self._error(launch, error, fatal=True)

    def _error(self, launch: int, cause: BaseException | None, fatal: bool = False) -> LoopError:
        text = "the device lost count of the launches"
        if cause is not None:
            text = f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"  # CUDA's advice fills the other lines
        error = LoopError(f"launch {launch} of {self.name!r} failed: {text}", launch, fatal)
        if fatal or cause is None:
            self.mailbox.memory.broken = str(error)
        error.__cause__ = cause
        return error


def _backend(
    graph: CudaGraph | CpuGraph, flag: Tensor, record: Tensor | None, mailbox: Mailbox, name: str
) -> LoopBackend:
    """What runs the launches of a loop."""
    if isinstance(graph, CpuGraph):
        return CpuLoop(graph, flag, record, mailbox)
    return loop_cuda.CudaLoop(graph, flag, record, mailbox, name)
