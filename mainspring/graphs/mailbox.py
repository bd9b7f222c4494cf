"""What a running loop and the CPU tell each other: records out, a doorbell in, in memory that both see."""

from __future__ import annotations

import math
import os
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mainspring.graphs.errors import GraphError
from mainspring.graphs.loop_layout import Slot, State, Words, slot_at

__all__ = ["LoopMemory", "Mailbox"]


class LoopMemory:
    """The shared words and the ring of one mailbox, and the order of its launches.

    It outlives its mailbox while a loop still runs, so it refers to neither.

    Attributes:
        device: on which the loops run.
        depth: records in the ring.
        words: int64 [Words.TOTAL] as a memoryview; reading or writing one element is one access of 8 bytes.
        block: the tensor behind `words`, pinned for a CUDA device.
        ring: int32 [depth, words of a record]; pinned for a CUDA device.
        state: int64 [State.WORDS] on the device.
        lock: held while launches are numbered and the doorbell is rung.
        newest: number of the last launch; 0 before the first.
        failures: errors by launch.
        broken: why no further launch can run, or None.
    """

    def __init__(self, device: torch.device, record_words: int, depth: int) -> None:
        pinned = device.type == "cuda"
        with torch.inference_mode(False), torch.no_grad():
            self.block = torch.zeros(Words.TOTAL, dtype=torch.int64, device="cpu", pin_memory=pinned)
            self.ring = torch.zeros(depth, max(1, record_words), dtype=torch.int32, device="cpu", pin_memory=pinned)
            self.state = torch.zeros(State.WORDS, dtype=torch.int64, device=device)
        self.device = device
        self.depth = depth
        self.words: memoryview = self.block.numpy().data
        self.ring_array: npt.NDArray[np.int32] = self.ring.numpy()
        self.lock = threading.RLock()
        self.newest = 0
        self.failures: dict[int, BaseException] = {}
        self.broken: str | None = None
        self.process = os.getpid()
        # One that its holder may take again: a signal handler or a finalizer may come in between.
        self._fence = threading.RLock()

    def refuse_forked(self) -> None:
        """See that this is the process in which the mailbox was made.

        Raises:
            GraphError: it is a fork of it.
        """
        if os.getpid() != self.process:
            raise GraphError(
                f"this loop was made in process {self.process} and this is a fork of it, {os.getpid()}, in which it "
                f"does not run; make it here, or start the process with the 'spawn' method "
                f"(multiprocessing.get_context('spawn'))"
            )

    def load(self, at: int) -> int:
        """Read one word; what its writer wrote before it is visible to what the caller reads next.

        An aligned load of 8 bytes is one access. On x86 loads are not reordered with one another. Elsewhere the
        lock orders them: it is given back after the load and taken again before the caller goes on, and POSIX locks
        synchronize memory.
        """
        with self._fence:
            value = int(self.words[at])
        with self._fence:
            return value

    def store(self, at: int, value: int) -> None:
        """Write one word after everything that the caller read or wrote before."""
        with self._fence:
            pass
        with self._fence:
            self.words[at] = value

    def number_launch(self, max_steps: int) -> int:
        """Fill in the slot of the next launch and return its number; the caller holds `lock`.

        Raises:
            GraphError: as many launches are under way as there are slots.
        """
        number = self.newest + 1
        at = slot_at(number)
        if number > Words.LAUNCHES and not self.reason(number - Words.LAUNCHES):
            raise GraphError(
                f"{Words.LAUNCHES} launches of this mailbox are under way, which is the limit; join one first"
            )
        self.failures.pop(number - Words.LAUNCHES, None)
        for offset in (Slot.ITERATIONS, Slot.REASON, Slot.FIRST, Slot.STARTED):
            self.words[at + offset] = 0
        self.words[at + Slot.NUMBER] = number
        self.store(at + Slot.MAX_STEPS, max_steps)
        self.newest = number
        return number

    def known(self, launch: int) -> bool:
        """Whether the slot of `launch` still tells of it."""
        return 1 <= launch <= self.newest < launch + Words.LAUNCHES

    def reason(self, launch: int) -> int:
        """Why `launch` ended, as an index into `REASONS`; 0 while it is queued or runs."""
        return self.load(slot_at(launch) + Slot.REASON)

    def iterations(self, launch: int) -> int:
        """Iterations done by `launch`."""
        return self.load(slot_at(launch) + Slot.ITERATIONS)

    def heartbeat(self) -> tuple[int, int]:
        """Oldest launch under way and its iterations: it changes whenever something comes forward."""
        for launch in range(max(1, self.newest - Words.LAUNCHES + 1), self.newest + 1):
            if not self.reason(launch):
                return launch, self.iterations(launch)
        return self.newest + 1, 0

    def ring_doorbell(self, launch: int) -> None:
        """Ask every launch up to `launch` to end."""
        with self.lock:
            if launch > self.words[Words.DOORBELL]:
                self.store(Words.DOORBELL, launch)


