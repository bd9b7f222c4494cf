"""Recorded prefill steps: the same tokens as without, nothing of the padding anywhere, and what cannot be recorded is
counted under its reason."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mainspring import LLM, SamplingParams
from mainspring.engine.admission import Admission, admit
from mainspring.engine.errors import SettingsError
from mainspring.engine.prefill_batch import BATCH_WIDTH, PrefillBatch
from mainspring.engine.samplers import FULL, PLAIN
from mainspring.engine.schedule_log import record_schedule, replay_schedule
from mainspring.engine.seats import SeatState, SeatTable
from mainspring.graphs import FixedBuffers
from mainspring.models.inputs import ModelInputs

MakeLLM = Callable[..., LLM]

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=12, ignore_eos=True)
SIZES = [4, 16, 64]


def prompts(lengths: list[int], seed: int = 0) -> list[dict[str, list[int]]]:
    rng = random.Random(seed)
    return [{"prompt_token_ids": [rng.randrange(3, 250) for _ in range(length)]} for length in lengths]


def ids(llm: LLM, asked: Any, params: Any) -> list[list[int]]:
    return [list(output.token_ids) for answer in llm.generate(asked, params) for output in answer.outputs]


def shift(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits.roll(1 + len(token_ids))


PARAMS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "several": SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=8, ignore_eos=True),
    "penalties": SamplingParams(temperature=0.5, seed=5, repetition_penalty=1.4, max_tokens=12, ignore_eos=True),
    "logprobs": SamplingParams(temperature=0.0, logprobs=3, max_tokens=6, ignore_eos=True),
    "processors": SamplingParams(temperature=0.0, logits_processors=[shift], max_tokens=6, ignore_eos=True),
}


@pytest.mark.parametrize("kind", PARAMS)
def test_ragged_prompts_get_the_tokens_that_they_get_without(make_tiny: MakeLLM, kind: str) -> None:
    asked = [*prompts([1, 2, 3, 9]), *prompts([30, 1, 16, 17], seed=1), *prompts([64], seed=2)]
    recorded, plain = make_tiny(prefill_graph_sizes=SIZES), make_tiny()
    for batch in ([asked[0]], asked[:4], asked[4:8], asked[8:], asked):
        assert ids(recorded, batch, PARAMS[kind]) == ids(plain, batch, PARAMS[kind])
    stats = recorded.stats()
    assert stats.recorded_prefill_steps >= 4
    assert stats.recorded_prefill_steps + sum(stats.eager_prefill_steps.values()) == stats.prefill_steps
    assert plain.stats().recorded_prefill_steps == 0
    assert plain.stats().eager_prefill_steps == {"off": plain.stats().prefill_steps}
    assert set(stats.eager_steps) <= {"logits_processors"}


def test_prompts_that_hit_the_prefix_cache(make_tiny: MakeLLM) -> None:
    recorded, plain = make_tiny(prefill_graph_sizes=SIZES), make_tiny()
    start = prompts([40])[0]["prompt_token_ids"]
    asked = [{"prompt_token_ids": start + tail["prompt_token_ids"]} for tail in prompts([1, 7, 20, 20], seed=3)]
    for batch in (asked[:1], asked, asked):
        assert ids(recorded, batch, GREEDY) == ids(plain, batch, GREEDY)
    assert recorded.stats().prefix_hit_tokens > 32 * 4
    assert recorded.stats().eager_prefill_steps.keys() <= {"too_many_tokens"}


def test_chunks_that_complete_no_prompt(make_tiny: MakeLLM) -> None:
    """They choose no token, so the count of steps on the device stays with the CPU's."""
    recorded = make_tiny(prefill_graph_sizes=[8, 24], max_num_batched_tokens=24)
    plain = make_tiny(max_num_batched_tokens=24)
    asked = prompts([70, 3, 30, 11])
    assert ids(recorded, asked, GREEDY) == ids(plain, asked, GREEDY)
    stats, runner = recorded.stats(), recorded.core.runner
    assert stats.recorded_prefill_steps == stats.prefill_steps > 4
    assert stats.eager_prefill_steps == {}
    assert int(runner.ring.step[0]) == runner.steps_launched


