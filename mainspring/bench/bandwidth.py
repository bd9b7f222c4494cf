"""How fast this device reads its memory: the rate that floors are computed with, measured in the same run."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

from mainspring.engine.errors import EngineError

if TYPE_CHECKING:
    import torch

#: Bytes read on a GPU and on a CPU: many times any cache, and at most a quarter of what is free.
CUDA_BYTES = 4 << 30
CPU_BYTES = 512 << 20
#: (programs per multiprocessor, elements per program and turn, warps) that are tried on a GPU.
CONFIGURATIONS = ((2, 8192, 8), (4, 8192, 8), (4, 4096, 4), (8, 4096, 8), (8, 2048, 4), (1, 16384, 16), (2, 16384, 16))
REPEATS = 10


def read_bandwidth(device: torch.device, nbytes: int | None = None) -> float:
    """Bytes per second that ``device`` reads from its memory, the median of several sweeps over one large buffer.

    On a GPU the best of a few launch shapes of a plain grid-stride kernel; on a CPU a sum over all of torch's threads.
    """
    return _cuda_bandwidth(device, nbytes) if device.type == "cuda" else _cpu_bandwidth(nbytes or CPU_BYTES)


def _cpu_bandwidth(nbytes: int) -> float:
    import torch

    source = torch.rand(max(nbytes // 4, 1), dtype=torch.float32)
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        torch.sum(source)
        seconds.append(time.perf_counter() - started)
    return source.nbytes / statistics.median(seconds[1:])


def _cuda_bandwidth(device: torch.device, nbytes: int | None) -> float:
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    granule = max(block for _, block, _ in CONFIGURATIONS)
    elements = (nbytes or min(CUDA_BYTES, free // 4)) // 4 // granule * granule
    with torch.cuda.device(device):
        # Random contents: a device may read zeros faster.
        source = torch.empty(elements, dtype=torch.int32, device=device).random_(-(1 << 31), (1 << 31) - 1)
        best = min(_sweep_seconds(source, *configuration) for configuration in CONFIGURATIONS)
        rate = source.nbytes / best
        del source
        torch.cuda.empty_cache()
    return rate


def _sweep_seconds(source: torch.Tensor, per_multiprocessor: int, block: int, warps: int) -> float:
    """Median seconds of reading ``source`` once; raises ``EngineError`` where the kernel left something out."""
    import torch

    from mainspring.bench.read_kernel import sum_by_program

    multiprocessors = torch.cuda.get_device_properties(source.device).multi_processor_count
    sums = torch.zeros(per_multiprocessor * multiprocessors, dtype=torch.int32, device=source.device)
    sum_by_program(source, sums, block, warps)
    if int(sums.sum(dtype=torch.int64) - source.sum(dtype=torch.int64)) % (1 << 32):
        raise EngineError(f"the read kernel ({len(sums)} programs x {block}) did not read every element once")
    seconds = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        sum_by_program(source, sums, block, warps)
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds)