class Mailbox:
    """A ring of records that loops fill and the CPU empties, and a doorbell; shared by any number of loops.

    Launches of all loops of one mailbox run one after another, in the order of their `launch`.

    *Out.* Each iteration puts one record into the ring and then raises a counter, with a release at system scope;
    the reader takes the counter, then the records. A record that was not read is never overwritten: a loop that finds
    no room for the next record ends with the reason "ring_full".

    *In.* The doorbell holds the number of a launch, and a launch ends when its own number is not above it. So a
    doorbell that is rung for launch N at any moment, be it after its end, never ends launch N + 1.

    Args:
        device: "cpu" or a CUDA device, on which the loops run.
        record_shape: shape of a record of int32; `()` is one word. A record of no words is allowed.
        depth: records in the ring, >= 1.

    Raises:
        GraphError: `depth` or a size is too small, or the process was forked after CUDA came up.
    """

    def __init__(self, device: torch.device | str, *, record_shape: tuple[int, ...], depth: int = 64) -> None:
        device = torch.device(device)
        if depth < 1 or any(size < 0 for size in record_shape):
            raise GraphError(
                f"mailbox of depth {depth} for records of shape {list(record_shape)}; the depth must be >= 1 and the "
                f"sizes >= 0"
            )
        if device.type == "cuda":
            from mainspring.graphs.capture import refuse_forked

            refuse_forked()
            if device.index is None:
                device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.record_shape = tuple(record_shape)
        self.depth = depth
        self.memory = LoopMemory(device, math.prod(record_shape), depth)
        self.runner: Any = None
        self._reading = threading.Lock()
        self._read = 0

    @property
    def pending(self) -> int:
        """Records that arrived and were not read."""
        return self.memory.load(Words.WRITTEN) - self._read

    def read(self) -> list[npt.NDArray[np.int32]]:
        """Take the records that arrived since the last call, in order, and free their places.

        Returns:
            Copies, int32 of `record_shape` each. After a launch was seen to have ended, all of its records are there.

        Raises:
            GraphError: this is a fork of the process that made the mailbox.
        """
        return list(self.read_block())

    def read_block(self) -> npt.NDArray[np.int32]:
        """What `read` takes, as one array.

        Returns:
            A copy, int32 [records, *`record_shape`], perhaps of no records.

        Raises:
            GraphError: this is a fork of the process that made the mailbox.
        """
        self.memory.refuse_forked()
        with self._reading:
            count = self.memory.load(Words.WRITTEN) - self._read
            block = np.empty((count, math.prod(self.record_shape)), dtype=np.int32)
            if block.size:
                at = self._read % self.depth
                first = min(count, self.depth - at)
                block[:first] = self.memory.ring_array[at : at + first]
                block[first:] = self.memory.ring_array[: count - first]
            if count:
                self._read += count
                self.memory.store(Words.READ, self._read)
            return block.reshape(count, *self.record_shape)

    def ring_doorbell(self) -> None:
        """Ask every launch made so far, on any loop of this mailbox, to end.

        One that runs ends after the iteration under way; one that is queued ends without an iteration; one that has
        ended is not affected, and neither is any later launch.

        Raises:
            GraphError: this is a fork of the process that made the mailbox.
        """
        self.memory.refuse_forked()
        with self.memory.lock:
            self.memory.ring_doorbell(self.memory.newest)
