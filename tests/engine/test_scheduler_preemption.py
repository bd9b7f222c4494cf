from __future__ import annotations

import pytest
from scheduler_device import Params, ideal_answer
from scheduler_harness import Engine
from scheduler_helpers import add, chunks, make, prompt, read_back, rows

from mainspring.engine.request import Request, RequestQueue, RequestStatus
from mainspring.engine.scheduler import SchedulerError

# -- when blocks run out -----------------------------------------------------------------------------------


def test_without_leave_to_preempt_the_step_is_not_made() -> None:
    scheduler = make(num_blocks=6)
    old, young = add(scheduler, 7, max_tokens=13), add(scheduler, 4, max_tokens=13)
    while scheduler.schedule(may_preempt=False) is not None:
        read_back(scheduler, old, young)
    before = [(list(r.block_ids), r.seat, r.in_flight, r.num_computed_tokens) for r in (old, young)]
    assert scheduler.schedule(may_preempt=False) is None
    assert [(r.block_ids, r.seat, r.in_flight, r.num_computed_tokens) for r in (old, young)] == before
    assert scheduler.num_preemptions == 0
    assert rows(scheduler.schedule(may_preempt=True)) == [old]
    assert (young.status, young.seat, young.block_ids) == (RequestStatus.WAITING, None, [])


def test_four_answers_of_64_tokens_in_a_pool_for_two() -> None:
    answers = []
    for num_blocks in (64, 2 * 5 + 1):
        engine = Engine(num_blocks, block_size=16, num_seats=4, max_num_batched_tokens=64, depth=1)
        requests = [engine.add(prompt(10, 9 * i), Params(max_tokens=64, seed=i)) for i in range(4)]
        engine.run()
        answers.append([request.output_token_ids for request in requests])
        assert engine.pool.num_free == num_blocks - 1
    assert engine.scheduler.num_preemptions > 0
    assert answers[0] == answers[1]
    assert all(len(answer) == 64 for answer in answers[0])


def test_the_youngest_is_preempted_and_returns_to_its_place() -> None:
    engine = Engine(num_blocks=9, block_size=4, num_seats=3, max_num_batched_tokens=64)
    requests = [engine.add(prompt(7, 20 * i), Params(max_tokens=20)) for i in range(5)]
    first_preempted: list[Request] = []
    while engine.step():
        for request in requests:
            if request.num_preemptions and request not in first_preempted:
                first_preempted.append(request)
                assert engine.scheduler.requests[engine.scheduler.num_running] is request
    assert first_preempted[0] is not requests[0]
    assert requests[0].num_preemptions == 0
    engine.run()


def test_answers_give_way_to_an_older_prompt_that_is_still_being_read() -> None:
    scheduler = make(num_blocks=9, budget=4)
    young = add(scheduler, 4, max_tokens=20)
    scheduler.schedule()
    read_back(scheduler, young)
    assert rows(scheduler.schedule()) == [young]
    read_back(scheduler, young)
    old = add(scheduler, 24, max_tokens=2, priority=-1)  # takes the 6 blocks that are left
    for start in (0, 4, 8):
        assert chunks(scheduler.schedule()) == [(old, start, 4, False)]
        assert rows(scheduler.schedule()) == [young]
        read_back(scheduler, young)
    assert chunks(scheduler.schedule()) == [(old, 12, 4, False)]
    assert scheduler.schedule(may_preempt=False) is None
    assert chunks(scheduler.schedule(may_preempt=True)) == [(old, 16, 4, False)]
    assert (young.status, young.num_preemptions) == (RequestStatus.WAITING, 1)


def test_a_preemption_with_steps_in_flight_is_an_internal_error() -> None:
    scheduler = make(num_blocks=5, num_seats=2)
    old, young = add(scheduler, 4), add(scheduler, 3)
    with pytest.raises(SchedulerError, match=r"'r1' .* preempted with \d+ steps in flight; read them back"):
        for _ in range(10):
            scheduler.schedule(may_preempt=True)
    assert old.num_preemptions == young.num_preemptions == 0


# -- the end of a request ----------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("moment", range(12))
def test_an_abort_at_any_moment_frees_everything_and_hurts_nobody(moment: int, depth: int) -> None:
    for victim in range(3):
        engine = Engine(num_blocks=9, num_seats=2, max_num_batched_tokens=6, depth=depth)
        requests = [engine.add(prompt(9, 20 * i), Params(max_tokens=6)) for i in range(3)]
        for _ in range(moment):
            engine.step()
        engine.abort(requests[victim])
        engine.check()
        assert requests[victim].is_finished
        engine.run()


def test_a_request_ends_once() -> None:
    scheduler = make()
    request = add(scheduler, 5)
    scheduler.schedule()
    assert scheduler.abort(request)
    assert (request.finish_reason, request.seat, request.block_ids) == ("abort", None, [])
    assert not scheduler.abort(request)
    with pytest.raises(SchedulerError, match="has ended already"):
        scheduler.finish(request, "stop")
    with pytest.raises(SchedulerError, match="none is in flight"):
        scheduler.append_token(request, 1)


def test_a_token_that_was_not_launched_is_an_error() -> None:
    scheduler = make()
    request = add(scheduler, 5)
    with pytest.raises(SchedulerError, match="none is in flight"):
        scheduler.append_token(request, 1)
    scheduler.schedule()
    read_back(scheduler, request)
    with pytest.raises(SchedulerError, match="none is in flight"):
        scheduler.append_token(request, 1)


def test_everything_can_be_aborted_even_in_the_middle_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(queue: RequestQueue, request: Request) -> None:
        raise KeyboardInterrupt

    engine = Engine(num_blocks=33, num_seats=5)
    requests = [engine.add(prompt(4, 20 * i)) for i in range(4)]
    engine.step()
    engine.step()
    late = engine.add(prompt(9, 99))
    monkeypatch.setattr(RequestQueue, "remove", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()  # `late` has its blocks and its seat, and is in both queues
    monkeypatch.undo()
    aborted = engine.scheduler.abort_all()
    assert sorted(request.arrival for request in aborted) == [0, 1, 2, 3, 4]
    assert all(request.finish_reason == "abort" for request in [*requests, late])
    engine.requests.clear()
    engine.in_flight.clear()
    assert not engine.scheduler.has_unfinished
    engine.check_end()
    again = engine.add(prompt(9, 99), Params(max_tokens=4))
    engine.run()
    assert again.num_cached_tokens == 0
    assert again.output_token_ids == ideal_answer(prompt(9, 99), Params(max_tokens=4), 13)