@pytest.mark.parametrize("mode", ["graph", "loop"])
def test_a_schedule_gives_the_same_bits_recorded_and_eager(make_tiny: MakeLLM, mode: str) -> None:
    """Also preempted requests and sampled ones: an eager engine with the same sizes pads its prompts alike."""
    options: dict[str, Any] = {
        "num_gpu_blocks_override": 24,
        "block_size": 4,
        "max_num_seqs": 4,
        "prefill_graph_sizes": [5, 18, 48],
        "verify_graphs": False,
    }
    llm = make_tiny(launch_mode=mode, **options)
    params = [GREEDY, SAMPLED, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)]
    with record_schedule(llm.core.runner) as log:
        llm.generate(prompts([3, 9, 30, 2, 5, 18]), [*params, *params])
    assert llm.stats().recorded_prefill_steps > 2 and llm.stats().preemptions > 0
    eager = make_tiny(enforce_eager=True, **options)
    assert list(replay_schedule(log, eager.core.runner)) == []
    stats = eager.core.runner.prefill
    assert stats.recorded_steps == 0 and stats.eager_steps["enforce_eager"] == llm.stats().recorded_prefill_steps


def test_recordings_are_verified_and_leave_no_trace(make_tiny: MakeLLM) -> None:
    llm = make_tiny(prefill_graph_sizes=SIZES, max_num_seqs=4, verify_graphs=True)
    assert llm.stats().verified_graphs == 3 + 3
    params = SamplingParams(temperature=0.7, seed=3, presence_penalty=1.0, logprobs=2, max_tokens=4, ignore_eos=True)
    ids(llm, prompts([3, 5]), params)
    before = {
        name: tensor.clone() for name, tensor in llm.core.runner.buffers.items() if tensor.layout == torch.strided
    }
    assert llm.verify_graphs() == 3 + 3 + 2
    for name, tensor in before.items():
        if ".input." not in name:
            assert torch.equal(llm.core.runner.buffers[name], tensor), name


def test_a_recording_that_does_something_else_is_found(make_tiny: MakeLLM) -> None:
    from mainspring.graphs import VerificationError

    llm = make_tiny(prefill_graph_sizes=[16], max_num_seqs=1)
    runner = llm.core.runner.prefill.runners[PLAIN]
    model = llm.core.runner.model
    original = model.compute_logits
    model.compute_logits = lambda hidden, out=None: original(hidden, out).mul_(2)  # type: ignore[method-assign]
    with pytest.raises(VerificationError, match=r"'prefill\.plain'.*'logits' differs"):
        runner.verify()


@pytest.mark.parametrize("variant", [PLAIN, FULL])
def test_padding_writes_nothing_and_is_in_no_sequence(make_tiny: MakeLLM, variant: str) -> None:
    llm = make_tiny(prefill_graph_sizes=[16], max_num_seqs=4, enforce_eager=True, num_gpu_blocks_override=8)
    runner = llm.core.runner
    seen: list[ModelInputs] = []
    runner.model.register_forward_pre_hook(lambda _module, given: seen.append(given[0]))
    runner.seats.write_tables([(0, 0, 1), (2, 0, 2), (2, 1, 8)], runner.upload)
    # The null seat is not empty, as after an earlier request: nothing of it may be used.
    runner.seats.block_tables[runner.seats.null_seat] = 8
    runner.seats.alive[runner.seats.null_seat] = 1
    before = runner.buffers["kv_cache"].clone()
    batch = PrefillBatch(
        token_ids=np.array([7, 8, 9, 10, 11]),
        positions=np.array([0, 1, 2, 15, 16]),
        token_seats=np.array([0, 0, 0, 2, 2]),
        seats=np.array([0, 2]),
        query_starts=np.array([0, 3, 5]),
        seq_lens=np.array([3, 17]),
        last=np.array([4]),
        completed_seats=np.array([2]),
    )
    step = int(runner.ring.step[0])
    with torch.no_grad():
        runner.prefill.run(batch, variant)
    [inputs] = seen
    assert inputs.query_starts is not None
    assert inputs.slots.tolist() == [16, 17, 18, 47, 128] + [-1] * 11
    assert inputs.token_ids.tolist() == [7, 8, 9, 10, 11] + [0] * 11
    assert inputs.positions.tolist() == [0, 1, 2, 15, 16] + [0] * 11
    assert inputs.seq_lens.tolist() == [3, 17, 0, 0]
    assert inputs.query_starts.tolist() == [0, 3, 5, 5, 5]
    assert inputs.query_starts.dtype == inputs.seq_lens.dtype == inputs.block_tables.dtype == torch.int32
    changed = (runner.buffers["kv_cache"] != before).flatten(4).any(-1).any(0).any(0)
    assert changed.nonzero().tolist() == [[1, 0], [1, 1], [1, 2], [2, 15], [8, 0]]
    assert runner.ring.entries[step, 1:, 0].tolist() == [-1] * 3
    assert not runner.seats.matrix[:, runner.seats.null_seat].any()


