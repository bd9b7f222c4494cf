from __future__ import annotations

import pytest
from scheduler_device import Params
from scheduler_harness import Engine
from scheduler_helpers import add, chunks, make, prompt, read_back, rows

from mainspring.engine.block_pool import BlockPool
from mainspring.engine.errors import RequestError
from mainspring.engine.plan import DecodePlan, PrefillPlan
from mainspring.engine.request import RequestStatus
from mainspring.engine.scheduler import Scheduler

# -- what is taken and what is refused ---------------------------------------------------------------------


def test_a_prompt_larger_than_the_pool_is_refused_at_once_and_the_next_one_completes() -> None:
    engine = Engine(num_blocks=9, block_size=16)  # 128 tokens
    with pytest.raises(RequestError, match=r"128 tokens \(8 blocks of 16\) < prompt of 200"):
        engine.add(prompt(200))
    answer = engine.add(prompt(10), Params(max_tokens=8))
    engine.run()
    assert len(answer.output_token_ids) == 8


@pytest.mark.parametrize(("length", "taken"), [(31, True), (32, False)])
def test_a_prompt_must_leave_room_for_one_token_in_the_pool(length: int, taken: bool) -> None:
    engine = Engine(num_blocks=9, block_size=4)
    if not taken:
        with pytest.raises(RequestError, match="KV pool of 32 tokens"):
            engine.add(prompt(length))
        return
    request = engine.add(prompt(length))
    engine.run()
    assert (len(request.output_token_ids), request.finish_reason) == (1, "length")


