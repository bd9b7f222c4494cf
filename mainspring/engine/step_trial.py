"""Trying steps out on requests that do not exist, so that their recordings can be verified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mainspring.engine.admission import Admission
from mainspring.engine.asks import Asks
from mainspring.engine.prefill_batch import PrefillBatch
from mainspring.engine.seats import SeatState

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
        used = self._fill_blocks(rows, generator)
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
        self._fill_seats(positions, generator)
        return {"rows": chosen.to(torch.int32)}

    def _fill_blocks(self, rows: int, generator: torch.Generator) -> int:
        """Random keys and values in the blocks of a trial of so many rows, from block 1 on; returns how many blocks."""
        blocks = self._blocks(rows)
        on_device = torch.Generator(device=blocks.device).manual_seed(generator.initial_seed())
        blocks[:, :, 1:].normal_(generator=on_device)
        return blocks.shape[2] - 1

    def _fill_seats(self, positions: Tensor, generator: torch.Generator) -> None:
        """Seats that are alive at these ``positions`` ``[seats + 1]`` int32, and ask for this and that."""
        runner, seats = self._runner, self._runner.seats
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

    def _blocks(self, rows: int) -> Tensor:
        """The null block and those that a trial of so many rows uses: ``[layers, 2, blocks, ...]``."""
        cache = self._runner.buffers["kv_cache"]
        return cache[:, :, : min(self._wanted(rows), cache.shape[2] - 1) + 1]

    def _wanted(self, rows: int) -> int:
        """Blocks that a trial of so many rows uses, where there are as many."""
        return max(min(rows * BLOCKS_A_ROW, BLOCKS_IN_ALL), 1)


class PrefillTrial(DecodeTrial):
    """Chunks of random prompts, with and without something in front of them, over random keys and values. Some complete
    their prompt; where blocks run out, the last tokens have none."""

    def prepare(self, rows: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        """See ``mainspring.graphs.Trial``; ``rows`` is the number of tokens."""
        runner, seats = self._runner, self._runner.seats
        size, longest = runner.limits.block_size, runner.limits.max_model_len
        free = self._fill_blocks(rows, generator)
        tables = torch.zeros_like(seats.block_tables, device="cpu")
        positions = torch.zeros(seats.num_seats + 1, dtype=torch.int32)
        count = max(-(-rows // longest), min(self._runner.limits.prefill_sequences - 1, rows, 3), 1)
        chosen = torch.randperm(seats.num_seats, generator=generator)[:count].tolist()
        parts: dict[str, list[int]] = {field.name: [] for field in fields(PrefillBatch)}
        parts["query_starts"].append(0)
        writes: list[tuple[int, int, int]] = []
        next_block = 1
        for index, seat in enumerate(chosen):
            length = rows * (index + 1) // count - rows * index // count
            room = min(longest - length, size + 1)
            start = int(torch.randint(0, room + 1, (), generator=generator)) if index % 2 else 0
            blocks = min(-(-(start + length) // size), free - next_block + 1)
            entries = range(next_block, next_block + blocks)
            if index == 0 and blocks <= rows:
                tables[seat] = 1  # an earlier request's, and to be cleared
                writes += [(seat, column, block) for column, block in enumerate(entries)]
            else:
                tables[seat, :blocks] = torch.tensor(entries, dtype=torch.int32)
            next_block += blocks
            positions[seat] = start + length - 1
            ids = torch.randint(0, runner.model.config.vocab_size, (length,), generator=generator)
            parts["token_ids"] += ids.tolist()
            parts["positions"] += range(start, start + length)
            parts["token_seats"] += [seat] * length
            parts["seats"].append(seat)
            parts["query_starts"].append(len(parts["token_ids"]))
            parts["seq_lens"].append(start + length)
            if index != 1:
                parts["last"].append(len(parts["token_ids"]) - 1)
                parts["completed_seats"].append(seat)
        seats.block_tables.copy_(tables)
        self._fill_seats(positions, generator)
        states = [
            SeatState(token_id=3, position=int(positions[seat]), remaining=9, min_remaining=index, top_k=20 * index)
            for index, seat in enumerate(parts["completed_seats"])
        ]
        batch = PrefillBatch(**{name: np.asarray(part, dtype=np.int64) for name, part in parts.items()})
        return {"tokens": torch.from_numpy(Admission.of(writes, states, seats.max_blocks).beside(batch.rows()))}

    def _wanted(self, rows: int) -> int:
        return -(-rows // self._runner.limits.block_size) + 3 * self._runner.limits.prefill_sequences
