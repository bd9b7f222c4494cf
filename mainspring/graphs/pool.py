"""Memory for intermediates, shared by every graph of which only one runs at a time."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from mainspring.graphs.cpu_program import ALIGNMENT
from mainspring.graphs.errors import GraphError

__all__ = ["CpuArena", "GraphPool"]


class ArenaUser(Protocol):
    """A graph whose intermediates lie in a `CpuArena`."""

    def rebind(self, arena: torch.UntypedStorage) -> None:
        """Move to `arena`."""
        ...


class CpuArena:
    """One block of CPU memory that is as large as its largest user needs."""

    def __init__(self) -> None:
        self._users: weakref.WeakSet[ArenaUser] = weakref.WeakSet()
        self._storage = self._allocate(0)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._storage.nbytes()

    @property
    def extent(self) -> tuple[int, int]:
        """Address and size in bytes."""
        return self._storage.data_ptr(), self._storage.nbytes()

    def join(self, user: ArenaUser, nbytes: int) -> None:
        """Give `user` the first `nbytes` bytes; if the arena must grow, every user moves."""
        if nbytes > self.nbytes:
            self._storage = self._allocate(nbytes)
            for other in list(self._users):
                other.rebind(self._storage)
        user.rebind(self._storage)
        self._users.add(user)

    def leave(self, user: ArenaUser) -> None:
        """Forget `user`; the memory goes when the last one has left."""
        self._users.discard(user)
        if not self._users:
            self._storage = self._allocate(0)

    @staticmethod
    def _allocate(nbytes: int) -> torch.UntypedStorage:
        with torch.inference_mode(False):
            storage = torch.empty(nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
        if storage.data_ptr() % ALIGNMENT:
            raise GraphError(f"the allocator gave an address that is not a multiple of {ALIGNMENT} bytes")
        return storage


class GraphPool:
    """What rungs and runners on one device share, since no two of their graphs run at once.

    Args:
        device: of the graphs.

    Attributes:
        device: of the graphs.
        arena: on the CPU, the shared block.
        abandoned: torch's names of memory that a broken capture made unusable for later ones.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.arena = CpuArena()
        self._handle: tuple[int, int] | None = None
        self._handles: list[tuple[int, int]] = []
        self.abandoned: set[tuple[int, int]] = set()
        self._graphs: Counter[tuple[int, int]] = Counter()
        self._stream: torch.cuda.Stream | None = None
        self._loops = 0
        self._loop_thread: int | None = None
        self._loop_lock = threading.Lock()

    def begin_loop(self, thread: int | None) -> None:
        """The thread `thread` is going to repeat a CPU graph of this pool, once more than it was.

        Raises:
            GraphError: another thread does.
        """
        with self._loop_lock:
            if self._loops and self._loop_thread != thread:
                raise GraphError(
                    "a loop of another mailbox runs on this pool, whose graphs share their memory; join it first, or "
                    "let both loops share a mailbox"
                )
            self._loops += 1
            self._loop_thread = thread

    def end_loop(self) -> None:
        """One launch of a loop on this pool is over."""
        with self._loop_lock:
            self._loops -= 1

    def refuse_looping(self) -> None:
        """See that no loop repeats a CPU graph of this pool, but on the calling thread.

        Raises:
            GraphError: one does.
        """
        if self._loops and self._loop_thread != threading.get_ident():
            raise GraphError("a loop runs on this graph's pool, whose graphs share their memory; join it first")

    @property
    def handle(self) -> tuple[int, int]:
        """torch's name for the CUDA memory pool; made at first use."""
        if self._handle is None:
            first, second = torch.cuda.graph_pool_handle()
            self._handle = (first, second)
            self._handles.append(self._handle)
        return self._handle

    @property
    def handles(self) -> tuple[tuple[int, int], ...]:
        """torch's names for every CUDA memory pool that graphs of this one may lie in."""
        return tuple(self._handles)

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream on which graphs are recorded: torch reuses memory within one stream only."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._stream

    def add_graph(self, handle: tuple[int, int]) -> None:
        """A recorded graph holds memory under `handle` from now on."""
        self._graphs[handle] += 1

    def remove_graph(self, handle: tuple[int, int]) -> None:
        """A recorded graph was destroyed. With the last of its pool torch forgets the pool, and the handle is spent."""
        self._graphs[handle] -= 1
        self.retire_if_empty(handle)

    def retire_if_empty(self, handle: tuple[int, int]) -> None:
        """Use a new pool from now on if no graph holds memory under `handle`, since torch has then forgotten it."""
        if self._graphs[handle] <= 0 and self._handle == handle:
            self._handle = None

    def abandon_handle(self) -> None:
        """After a broken capture: later captures use a new pool; graphs recorded before keep theirs."""
        if self._handle is not None:
            self.abandoned.add(self._handle)
        self._handle = None

    @staticmethod
    def held(handle: tuple[int, int]) -> set[int]:
        """Addresses of the blocks under `handle` that tensors, or libraries through torch, hold now."""
        segments = torch.cuda.memory_snapshot(handle)  # type: ignore[no-untyped-call]
        found = set()
        for segment in segments:
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    found.add(address)
                address += block["size"]
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of device memory (CUDA: segments reserved by the allocator for this pool)."""
        if self.device.type != "cuda":
            return self.arena.nbytes
        return self.nbytes_in(torch.cuda.memory_snapshot())  # type: ignore[no-untyped-call]

    def nbytes_in(self, segments: Iterable[Mapping[str, Any]]) -> int:
        """Bytes of this pool among the allocator's `segments`, for who has its snapshot already."""
        ours = set(self._handles)
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) in ours)