@pytest.mark.parametrize(
    ("length", "max_tokens", "message"),
    [
        (20, 8, r"max_model_len 20 < prompt of 20 tokens \+ 1 .* shorten"),
        (0, 8, "prompt is empty"),
        (3, 0, "max_tokens 0 < 1"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(length: int, max_tokens: int, message: str) -> None:
    scheduler = make(max_model_len=20)
    with pytest.raises(RequestError, match=message):
        add(scheduler, length, max_tokens)
    assert not scheduler.has_unfinished


@pytest.mark.parametrize("limits", [(0, 16, 100), (4, 0, 100), (4, 16, 0)])
def test_limits_below_one_are_refused(limits: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="0 < 1; give a positive number"):
        Scheduler(BlockPool(9, 4), *limits)


@pytest.mark.parametrize(
    ("max_model_len", "max_tokens", "total"), [(1000, 5, 15), (12, 50, 12), (1000, None, 32), (1000, 50, 32)]
)
def test_a_lone_request_ends_at_its_first_limit(max_model_len: int, max_tokens: int, total: int) -> None:
    engine = Engine(num_blocks=9, block_size=4, max_model_len=max_model_len, depth=1)
    request = engine.add(prompt(10), Params(max_tokens))
    engine.run()
    assert (request.num_tokens, request.finish_reason) == (total, "length")
    assert request.num_preemptions == 0


# -- steps -------------------------------------------------------------------------------------------------


def test_a_prefill_step_packs_chunks_up_to_its_budget() -> None:
    scheduler = make(num_blocks=33, budget=16)
    a, b, c = add(scheduler, 6), add(scheduler, 20), add(scheduler, 3)
    assert chunks(scheduler.schedule()) == [(a, 0, 6, True), (b, 0, 10, False)]
    assert rows(scheduler.schedule(False)) == [a]
    assert chunks(scheduler.schedule(False)) == [(b, 10, 10, True), (c, 0, 3, True)]
    assert rows(scheduler.schedule(False)) == [a, b, c]


def test_a_long_prompt_delays_running_answers_by_one_chunk_a_token() -> None:
    engine = Engine(num_blocks=65, max_num_batched_tokens=8)
    engine.add(prompt(4), Params(max_tokens=40))
    engine.step()
    engine.step()
    engine.add(prompt(80, 50), Params(max_tokens=4))
    engine.plans.clear()
    while len(engine.plans) < 20:
        engine.step()
    assert engine.plans == ["prefill", "decode"] * 10


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("wait", range(5))
def test_a_new_request_is_admitted_within_two_steps_where_there_is_room(wait: int, depth: int) -> None:
    engine = Engine(num_blocks=65, num_seats=4, depth=depth)
    engine.add(prompt(4), Params(max_tokens=100))
    for _ in range(2 + wait):
        engine.step()
    late = engine.add(prompt(4, 50))
    engine.step()
    engine.step()
    assert late.status is RequestStatus.RUNNING


def test_steps_in_flight_never_exceed_the_budget() -> None:
    scheduler = make()
    request = add(scheduler, 5, max_tokens=3)
    plans = [scheduler.schedule(False) for _ in range(5)]
    assert [type(plan) for plan in plans] == [PrefillPlan, DecodePlan, DecodePlan, type(None), type(None)]
    assert (request.in_flight, request.budget_left, request.num_computed_tokens) == (3, 0, 7)
    assert [scheduler.append_token(request, 1) for _ in range(3)] == [False, False, True]
    assert request.at_limit


def test_block_table_writes_name_seat_column_and_block_once() -> None:
    scheduler = make()
    request = add(scheduler, 7)
    plan = scheduler.schedule()
    assert isinstance(plan, PrefillPlan)
    assert plan.table_writes == [(request.seat, 0, 1), (request.seat, 1, 2)]
    written = []
    for _ in range(6):
        decode = scheduler.schedule(False)
        assert isinstance(decode, DecodePlan)
        written.append(list(decode.table_writes))
    # The first decode step writes position 7, in column 1; the second begins column 2.
    assert written == [[], [(request.seat, 2, 3)], [], [], [], [(request.seat, 3, 4)]]


def test_nothing_to_do_is_no_step() -> None:
    scheduler = make()
    assert scheduler.schedule() is None
    assert scheduler.schedule(False) is None


# -- order -------------------------------------------------------------------------------------------------


def test_lower_priority_numbers_go_first_then_arrival() -> None:
    scheduler = make(num_blocks=33, num_seats=2)
    a, b = add(scheduler, 3, priority=1), add(scheduler, 3, priority=0)
    c, d = add(scheduler, 3, priority=0), add(scheduler, 3, priority=-1)
    assert [chunk[0] for chunk in chunks(scheduler.schedule())] == [d, b]
    scheduler.finish(d, "stop")
    scheduler.finish(b, "stop")
    assert [chunk[0] for chunk in chunks(scheduler.schedule())] == [c, a]


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    scheduler = make(num_blocks=9, num_seats=4, budget=64)
    a, large, small = add(scheduler, 12), add(scheduler, 20), add(scheduler, 2)
    assert chunks(scheduler.schedule()) == [(a, 0, 12, True)]
    assert rows(scheduler.schedule(False)) == [a]
    assert rows(scheduler.schedule(False)) == [a]
    scheduler.finish(a, "stop")
    assert [chunk[0] for chunk in chunks(scheduler.schedule())] == [large, small]


def test_running_answers_keep_a_block_each_to_grow_into() -> None:
    scheduler = make(num_blocks=7, num_seats=4, budget=64)  # 6 blocks
    a = add(scheduler, 8, max_tokens=8)
    b = add(scheduler, 16)
    assert chunks(scheduler.schedule()) == [(a, 0, 8, True)]  # 4 blocks are free, but `a` will need one
    read_back(scheduler, a)
    scheduler.finish(a, "stop")
    assert chunks(scheduler.schedule()) == [(b, 0, 16, True)]


def test_an_answer_that_needs_no_further_block_leaves_them_all_to_the_next() -> None:
    scheduler = make(num_blocks=7, num_seats=4, budget=64)
    a, b = add(scheduler, 8, max_tokens=1), add(scheduler, 16)
    assert [chunk[0] for chunk in chunks(scheduler.schedule())] == [a, b]