def test_a_batch_survives_its_way_through_rows() -> None:
    parts = [[5, 6, 7, 8], [0, 1, 2, 9], [3, 3, 3, 1], [3, 1], [0, 3, 4], [3, 10], [3], [1]]
    batch = PrefillBatch(*(np.array(part, dtype=np.int64) for part in parts))
    rows = torch.from_numpy(batch.rows())
    assert rows.shape == (4, BATCH_WIDTH)
    back = PrefillBatch.of_rows(rows, 2, null_seat=8)
    assert [back.token_ids.tolist(), back.positions.tolist(), back.token_seats.tolist()] == parts[:3]
    assert [back.seats.tolist(), back.query_starts.tolist(), back.seq_lens.tolist()] == parts[3:6]
    assert back.last.tolist() == [3, 0] and back.completed_seats.tolist() == [1, 8]
    padding = PrefillBatch.of_rows(torch.full((4, BATCH_WIDTH), -1), 2, null_seat=8)
    assert padding.query_starts.tolist() == [0, 0, 0] and padding.seats.tolist() == [8, 8]


def seat_table() -> SeatTable:
    table = SeatTable(FixedBuffers("cpu"), num_seats=4, max_blocks=6)
    table.block_tables[:4] = torch.arange(24).view(4, 6) + 50
    table.matrix[:, :4] = torch.arange(table.matrix.shape[0]).unsqueeze(1)
    return table


def test_tokens_of_the_null_seat_have_no_slot_whatever_its_table_holds() -> None:
    table = seat_table()
    table.block_tables[table.null_seat] = 9
    rows = torch.full((4, BATCH_WIDTH), -1)
    rows[0] = torch.tensor([5, 2, 1, 1, 1, 3, 0, 1])
    inputs = PrefillBatch.of_rows(rows, 2, table.null_seat).inputs(table, 16)
    assert inputs.slots.tolist() == [56 * 16 + 2, -1, -1, -1]
    assert inputs.seq_lens.tolist() == [3, 0]


def test_a_recorded_step_seats_requests_as_copies_of_their_own_do() -> None:
    writes = [(2, 0, 7), (2, 1, 8), (0, 3, 9), (3, 0, 11), (3, 1, 12), (3, 2, 13)]
    states = [
        SeatState(token_id=7, position=3, remaining=9, min_remaining=1, temperature=-0.0, seed=-5, stop_ids=(3, 4)),
        SeatState(token_id=1, position=0, remaining=1, min_remaining=0, seed=(1 << 63) + 1, repetition_penalty=1.5),
    ]
    apart, together = seat_table(), seat_table()
    apart.write_tables(writes, torch.from_numpy)
    apart.write([(3, states[0]), (1, states[1])], torch.from_numpy)
    batch = np.full((4, BATCH_WIDTH), -1)
    batch[:2, -1] = [3, 1]
    rows = Admission.of(writes, states, together.max_blocks).beside(batch)
    assert rows.shape[0] == 6
    admit(torch.nn.functional.pad(torch.from_numpy(rows), (0, 0, 0, 2), value=-1), 3, together)
    assert torch.equal(together.block_tables, apart.block_tables)
    assert torch.equal(together.matrix, apart.matrix)
    admit(torch.full((8, rows.shape[1]), -1), 3, together)  # what a recording is made with changes nothing
    assert torch.equal(together.block_tables, apart.block_tables) and torch.equal(together.matrix, apart.matrix)


