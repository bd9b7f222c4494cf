"""Where the time of one decode step goes, kernel by kernel, each beside its own floor where its bytes are known."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mainspring.bench.floor import HEAD, LAYER_PRODUCTS, kv_bytes, product_shapes
from mainspring.bench.latency import Setting
from mainspring.bench.replay import PausedBatch
from mainspring.engine.errors import EngineError

_PRODUCT = re.compile(r"gemv|gemm|_mma_kernel|skinny|matmul|nvjet|cutlass", re.IGNORECASE)
_ATTENTION = re.compile(r"attention|flash|^_decode_kernel", re.IGNORECASE)
#: What finishes the work of another kernel reads none of its large operands.
_HELPER = re.compile(r"reduce|combine|merge", re.IGNORECASE)


@dataclass(frozen=True)
class KernelEvent:
    """One kernel of one step; ``microseconds`` from its start to its end, which may overlap its neighbours."""

    name: str
    microseconds: float


@dataclass(frozen=True)
class KernelRow:
    """All kernels of a step that have one name and one part; times in microseconds, all of them together.

    ``part`` says which product it is, or ``attention``, and is empty where that is not known, as is the floor.
    """

    name: str
    part: str
    count: int
    total_us: float
    share: float
    floor_us: float | None

    @property
    def ratio(self) -> float | None:
        """Time over floor."""
        return None if self.floor_us is None else self.total_us / self.floor_us


def record_kernels(paused: PausedBatch) -> list[KernelEvent]:
    """The kernels of one step in order, each with its median time among several replays.

    Needs a GPU. Raises ``EngineError`` when the replays do not all show the same kernels.
    """
    _profiled(paused)  # the profiler's own start-up goes into the first
    return median_step(_profiled(paused), paused.steps)


def median_step(events: Sequence[KernelEvent], steps: int) -> list[KernelEvent]:
    """One step out of ``steps`` equal ones that follow each other. Raises ``EngineError`` where they differ."""
    length = len(events) // steps
    split = [events[index * length : (index + 1) * length] for index in range(steps)]
    names = [event.name for event in split[0]]
    if not names or length * steps != len(events) or any([event.name for event in each] != names for each in split):
        raise EngineError(
            f"the profiler saw {len(events)} kernels in {steps} replays, which are not {steps} equal steps"
        )
    return [
        KernelEvent(name, statistics.median(each[place].microseconds for each in split))
        for place, name in enumerate(names)
    ]


def breakdown(events: Sequence[KernelEvent], setting: Setting, batch: int) -> list[KernelRow]:
    """One step's kernels, gathered by name and part, the dearest first.

    Parts are told by order: where a step has four products a layer and one for the head, they are QKV, output, gate
    and up, down; where it has one attention kernel a layer, that reads the layer's keys and values. Where the numbers
    are others, parts stay unknown.
    """
    parts, read = _parts([event.name for event in events], setting, batch)
    total = sum(event.microseconds for event in events)
    groups: dict[tuple[str, str], list[float]] = {}
    for event, part in zip(events, parts, strict=True):
        groups.setdefault((event.name, part), []).append(event.microseconds)
    rows = [
        KernelRow(
            name=name,
            part=part,
            count=len(times),
            total_us=sum(times),
            share=sum(times) / total,
            floor_us=1e6 * len(times) * read[part] / setting.bandwidth if part else None,
        )
        for (name, part), times in groups.items()
    ]
    return sorted(rows, key=lambda row: -row.total_us)


def _parts(names: Sequence[str], setting: Setting, batch: int) -> tuple[list[str], dict[str, int]]:
    """The part of each kernel, and the bytes that one kernel of each part reads."""
    config, itemsize = setting.config, setting.dtype.itemsize
    layers = config.num_layers
    read = {part: itemsize * out * into for part, (out, into) in product_shapes(config).items()}
    read["attention"] = kv_bytes(config, itemsize, setting.workload.context, batch) // layers
    parts = [""] * len(names)
    found = {
        kind: [place for place, name in enumerate(names) if pattern.search(name) and not _HELPER.search(name)]
        for kind, pattern in (("product", _PRODUCT), ("attention", _ATTENTION))
    }
    if len(found["product"]) == len(LAYER_PRODUCTS) * layers + 1:
        for place, part in zip(found["product"], [*LAYER_PRODUCTS * layers, HEAD], strict=True):
            parts[place] = part
    if len(found["attention"]) == layers:
        for place in found["attention"]:
            parts[place] = "attention"
    return parts, read


def _profiled(paused: PausedBatch) -> list[KernelEvent]:
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    paused.rewind()
    torch.cuda.synchronize(paused.device)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(paused.steps):
            paused.replay()
        torch.cuda.synchronize(paused.device)
    seen = [event for event in profiler.events() or () if event.device_type == DeviceType.CUDA]
    seen.sort(key=lambda event: event.time_range.start)
    return [KernelEvent(event.name, event.time_range.elapsed_us()) for event in seen]
