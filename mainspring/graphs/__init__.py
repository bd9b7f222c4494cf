"""Recording and replay of tensor programs at fixed addresses: CUDA graphs, and the same contract on the CPU.

Knows tensors and callables only; usable for any `torch` module:

    runner = GraphRunner(lambda x: model(x), inputs={"x": Input((64,), torch.float32)},
                         ladder=Ladder.default(32), device="cuda")
    y = runner(x=torch.randn(5, 64))
"""

from __future__ import annotations

from mainspring.graphs.buffers import FixedBuffers, Signature
from mainspring.graphs.counters import GraphCounters
from mainspring.graphs.cpu_graph import CpuGraph
from mainspring.graphs.cuda_graph import CudaGraph
from mainspring.graphs.errors import (
    CaptureError,
    GraphError,
    LadderError,
    LoopError,
    LoopStuckError,
    StaleAddressError,
)
from mainspring.graphs.ladder import Ladder
from mainspring.graphs.loop import Loop, LoopEnd, LoopProgress
from mainspring.graphs.mailbox import Mailbox
from mainspring.graphs.pool import GraphPool
from mainspring.graphs.report import Address, CaptureReport, Operation, TensorUse
from mainspring.graphs.runner import GraphRunner
from mainspring.graphs.staging import Staging
from mainspring.graphs.step_io import Input

__all__ = [
    "Address",
    "CaptureError",
    "CaptureReport",
    "CpuGraph",
    "CudaGraph",
    "FixedBuffers",
    "GraphCounters",
    "GraphError",
    "GraphPool",
    "GraphRunner",
    "Input",
    "Ladder",
    "LadderError",
    "Loop",
    "LoopEnd",
    "LoopError",
    "LoopProgress",
    "LoopStuckError",
    "Mailbox",
    "Operation",
    "Signature",
    "StaleAddressError",
    "Staging",
    "TensorUse",
]
