"""The recorded decode step: same bits as eager on every rung, whole enough to repeat without the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from mainspring import LLM
from mainspring.engine.model_runner import ModelRunner
from mainspring.engine.samplers import FULL, PLAIN
from mainspring.engine.seats import SeatState
from mainspring.engine.step import EXHAUSTED, IDLE, RUNNING

MakeLLM = Callable[..., LLM]
BLOCKS_PER_SEAT = 3


def seat_requests(runner: ModelRunner, count: int, seed: int, remaining: int = 40) -> None:
    """Fill ``count`` seats with requests in mid-answer, each with blocks of its own and random KV contents."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    cache = runner.buffers["kv_cache"]
    cache.copy_(torch.randn(cache.shape, generator=generator).to(cache))
    states, writes = [], []
    for seat in range(count):
        states.append(
            (
                seat,
                SeatState(
                    token_id=rng.randrange(3, 250),
                    position=rng.randrange(0, 8),
                    remaining=remaining,
                    min_remaining=rng.choice([0, 0, 5]),
                    temperature=rng.choice([0.0, 0.7, 1.3]),
                    top_k=rng.choice([0, 5]),
                    top_p=rng.choice([1.0, 0.8]),
                    min_p=rng.choice([0.0, 0.05]),
                    seed=rng.getrandbits(63),
                    stop_ids=(2,),
                ),
            )
        )
        writes += [(seat, column, 1 + seat * BLOCKS_PER_SEAT + column) for column in range(BLOCKS_PER_SEAT)]
    runner.seats.write(states, runner.upload)
    runner.seats.write_tables(writes, runner.upload)


def snapshot(runner: ModelRunner) -> dict[str, torch.Tensor]:
    return {name: runner.buffers[name].clone() for name in ("seats", "kv_cache", "token_ring", "logits", "step_index")}


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    for name, tensor in left.items():
        assert torch.equal(tensor.view(torch.uint8), right[name].view(torch.uint8)), f"{name} differs"


def rows_of(runner: ModelRunner, count: int, size: int) -> list[int]:
    return random.Random(count).sample(range(runner.limits.max_num_seqs), count)


def check_every_rung(llm: LLM, variant: str) -> None:
    runner = llm.core.runner
    for size in runner.limits.ladder.sizes:
        below = max((rung for rung in runner.limits.ladder.sizes if rung < size), default=0)
        for count in sorted({below + 1, size}):
            rows = rows_of(runner, count, size)
            results = []
            for eager in (False, True):
                seat_requests(runner, runner.limits.max_num_seqs, seed=size)
                runner.logits.fill_(float("nan"))
                if eager:
                    padded = torch.tensor(rows + [-1] * (size - count), dtype=torch.int32, device=runner.limits.device)
                    with torch.no_grad():
                        runner.step.decode(padded, runner.samplers[variant])
                else:
                    runner.runners[variant](rows=rows)
                results.append(snapshot(runner))
                runner.ring.clear()
            assert runner.runners[variant].counters.replays[size] > 0
            assert_same_bits(*results)
            assert bool(torch.isfinite(results[0]["logits"][:size].float()).any(dim=1).all())


@pytest.mark.parametrize("variant", [PLAIN, FULL])
def test_replay_and_eager_give_the_same_bits_on_every_rung(make_tiny: MakeLLM, variant: str) -> None:
    check_every_rung(make_tiny(max_num_seqs=20, num_gpu_blocks_override=64), variant)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [PLAIN, FULL])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replay_and_eager_give_the_same_bits_on_every_rung_of_a_gpu(
    make_tiny: MakeLLM, variant: str, dtype: str
) -> None:
    check_every_rung(make_tiny(device="cuda", dtype=dtype, max_num_seqs=20, num_gpu_blocks_override=64), variant)


def repeat_and_compare(llm: LLM, count: int = 3, steps: int = 12) -> None:
    """The recording alone, replayed ``steps`` times, against as many eager steps one by one."""
    runner = llm.core.runner
    rows = [5, 0, 3][:count]
    seat_requests(runner, 8, seed=1)
    runner.runners[PLAIN](rows=rows)  # records where need be, and leaves the rows in their buffer
    seat_requests(runner, 8, seed=1)
    before = snapshot(runner)
    start = int(runner.ring.step[0])
    graph = runner.runners[PLAIN].graphs[runner.limits.ladder.rung_for(count)]
    for _ in range(steps):
        graph.replay()
    repeated = runner.ring.entries[start : start + steps, :count, 0].cpu().clone()
    after = snapshot(runner)
    seat_requests(runner, 8, seed=1)
    runner.ring.clear()
    padded = torch.full((runner.limits.ladder.rung_for(count),), -1, dtype=torch.int32, device=runner.limits.device)
    padded[:count] = torch.tensor(rows, dtype=torch.int32)
    singly = []
    for step in range(steps):
        with torch.no_grad():
            runner.step.decode(padded, runner.samplers[PLAIN])
        singly.append(runner.ring.entries[step, :count, 0].cpu().clone())
    assert torch.equal(repeated, torch.stack(singly))
    assert torch.equal(after["seats"], runner.buffers["seats"])
    assert int((repeated >= 0).sum()) == count * steps
    moved = (after["seats"][1] - before["seats"][1])[:8].tolist()  # their positions
    assert moved == [steps if seat in rows else 0 for seat in range(8)]
    assert len(set(map(tuple, repeated.tolist()))) > 1, "every step chose the same tokens"
    assert int(after["step_index"][0]) == start + steps


