from __future__ import annotations

import pytest
from scheduler_device import Params

from mainspring.engine.block_pool import BlockPool
from mainspring.engine.request import Request
from mainspring.engine.scheduler import Scheduler, SchedulerError


def decoding(num_blocks: int, *max_tokens: int) -> tuple[Scheduler, list[Request]]:
    """Requests with prompts of 4 tokens in blocks of 4, and their first token read back."""
    scheduler = Scheduler(BlockPool(num_blocks, 4), 4, 64, 1000)
    requests = [Request(f"r{i}", [10 * i + 1] * 4, Params(n), i) for i, n in enumerate(max_tokens)]
    for request in requests:
        scheduler.add(request)
    scheduler.schedule()
    for request in requests:
        scheduler.append_token(request, 1)
    return scheduler, requests


def test_as_many_steps_are_granted_as_asked_where_blocks_suffice() -> None:
    scheduler, (a, b) = decoding(17, 20, 20)
    ahead = scheduler.reserve_ahead([a, b], 6)
    assert ahead.steps == 6
    # Positions 4 .. 9 need the columns 1 and 2 of both.
    assert [(w.seat, w.column) for w in ahead.table_writes] == [
        (a.seat, 1),
        (a.seat, 2),
        (b.seat, 1),
        (b.seat, 2),
    ]
    assert [w.block_id for w in ahead.table_writes] == a.block_ids[1:] + b.block_ids[1:]
    assert (a.in_flight, a.num_computed_tokens) == (6, 10)
    scheduler.pool.check([a.block_ids, b.block_ids])


def test_no_more_steps_are_granted_than_the_free_blocks_carry() -> None:
    scheduler, (a, b) = decoding(6, 20, 20)  # 3 blocks are free
    ahead = scheduler.reserve_ahead([a, b], 100)
    assert ahead.steps == 4
    assert scheduler.pool.num_free == 1
    assert scheduler.reserve_ahead([a, b], 1).steps == 0
    assert scheduler.num_preemptions == 0
    assert (a.in_flight, b.in_flight) == (4, 4)


def test_a_request_near_its_limit_takes_no_block_past_it() -> None:
    scheduler, (a, b) = decoding(17, 2, 20)
    ahead = scheduler.reserve_ahead([a, b], 100)
    assert ahead.steps == 19  # what the longest budget allows
    assert (a.in_flight, b.in_flight) == (1, 19)
    assert (len(a.block_ids), len(b.block_ids)) == (2, 6)
    assert (a.budget_left, b.budget_left) == (0, 0)


def test_what_was_not_used_is_returned() -> None:
    scheduler, (a, b) = decoding(17, 20, 20)
    scheduler.reserve_ahead([a, b], 16)
    for _ in range(5):
        scheduler.append_token(a, 1)
        scheduler.append_token(b, 1)
    scheduler.finish(b, "stop")
    scheduler.return_unused([a, b])
    assert (a.num_tokens, a.in_flight, a.num_computed_tokens, len(a.block_ids)) == (10, 0, 9, 3)
    scheduler.pool.check([a.block_ids])
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.table_writes == []
    assert a.num_computed_tokens == 10


def test_returning_twice_or_nothing_changes_nothing() -> None:
    scheduler, (a,) = decoding(17, 20)
    before = (list(a.block_ids), a.num_computed_tokens)
    scheduler.return_unused([a])
    scheduler.return_unused([a])
    assert scheduler.reserve_ahead([a], 0).steps == 0
    assert scheduler.reserve_ahead([], 5).steps == 0
    assert (list(a.block_ids), a.num_computed_tokens) == before


def test_a_request_that_does_not_decode_cannot_reserve() -> None:
    scheduler, (a,) = decoding(17, 20)
    late = Request("late", [3] * 80, Params(4), 9)
    with pytest.raises(SchedulerError, match="'late' .* waiting.* cannot reserve ahead"):
        scheduler.reserve_ahead([a, late], 4)
    assert a.in_flight == 0


def test_blocks_that_others_may_want_are_left() -> None:
    scheduler, (a,) = decoding(17, 60)  # 15 blocks are free
    ahead = scheduler.reserve_ahead([a], 100, keep_free=13)
    assert (ahead.steps, scheduler.pool.num_free) == (8, 13)


def test_a_waiting_request_counts_on_blocks_that_will_be_returned() -> None:
    scheduler, (a,) = decoding(6, 20)  # 4 blocks are free
    late = Request("late", [3] * 8, Params(4), 9)
    scheduler.reserve_ahead([a], 16)
    scheduler.add(late)
    assert scheduler.pool.num_free == 0
    assert not scheduler.prefill_waits()
    assert scheduler.plan_admission() is None
    assert scheduler.prefill_waits([a])
    assert late.seat is None
    for _ in range(2):
        scheduler.append_token(a, 1)
    scheduler.return_unused([a])
    assert scheduler.prefill_waits()
    plan = scheduler.plan_admission()
    assert plan is not None
    assert [chunk.request for chunk in plan.chunks] == [late]
    assert not scheduler.prefill_waits()
