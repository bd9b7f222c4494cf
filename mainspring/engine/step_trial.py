"""Trying the decode step out on requests that do not exist, so that its recordings can be verified."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mainspring.engine.asks import Asks

if TYPE_CHECKING:
    from mainspring.engine.model_runner import ModelRunner

#: KV blocks that one row of a trial may have, and all rows together.
BLOCKS_A_ROW = 4
BLOCKS_IN_ALL = 64

#: What a trial's requests ask for, where the engine has buffers for it. Other kinds need contents that fit together.
TRIED = Asks.PENALTIES | Asks.LOGIT_BIAS | Asks.LOGPROBS


class DecodeTrial:
    """Random seats over random keys and values: every seat alive, at positions for which there are blocks; some rows
    without a block, if there are more rows than blocks. What is written is put back by whoever runs the trial."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def state(self, rows: int) -> Mapping[str, Tensor]:
        """See ``mainspring.graphs.Trial``: all buffers of the engine's own, and the KV blocks that a trial uses."""
        buffers = self._runner.buffers
        state = {name: buffers[name] for name in buffers if buffers.is_owned(name) and ".input." not in name}
        state["kv_cache"] = self._blocks(rows)
        return state

    def prepare(self, rows: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        """See ``mainspring.graphs.Trial``."""
        runner, seats, size = self._runner, self._runner.seats, self._runner.limits.block_size
        blocks = self._blocks(rows)
        on_device = torch.Generator(device=blocks.device).manual_seed(generator.initial_seed())
        blocks[:, :, 1:].normal_(generator=on_device)
        used = blocks.shape[2] - 1
        chosen = torch.randperm(seats.num_seats, generator=generator)[:rows]
        tables = torch.zeros_like(seats.block_tables, device="cpu")
        positions = torch.zeros(seats.num_seats + 1, dtype=torch.int32)
        next_block = 1
        for row, seat in enumerate(chosen.tolist()):
            each = min(used * (row + 1) // len(chosen) - used * row // len(chosen), BLOCKS_A_ROW, seats.max_blocks)
            tables[seat, :each] = torch.arange(next_block, next_block + each)
            next_block += each
            last = min(each * size, runner.limits.max_model_len) - 1
            positions[seat] = torch.randint(0, max(last, 0) + 1, (), generator=generator)
        seats.block_tables.copy_(tables)
        count = seats.num_seats
        fields = {
            "token_ids": torch.randint(0, runner.model.config.vocab_size, (count,), generator=generator),
            "positions": positions[:count],
            "alive": torch.ones(count),
            "remaining": torch.randint(1, 100, (count,), generator=generator),
            "min_remaining": torch.randint(0, 2, (count,), generator=generator),
            "top_k": torch.randint(0, 50, (count,), generator=generator),
            "seed_low": torch.randint(0, 1 << 31, (count,), generator=generator),
            "temperature": torch.randint(0, 3, (count,), generator=generator) / 2,
            "top_p": 0.5 + torch.rand(count, generator=generator) / 2,
            "min_p": torch.rand(count, generator=generator) / 10,
            "repetition_penalty": 1 + torch.rand(count, generator=generator),
            "asks": torch.full((count,), int(runner.logits_state.active & TRIED)),
        }
        for name, values in fields.items():
            field: Tensor = getattr(seats, name)
            field[:count].copy_(values)
        return {"rows": chosen.to(torch.int32)}

    def _blocks(self, rows: int) -> Tensor:
        """The null block and those that a trial of so many rows uses: ``[layers, 2, blocks, ...]``."""
        cache = self._runner.buffers["kv_cache"]
        wanted = max(min(rows * BLOCKS_A_ROW, BLOCKS_IN_ALL), 1)
        return cache[:, :, : min(wanted, cache.shape[2] - 1) + 1]
