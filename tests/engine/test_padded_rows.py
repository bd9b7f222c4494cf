"""What the model is given for rows that serve nobody, and that every index it gets is as long as its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from mainspring import LLM, SamplingParams
from mainspring.engine.samplers import FULL, PLAIN
from mainspring.engine.seats import SeatState
from mainspring.models.inputs import ModelInputs

MakeLLM = Callable[..., LLM]


@contextmanager
def watched(llm: LLM) -> Iterator[list[ModelInputs]]:
    """Copies of everything that the model is given meanwhile."""
    seen: list[ModelInputs] = []

    def look(_module: object, arguments: tuple[Any, ...]) -> None:
        fields = {name: value.clone() if value is not None else None for name, value in vars(arguments[0]).items()}
        seen.append(ModelInputs(**fields))

    handle = llm.core.runner.model.register_forward_pre_hook(look)
    try:
        yield seen
    finally:
        handle.remove()


def seat(position: int) -> SeatState:
    return SeatState(token_id=9, position=position, remaining=20, min_remaining=0)


@pytest.mark.parametrize("variant", [PLAIN, FULL])
def test_a_row_that_serves_nobody_reaches_the_model_without_slot_length_or_block(
    make_tiny: MakeLLM, variant: str
) -> None:
    """Padding, a seat whose request has ended, and a seat without a block for its position: all alike."""
    llm = make_tiny(max_num_seqs=8, enforce_eager=True, num_gpu_blocks_override=20)
    runner = llm.core.runner
    runner.seats.write([(index, seat(position)) for index, position in enumerate((5, 21, 7, 16))], runner.upload)
    runner.seats.write_tables([(0, 0, 1), (1, 0, 2), (1, 1, 3), (2, 0, 4), (3, 0, 20)], runner.upload)
    runner.seats.alive[2] = 0  # it has ended
    # The seat of an earlier request is not empty: what it held must not reach the model either.
    runner.seats.block_tables[runner.seats.null_seat] = 20
    runner.seats.positions[runner.seats.null_seat] = 400
    with watched(llm) as seen:
        runner.runners[variant](rows=[1, 2, 0, 3, 2])
    [inputs] = seen
    assert inputs.slots.tolist() == [3 * 16 + 5, -1, 1 * 16 + 5, -1, -1, -1, -1, -1]
    assert inputs.seq_lens.tolist() == [22, 0, 6, 0, 0, 0, 0, 0]
    assert inputs.positions.tolist() == [21, 0, 5, 0, 0, 0, 0, 0]
    assert inputs.token_ids.tolist() == [9, 0, 9, 0, 0, 0, 0, 0]
    assert inputs.block_tables[:, :2].tolist() == [[2, 3], [0, 0], [1, 0]] + [[0, 0]] * 5
    assert not inputs.block_tables[:, 2:].any()


def test_every_step_gives_the_model_as_many_slots_as_tokens(make_tiny: MakeLLM) -> None:
    llm = make_tiny(max_num_seqs=20, enforce_eager=True, max_num_batched_tokens=37, kv_cache_memory=1 << 20)
    prompts = [{"prompt_token_ids": [5 + index] * (1 + 5 * index)} for index in range(11)]
    with watched(llm) as seen:
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    prefills = [inputs for inputs in seen if inputs.query_starts is not None]
    decodes = [inputs for inputs in seen if inputs.query_starts is None]
    assert prefills and decodes
    for inputs in seen:
        assert len(inputs.token_ids) == len(inputs.positions) == len(inputs.slots)
        assert len(inputs.block_tables) == len(inputs.seq_lens)
        # No two tokens share a slot, and none has one outside of the cache or in the null block.
        slots = inputs.slots[inputs.slots >= 0]
        assert len(slots.unique()) == len(slots)
        assert bool((slots >= 16).all() and (slots < 16 * (llm.core.memory.num_blocks + 1)).all())
    for inputs in decodes:
        assert len(inputs.token_ids) == len(inputs.seq_lens) and len(inputs.token_ids) in llm.core.limits.ladder
    for inputs in prefills:
        assert inputs.query_starts is not None
        assert int(inputs.query_starts[-1]) == len(inputs.token_ids)
        assert torch.equal(inputs.slots >= 0, torch.ones_like(inputs.slots, dtype=torch.bool))