def test_a_recorded_step_is_one_copy_one_replay_and_one_read(make_tiny: MakeLLM) -> None:
    llm = make_tiny(prefill_graph_sizes=SIZES)
    llm.generate(prompts([10, 12, 14]), GREEDY)
    assert llm.stats().recorded_prefill_steps == 1
    assert llm.core.runner.prefill_calls == 3


def test_entries_of_a_long_cached_prompt_are_written_apart(make_tiny: MakeLLM) -> None:
    options: dict[str, Any] = {"block_size": 4, "prefill_graph_sizes": [4, 64]}
    llm, plain = make_tiny(**options), make_tiny(block_size=4)
    start = prompts([200])[0]["prompt_token_ids"]
    asked = [{"prompt_token_ids": start + [9, 8]}, {"prompt_token_ids": start + [7]}]
    for batch in (asked[:1], asked[1:], asked[:1]):
        assert ids(llm, batch, GREEDY) == ids(plain, batch, GREEDY)
    assert llm.stats().recorded_prefill_steps == 2
    # Each with two copies for the seat's table, of 51 blocks, which are more than the rung has rows.
    unrecorded = make_tiny(block_size=4, prefill_graph_sizes=[])
    ids(unrecorded, asked[:1], GREEDY)
    assert llm.core.runner.prefill_calls == unrecorded.core.runner.prefill_calls + 2 * (3 + 2)


def test_what_is_not_recorded_is_counted_under_its_reason(make_tiny: MakeLLM) -> None:
    llm = make_tiny(prefill_graph_sizes=SIZES, max_num_seqs=12)
    llm.generate(prompts([65]), GREEDY)
    assert llm.stats().eager_prefill_steps == {"too_many_tokens": 1}
    llm.generate(prompts([2] * 9), GREEDY)
    assert llm.stats().eager_prefill_steps == {"too_many_tokens": 1, "too_many_sequences": 1}
    asking = SamplingParams(temperature=0.0, prompt_logprobs=1, max_tokens=2)
    assert llm.generate(prompts([6]), asking)[0].prompt_logprobs is not None
    assert llm.stats().eager_prefill_steps["prompt_logprobs"] == 1
    assert llm.stats().recorded_prefill_steps == 0
    llm.generate(prompts([2] * 8), GREEDY)
    assert llm.stats().recorded_prefill_steps == 1


def test_an_engine_of_one_seat_and_prompts_up_to_its_limit(make_tiny: MakeLLM) -> None:
    options: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": 32, "verify_graphs": True}
    llm, plain = make_tiny(prefill_graph_sizes=[64], **options), make_tiny(**options)
    assert llm.core.limits.prefill_ladder is not None and llm.core.limits.prefill_ladder.sizes == (32,)
    asked, params = prompts([31, 1, 20]), SamplingParams(temperature=0.0, max_tokens=1)
    assert ids(llm, asked, params) == ids(plain, asked, params)
    assert llm.stats().eager_prefill_steps == {}


@pytest.mark.parametrize(
    ("sizes", "tokens", "found"),
    [
        (None, 512, None),
        ([], 512, None),
        ((), 512, None),
        ([64, 16], 512, (16, 64)),
        ([16, 64, 1024], 100, (16, 64, 100)),
    ],
)
def test_which_sizes_are_recorded(make_tiny: MakeLLM, sizes: Any, tokens: int, found: tuple[int, ...] | None) -> None:
    llm = make_tiny(prefill_graph_sizes=sizes, max_num_batched_tokens=tokens)
    ladder = llm.core.limits.prefill_ladder
    assert (ladder and ladder.sizes) == found
    recorded = sorted(rung.size for rung in llm.recording().rungs if rung.name == "prefill.plain")
    assert tuple(recorded) == (found or ())


