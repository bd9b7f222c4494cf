"""What every kind of loop has in common: what runs its launches, what it reads, and how it is given up."""

from __future__ import annotations

import os
import time
from typing import Any, Protocol

import torch
from torch import Tensor

from mainspring.graphs.cpu_graph import CpuGraph
from mainspring.graphs.cuda_graph import CudaGraph
from mainspring.graphs.errors import GraphError
from mainspring.graphs.mailbox import LoopMemory, Mailbox

__all__ = ["LoopBackend", "check_tensors", "finish"]

STOP_SECONDS = 10.0
"""How long a loop that is given up may take to end before its memory is left to it for good."""

_LEFT: list[Any] = []
"""What loops that did not end are still using: never freed."""


class LoopBackend(Protocol):
    """How launches run on one kind of device."""

    def start(self, max_steps: int) -> int:
        """Queue a launch and return its number."""
        ...

    def fault(self, launch: int) -> BaseException | None:
        """The error of the device that stopped `launch`, if there is one; costs a call to the driver."""
        ...

    def may_wait(self) -> bool:
        """Whether the calling thread may wait for the loop."""
        ...

    def free(self) -> None:
        """Give up what was made; nothing runs."""
        ...


def check_tensors(name: str, mailbox: Mailbox, flag: Tensor, record: Tensor | None) -> None:
    """See that flag and record are what the kernel reads."""
    wanted = [("flag", flag, (1,))] + ([] if record is None else [("record", record, mailbox.record_shape)])
    for role, tensor, shape in wanted:
        if tensor.dtype is not torch.int32 or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise GraphError(
                f"the {role} of loop {name!r} is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}; it "
                f"must be contiguous int32 {list(shape)}"
            )
        if tensor.device != mailbox.device:
            raise GraphError(
                f"the {role} of loop {name!r} is on {tensor.device} and its mailbox on {mailbox.device}; they must be "
                f"the same"
            )


def finish(
    backend: LoopBackend, graph: CudaGraph | CpuGraph, memory: LoopMemory, newest: list[int], held: tuple[Any, ...]
) -> None:
    """End a loop that is given up, and let go of its graph; `held` is what it may still be using."""
    if os.getpid() != memory.process:
        return
    launch = newest[0]
    if launch and memory.known(launch) and not memory.reason(launch):
        memory.ring_doorbell(launch)
        deadline = time.monotonic() + STOP_SECONDS
        while backend.may_wait() and not memory.reason(launch):
            if memory.broken is not None or backend.fault(launch) is not None or time.monotonic() > deadline:
                _LEFT.append((backend, graph, memory, held))
                return
            time.sleep(1e-4)
    if memory.broken is not None:  # the device is lost, and nothing of it can be freed
        _LEFT.append((backend, graph, memory, held))
        return
    graph.holds.remove(id(newest))
    backend.free()
