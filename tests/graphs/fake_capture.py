"""Captures without a GPU: what `cuda_capture` calls of torch's, replaced by counts. Operations run on CPU tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mainspring.graphs import GraphPool, GraphRunner


class FakeGraph:
    """`torch.cuda.CUDAGraph`: notes what is done to it."""

    gpu: FakeGpu

    def __init__(self, keep_graph: bool = False) -> None:
        self.done: list[str] = []
        self.gpu.graphs.append(self)

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        assert self.gpu.capturing is None
        self.gpu.capturing, self.gpu.is_broken = self, False

    def capture_end(self) -> None:
        self.gpu.capturing = None
        if self.gpu.is_broken:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.done.append("captured")

    def instantiate(self) -> None:
        self.done.append("instantiated")

    def replay(self) -> None:
        assert "instantiated" in self.done
        self.done.append("replayed")

    def reset(self) -> None:
        self.done.append("reset")

    def raw_cuda_graph(self) -> int:
        return 1


@dataclass
class Stream:
    stream_id: int

    def wait_stream(self, other: Stream) -> None:
        pass


@dataclass
class FakeGpu:
    """One device.

    Attributes:
        graphs: every graph made, in order.
        capturing: the one that is being captured.
        is_broken: whether CUDA has broken that capture.
        held: addresses of the blocks that somebody holds in the graphs' memory.
        loaded: kernels that are on the device.
        runtime: Triton's hooks.
    """

    graphs: list[FakeGraph] = field(default_factory=list)
    capturing: FakeGraph | None = None
    is_broken: bool = False
    held: list[int] = field(default_factory=list)
    loaded: set[str] = field(default_factory=set)
    runtime: Any = None

    def launch(self, kernel: str) -> None:
        """Launch a Triton kernel, compiling and loading it where it is new."""
        if kernel in self.loaded:
            return
        if self.runtime.jit_cache_hook is not None:
            self.runtime.jit_cache_hook(fn=SimpleNamespace(name=kernel), is_manual_warmup=False)
        if self.capturing is not None:  # CUDA refuses to load a module now
            self.is_broken = True
            raise RuntimeError("Triton Error [CUDA]: operation not permitted when stream is capturing")
        self.loaded.add(kernel)

    def keep(self) -> None:
        """Allocate something that outlives the run; what is allocated in a capture lies in the graphs' memory."""
        if self.capturing is not None:
            self.held.append(0x1000 * (len(self.held) + 1))

    def segments(self, handle: tuple[int, int]) -> list[dict[str, Any]]:
        """The graphs' memory, as the allocator's snapshot has it."""
        return [
            {
                "address": address,
                "blocks": [{"size": 512, "state": "active_allocated"}, {"size": 8, "state": "inactive"}],
            }
            for address in self.held
        ]


@contextmanager
def fake_gpu() -> Iterator[FakeGpu]:
    """torch's CUDA calls that recording needs, on a device that is not there."""
    gpu = FakeGpu(runtime=SimpleNamespace(jit_cache_hook=None))
    handles = iter(range(1, 1000))
    generator = SimpleNamespace(get_offset=lambda: 0)
    calls: dict[str, Any] = {
        "current_device": lambda: 0,
        "device": lambda device: nullcontext(),
        "current_stream": lambda device=None: Stream(0),
        "stream": lambda stream: nullcontext(),
        "set_stream": lambda stream: None,
        "Stream": lambda device=None: Stream(1),
        "synchronize": lambda device=None: None,
        "memory_stats_as_nested_dict": lambda device=None: {"reserved_bytes": {"all": {"current": 0}}},
        "memory_snapshot": gpu.segments,
        "mem_get_info": lambda device=None: (0, 0),
        "graph_pool_handle": lambda: (0, next(handles)),
        "default_generators": [generator],
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda mode: None,
        "CUDAGraph": type("FakeGraph", (FakeGraph,), {"gpu": gpu}),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, call in calls.items():
            patch.setattr(torch.cuda, name, call)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, handle: None, raising=False)
        patch.setitem(sys.modules, "triton", SimpleNamespace(knobs=SimpleNamespace(runtime=gpu.runtime)))
        yield gpu


def on_the_fake(fn: Callable[..., Any], **options: Any) -> GraphRunner:
    """A runner whose buffers are the CPU's and whose recordings are the fake GPU's."""
    runner = GraphRunner(fn, device="cpu", progress=False, verify=False, **options)
    runner.device = torch.device("cuda", 0)
    runner.pool = GraphPool("cuda:0")
    return runner