def test_n_replays_with_no_work_between_them_decode_n_tokens(make_tiny: MakeLLM) -> None:
    repeat_and_compare(make_tiny(max_num_seqs=8))


@pytest.mark.gpu
def test_n_replays_with_no_work_between_them_decode_n_tokens_on_a_gpu(make_tiny: MakeLLM) -> None:
    repeat_and_compare(make_tiny(device="cuda", max_num_seqs=8, num_gpu_blocks_override=64))


def test_a_row_stops_by_itself_when_its_budget_is_spent(make_tiny: MakeLLM) -> None:
    runner = make_tiny(max_num_seqs=4).core.runner
    seat_requests(runner, 4, seed=2, remaining=3)
    runner.seats.stop_ids.fill_(-1)
    statuses = []
    for step in range(5):
        runner.runners[PLAIN](rows=[1])
        statuses.append(int(runner.ring.entries[step, 0, 1]))
    assert statuses == [RUNNING, RUNNING, EXHAUSTED, IDLE, IDLE]
    assert int(runner.ring.entries[4, 0, 0]) == -1


def test_a_row_without_a_block_for_its_position_waits_and_writes_nothing(make_tiny: MakeLLM) -> None:
    runner = make_tiny(max_num_seqs=4).core.runner
    seat_requests(runner, 4, seed=3)
    runner.seats.positions[2] = BLOCKS_PER_SEAT * 16
    before = snapshot(runner)
    runner.runners[PLAIN](rows=[2])
    assert torch.equal(runner.buffers["kv_cache"], before["kv_cache"])
    assert torch.equal(runner.buffers["seats"], before["seats"])
    assert runner.ring.entries[int(before["step_index"][0]), 0].tolist() == [-1, IDLE]


def test_a_padded_row_leaves_the_last_live_block_of_the_pool_as_it_was(make_tiny: MakeLLM) -> None:
    """Slot -1 must never be an index: it would name the pool's last slot."""
    llm = make_tiny(max_num_seqs=4, num_gpu_blocks_override=12)
    runner = llm.core.runner
    seat_requests(runner, 4, seed=4)
    last = runner.buffers["kv_cache"][:, :, -1]
    assert runner.seats.block_tables[3, BLOCKS_PER_SEAT - 1] == 12
    before = last.clone()
    for variant in (PLAIN, FULL):
        runner.runners[variant](rows=[0, 1, 2])
        assert runner.runners[variant].counters.replays[4] == 1
        assert torch.equal(last, before)


def test_rows_of_a_larger_batch_before_are_not_run_again(make_tiny: MakeLLM) -> None:
    runner = make_tiny(max_num_seqs=8).core.runner
    seat_requests(runner, 8, seed=5)
    runner.runners[PLAIN](rows=list(range(8)))
    positions = runner.seats.positions.clone()
    runner.runners[PLAIN](rows=[6, 2, 4, 1, 0])
    moved = (runner.seats.positions - positions)[:8].tolist()
    assert moved == [1, 1, 1, 0, 1, 0, 1, 0]


@pytest.mark.parametrize("max_num_seqs", [1, 3, 12, 20, 100, 300, 513])
def test_every_batch_up_to_max_num_seqs_has_a_rung(make_tiny: MakeLLM, max_num_seqs: int) -> None:
    """Off-stride sizes: the top rung is max_num_seqs itself, and no decode step runs eager."""
    llm = make_tiny(max_num_seqs=max_num_seqs, max_model_len=32, kv_cache_memory=64 << 20, max_num_batched_tokens=2048)
    assert llm.core.limits.ladder.top == max_num_seqs
    from mainspring import SamplingParams

    prompts = [{"prompt_token_ids": [3 + i % 200, 7]} for i in range(max_num_seqs)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    assert all(len(output.outputs[0].token_ids) == 3 for output in outputs)
    stats = llm.stats()
    assert stats.eager_steps == {}
    assert stats.rungs[max_num_seqs] >= 1


def test_a_batch_above_the_top_rung_is_split_and_never_runs_eager(make_tiny: MakeLLM) -> None:
    from mainspring import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    prompts = [{"prompt_token_ids": [10 + i, 20, 30]} for i in range(10)]
    split = make_tiny(max_num_seqs=10, cudagraph_capture_sizes=[1, 2, 4])
    whole = make_tiny(max_num_seqs=10)
    ids = [output.outputs[0].token_ids for output in split.generate(prompts, params)]
    assert ids == [output.outputs[0].token_ids for output in whole.generate(prompts, params)]
    stats = split.stats()
    assert stats.eager_steps == {}
    assert stats.rungs[4] == 2 * stats.rungs[2] > 0


def test_the_seat_matrix_is_written_column_by_column() -> None:
    state = SeatState(token_id=7, position=3, remaining=9, min_remaining=0, temperature=0.5, seed=(5 << 32) | 6)
    column = state.column()
    assert column[:7].tolist() == [7, 3, 1, 9, 0, 0, 0]
    assert column[7:9].tolist() == [6, 5]
    assert column[9:10].view(np.float32)[0] == np.float32(0.5)
