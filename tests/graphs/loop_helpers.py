"""A recording that counts, for the tests of loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mainspring.graphs import CpuGraph, CudaGraph, GraphPool, Loop, Mailbox

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ENDLESS = 10**12
WAIT = 60.0


def capture(fn: Any, device: str, pool: GraphPool | None = None) -> CpuGraph | CudaGraph:
    kind = CudaGraph if device == "cuda" else CpuGraph
    return kind.capture(fn, pool=pool or GraphPool(device))


class Counter:
    """Counts its runs up to a goal; its record is the count and `tag`, repeated over `width` columns."""

    def __init__(
        self, device: str, mailbox: Mailbox | None = None, width: int = 1, tag: int = 0, **options: Any
    ) -> None:
        self.count = torch.zeros(1, dtype=torch.int32, device=device)
        self.goal = torch.full((1,), -1, dtype=torch.int32, device=device)
        self.flag = torch.zeros(1, dtype=torch.int32, device=device)
        self.record = torch.zeros(2, width, dtype=torch.int32, device=device)
        self.tag = torch.full((1,), tag, dtype=torch.int32, device=device)
        self.graph = capture(self._step, device, options.pop("pool", None))
        self.reset()
        record = options.pop("record", self.record)
        self.loop = Loop(self.graph, flag=self.flag, mailbox=mailbox, record=record, **options)

    def _step(self) -> None:
        self.count.add_(1)
        self.record[0].copy_(self.count.expand(self.record.shape[1]))
        self.record[1].copy_(self.tag.expand(self.record.shape[1]))
        self.flag.copy_(self.count.ne(self.goal))

    def reset(self, count: int = 0, goal: int = -1) -> None:
        self.count.fill_(count)
        self.goal.fill_(goal)


def value(tensor: Tensor) -> int:
    return int(tensor.item())