@pytest.mark.parametrize("sizes", [5, [0], [-3], [1.5], ["16"], [True], "16", b"16", ""])
def test_sizes_that_are_none_are_refused(make_tiny: MakeLLM, sizes: Any) -> None:
    with pytest.raises(SettingsError, match="prefill_graph_sizes"):
        make_tiny(prefill_graph_sizes=sizes)


def test_the_recordings_memory_is_expected_shared_and_given_back(make_tiny: MakeLLM) -> None:
    llm = make_tiny(prefill_graph_sizes=[16, 256], max_num_seqs=2)
    runner = llm.core.runner
    assert llm.core.recorded is not None and llm.core.recorded.difference == 0
    assert llm.core.recorded.taken == runner.pool.nbytes
    assert all(each.pool is runner.pool for each in runner.all_runners)
    expected = ids(llm, prompts([9]), GREEDY)
    assert all(report.ok for report in llm.audit().values())
    assert set(llm.audit()) == {"decode.plain", "decode.full", "prefill.plain", "prefill.full"}
    llm.release_graphs()
    assert runner.pool.nbytes == 0
    assert ids(llm, prompts([9]), GREEDY) == expected
    assert llm.stats().recaptures == {"release_graphs() was called": 2}


def test_a_weight_that_was_replaced_is_served_by_prefill_steps_too(make_tiny: MakeLLM) -> None:
    llm = make_tiny(prefill_graph_sizes=[16], max_num_seqs=2)
    one = SamplingParams(temperature=0.0, max_tokens=1)
    before = ids(llm, prompts([9]), one)
    norm = llm.core.runner.model.model.norm
    norm.weight = torch.nn.Parameter(-2 * norm.weight, requires_grad=False)
    assert ids(llm, prompts([9]), one) != before
    assert llm.stats().recorded_prefill_steps == 2 and llm.stats().eager_prefill_steps == {}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_recordings_have_the_bits_of_eager_padded_steps(make_tiny: MakeLLM, dtype: str) -> None:
    options: dict[str, Any] = {"device": "cuda", "dtype": dtype, "num_gpu_blocks_override": 64, "max_num_seqs": 8}
    llm = make_tiny(verify_graphs=True, **options)
    assert llm.core.limits.prefill_ladder is not None and llm.core.limits.prefill_ladder.sizes[0] == 16
    asking = SamplingParams(temperature=0.7, seed=3, presence_penalty=1.0, logprobs=2, max_tokens=4, ignore_eos=True)
    ids(llm, prompts([3, 5]), asking)  # records a full rung, and verifies it
    assert llm.stats().recorded_prefill_steps == 1
    assert all(report.ok for report in llm.audit().values())
    log_of = make_tiny(launch_mode="graph", **options)
    with record_schedule(log_of.core.runner) as log:
        log_of.generate(prompts([1, 3, 9, 30, 2, 5, 18, 100, 400]), [GREEDY, SAMPLED, GREEDY] * 3)
    eager = make_tiny(enforce_eager=True, **options)
    assert list(replay_schedule(log, eager.core.runner)) == []


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["graph", "loop"])
def test_on_a_gpu_tokens_are_those_of_unrecorded_prefill_steps(make_tiny: MakeLLM, mode: str) -> None:
    options: dict[str, Any] = {"device": "cuda", "num_gpu_blocks_override": 64, "launch_mode": mode}
    recorded, plain = make_tiny(**options), make_tiny(prefill_graph_sizes=[], **options)
    asked = prompts([1, 3, 9, 30, 2, 5, 18, 100, 400])
    for batch in (asked[:1], asked[:8], asked[8:], asked):
        for params in (GREEDY, SAMPLED):
            assert ids(recorded, batch, params) == ids(plain, batch, params)
    assert recorded.stats().recorded_prefill_steps > 0
    assert plain.stats().eager_prefill_steps == {"off": plain.stats().prefill_steps}
