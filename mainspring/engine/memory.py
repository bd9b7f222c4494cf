"""How many KV blocks fit: decided by measuring what the model, a prefill step and the recordings really take."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mainspring.engine.errors import SettingsError
from mainspring.engine.model_runner import ModelRunner
from mainspring.engine.samplers import PLAIN
from mainspring.engine.settings import DEFAULT_CPU_KV_BYTES, EngineSettings
from mainspring.graphs import Ladder

logger = logging.getLogger("mainspring")

#: Blocks of the small cache on which the top rung is recorded for measuring.
PROBE_BLOCKS = 1
#: Share of the KV cache by which the recordings may be larger than expected before that is a warning.
SLACK = 0.02


@dataclass(frozen=True)
class MemoryPlan:
    """What sizing the KV cache found, in bytes but for ``num_blocks`` (usable blocks, the null block apart).

    ``graph_bytes`` is what the ladder is expected to take, once for each variant of the step; ``prefill_bytes`` is what
    the largest prefill step took.
    """

    num_blocks: int
    block_bytes: int
    graph_bytes: int
    prefill_bytes: int


def plan_memory(runner: ModelRunner, settings: EngineSettings) -> MemoryPlan:
    """Record the top rung against a small cache, see what it took, drop it, and divide what is left into blocks.

    On a GPU the KV cache gets ``gpu_memory_utilization`` of its memory less everything else that is in use there; on
    a CPU, or where ``kv_cache_memory`` is given, that many bytes less what the recordings take. A number of blocks that
    was asked for is taken as it is.

    Raises ``SettingsError`` when not even one block fits.
    """
    device = runner.limits.device
    block_bytes = runner.kv_spec.block_bytes
    give_back_memory(device)  # what an engine before this one had may still lie in torch's cache
    runner.allocate(PROBE_BLOCKS)
    before = _bytes_in_use(device)
    runner.dry_prefill()
    after = _bytes_in_use(device)
    prefill_bytes, in_use = after - before, after - (PROBE_BLOCKS + 1) * block_bytes
    graph_bytes = 0 if runner.enforce_eager else _probe_graphs(runner) * len(runner.runners)
    runner.deallocate()
    if settings.kv_cache_memory is not None or device.type == "cpu":
        budget = (settings.kv_cache_memory or DEFAULT_CPU_KV_BYTES) - graph_bytes
        limit = f"kv_cache_memory {settings.kv_cache_memory or DEFAULT_CPU_KV_BYTES} bytes"
        way_out = "raise kv_cache_memory"
    else:
        total = torch.cuda.get_device_properties(device).total_memory
        budget = int(total * settings.gpu_memory_utilization) - in_use - graph_bytes
        limit = (
            f"gpu_memory_utilization {settings.gpu_memory_utilization} of {total} bytes, of which {in_use} are in use"
        )
        way_out = "raise gpu_memory_utilization, or lower max_num_seqs or max_num_batched_tokens"
    num_blocks = budget // block_bytes - 1
    if settings.num_gpu_blocks_override is not None:
        num_blocks = settings.num_gpu_blocks_override
    if num_blocks < 1:
        raise SettingsError(
            f"no room for a single KV block beside the null block: a block of {runner.limits.block_size} tokens takes "
            f"{block_bytes} bytes, the recorded steps take {graph_bytes}, and the limit is {limit}; {way_out}"
        )
    return MemoryPlan(num_blocks, block_bytes, graph_bytes, prefill_bytes)


@dataclass(frozen=True)
class LadderBytes:
    """What recording the plain step's ladder was expected to take, and what it took, in bytes."""

    expected: int
    taken: int

    @property
    def difference(self) -> int:
        """How much more than expected was taken; negative where it was less."""
        return self.taken - self.expected


def record_ladder(runner: ModelRunner, plan: MemoryPlan) -> LadderBytes | None:
    """Record the plain steps on every rung, log what that took beside what was expected, and verify if that is on.

    None where nothing is recorded.
    """
    if runner.enforce_eager:
        return None
    device = runner.limits.device
    before = _graph_bytes(runner, device)
    runner.record()
    found = LadderBytes(plan.graph_bytes // len(runner.runners), _graph_bytes(runner, device) - before)
    logger.info(
        "recorded %d rungs: %.1f MiB, where %.1f MiB were expected (%+.1f MiB); KV cache: %d blocks, %.2f GiB",
        len(runner.limits.ladder.sizes) + len(runner.limits.prefill_ladder or ()),
        found.taken / 2**20,
        found.expected / 2**20,
        found.difference / 2**20,
        plan.num_blocks,
        plan.num_blocks * plan.block_bytes / 2**30,
    )
    if found.difference * len(runner.runners) > SLACK * max(plan.num_blocks * plan.block_bytes, 1):
        logger.warning(
            "the recordings took %.1f MiB more than was set aside for them; lower gpu_memory_utilization if memory "
            "runs out",
            found.difference / 2**20,
        )
    if runner.verifies:
        runner.verify()
    return found


def _probe_graphs(runner: ModelRunner) -> int:
    """Bytes that recording the plain steps' whole ladders is going to take."""
    taken = _probe_ladder(runner, runner.limits.ladder, runner.record)
    if runner.prefill.ladder is not None:
        taken += _probe_ladder(runner, runner.prefill.ladder, runner.prefill.record)
    return taken


def _probe_ladder(runner: ModelRunner, ladder: Ladder, record: Callable[[list[int]], None]) -> int:
    """The same for one ladder, from recording its two largest rungs.

    The first shows the shared pool and its own executable; the second, which fits in the same pool, shows what one
    executable more takes.
    """
    device = runner.limits.device
    sizes = sorted(ladder.sizes, reverse=True)
    taken = []
    for size in sizes[:2]:
        before = _graph_bytes(runner, device)
        record([size])
        taken.append(_graph_bytes(runner, device) - before)
    each = max(taken[1], 0) if len(taken) > 1 else 0
    return max(taken[0], 0) + each * (len(sizes) - 1)


def _graph_bytes(runner: ModelRunner, device: torch.device) -> int:
    if device.type == "cuda":
        return _bytes_in_use(device)
    return int(runner.runners[PLAIN].pool.nbytes)


def give_back_memory(device: torch.device) -> None:
    """Return what torch keeps of freed memory to the device, for other engines and other processes."""
    if device.type == "cuda":
        gc.collect()
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


def _bytes_in_use(device: torch.device) -> int:
    """Bytes of the device's memory that anyone holds; on a CPU not known and taken as 0."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free
