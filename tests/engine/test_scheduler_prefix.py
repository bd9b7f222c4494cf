from __future__ import annotations

import pytest
from scheduler_device import EOS, Params
from scheduler_harness import Engine
from scheduler_helpers import prompt

from mainspring.engine.holdings import SchedulerError
from mainspring.engine.request import Request

ANSWER = Params(max_tokens=6)


def answers(requests: list[Request]) -> list[list[int]]:
    return [request.output_token_ids for request in requests]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prompt_of_exactly_two_blocks_again_and_again(depth: int) -> None:
    results = []
    for prefix_caching in (False, True):
        engine = Engine(num_blocks=33, block_size=4, depth=depth, prefix_caching=prefix_caching)
        requests = []
        for _ in range(3):
            requests.append(engine.add(prompt(8), ANSWER))
            engine.run()
        requests += [engine.add(prompt(8), ANSWER), engine.add(prompt(8), ANSWER)]
        engine.run()
        results.append(answers(requests))
        # The last token is always computed, and with it its whole block.
        assert [r.num_cached_tokens for r in requests] == ([0, 4, 4, 4, 4] if prefix_caching else [0] * 5)
    assert results[0] == results[1]


def test_the_counters_say_what_was_asked_found_and_evicted() -> None:
    engine = Engine(num_blocks=5, block_size=4)
    for first in (5, 5, 50, 5):
        engine.add(prompt(10, first), Params(max_tokens=2))
        engine.run()
    counters = engine.pool.counters
    assert (counters.queried_tokens, counters.hit_tokens, counters.evicted_blocks) == (40, 8 + 4, 2)


def test_with_the_cache_off_nothing_is_counted_or_kept() -> None:
    engine = Engine(num_blocks=6, block_size=4, prefix_caching=False)
    for _ in range(2):
        engine.add(prompt(10), Params(max_tokens=2))
        engine.run()
    counters = engine.pool.counters
    assert (counters.queried_tokens, counters.hit_tokens, counters.evicted_blocks) == (0, 0, 0)
    assert engine.pool.num_cached == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_choices_of_one_prompt_share_its_full_blocks(depth: int) -> None:
    engine = Engine(num_blocks=33, block_size=4, num_seats=3, max_num_batched_tokens=64, depth=depth)
    choices = [engine.add(prompt(11), Params(6, seed=i), choice=i) for i in range(3)]
    engine.step()
    assert [c.num_cached_tokens for c in choices] == [0, 8, 8]
    assert choices[0].block_ids[:2] == choices[1].block_ids[:2] == choices[2].block_ids[:2]
    assert len({c.block_ids[2] for c in choices}) == 3
    assert engine.pool.num_usable_blocks - engine.pool.num_free == 2 + 3
    engine.run()
    alone = Engine(num_blocks=33, block_size=4, prefix_caching=False)
    assert answers([alone.add(prompt(11), Params(6, seed=i)) for i in range(3)]) == [[], [], []]
    alone.run()
    assert answers(choices) == answers(alone.requests)


def test_choices_wait_for_a_prompt_that_takes_several_steps_and_then_hit() -> None:
    engine = Engine(num_blocks=65, block_size=4, num_seats=3, max_num_batched_tokens=8)
    choices = [engine.add(prompt(30), Params(6, seed=i), choice=i) for i in range(3)]
    engine.run()
    assert [c.num_cached_tokens for c in choices] == [0, 28, 28]


def test_blocks_that_answers_filled_serve_the_next_turn() -> None:
    engine = Engine(num_blocks=33, block_size=4, depth=1)
    first = engine.add(prompt(6), Params(max_tokens=8))
    engine.run()
    # 14 tokens are known, the KV of 13 is written: three full blocks.
    turn = engine.add([*prompt(6), *first.output_token_ids, 7, 8], ANSWER)
    engine.run()
    assert turn.num_cached_tokens == 12


@pytest.mark.parametrize("count", [1, 3, 4, 9])
def test_tokens_taken_together_leave_what_they_leave_one_by_one(count: int) -> None:
    tokens = prompt(count, 70)

    def after(together: bool) -> tuple[object, ...]:
        engine = Engine(num_blocks=9, block_size=4)
        request, scheduler = engine.add(prompt(3), Params(max_tokens=10)), engine.scheduler
        scheduler.schedule(False)
        scheduler.reserve_ahead([request], 9)
        if together:
            at_limit = scheduler.append_tokens(request, tokens)
        else:
            at_limit = [scheduler.append_token(request, token) for token in tokens][-1]
        scheduler.finish(request, "stop")
        known = (request.output_token_ids, at_limit, engine.pool.num_cached)
        return (*known, engine.pool.lookup(keys(engine, [*prompt(3), *tokens])))

    assert after(together=True) == after(together=False)


def test_more_tokens_than_were_launched_are_an_error() -> None:
    engine = Engine(num_blocks=9, block_size=4)
    request, scheduler = engine.add(prompt(3), Params(max_tokens=10)), engine.scheduler
    scheduler.schedule(False)
    scheduler.reserve_ahead([request], 2)
    with pytest.raises(SchedulerError, match=r"cannot take 4 token\(s\): only 3 are in flight"):
        scheduler.append_tokens(request, [7, 8, 9, 10])
    assert request.output_token_ids == []


def keys(engine: Engine, tokens: list[int]) -> list[bytes]:
    made = [engine.pool.root_key(None)]
    for start in range(0, len(tokens) - 3, 4):
        made.append(engine.pool.chain_key(made[-1], tokens[start : start + 4]))
    return made[1:]


def test_a_block_that_only_the_stop_token_completes_is_not_cached() -> None:
    # The step in flight behind a stop token writes nothing, so the block has a hole where the token is.
    engine = Engine(num_blocks=9, block_size=4)
    request = engine.add(prompt(3), Params(max_tokens=20))
    scheduler = engine.scheduler
    scheduler.schedule(False)
    scheduler.schedule(False)  # the step that would write position 3
    scheduler.append_token(request, EOS)
    scheduler.finish(request, "stop")
    assert engine.pool.num_cached == 0


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    engine = Engine(num_blocks=9, block_size=4, num_seats=2, max_num_batched_tokens=64)
    old, young = (
        engine.add(prompt(4), Params(max_tokens=24)),
        engine.add(prompt(4, 50), Params(max_tokens=24)),
    )
    engine.run()
    assert young.num_preemptions > 0
    assert old.num_preemptions == 0
    assert engine.pool.counters.hit_tokens > 0
    assert young.num_cached_tokens == 0  # what the first admission found, not what came of the preemption


def test_different_salts_share_nothing() -> None:
    engine = Engine(num_blocks=65, block_size=4)
    requests = []
    for salt in (None, "a", "", "a", None):
        requests.append(engine.add(prompt(10), ANSWER, cache_salt=salt))
        engine.run()
    assert [r.num_cached_tokens for r in requests] == [0, 0, 0, 8, 8]


def test_a_request_aborted_in_its_prefill_leaves_only_what_was_computed() -> None:
    engine = Engine(num_blocks=33, block_size=4, max_num_batched_tokens=10)
    aborted = engine.add(prompt(30), ANSWER)
    engine.step()
    engine.abort(aborted)
    again = engine.add(prompt(30), ANSWER)
    engine.run()
    assert again.num_cached_tokens == 8


def test_after_forgetting_nobody_reads_older_blocks_not_even_those_who_wait() -> None:
    engine = Engine(num_blocks=33, block_size=4, num_seats=1)
    running, waiting = engine.add(prompt(9), Params(max_tokens=9)), engine.add(prompt(9), ANSWER)
    engine.step()
    engine.scheduler._holdings._cached_blocks(waiting)  # its keys are made before the pool forgets
    assert waiting.block_keys
    engine.pool.forget_cached()
    engine.step()
    late = engine.add(prompt(9), ANSWER)
    engine.run()
    assert running.is_finished
    assert waiting.num_cached_tokens == 0  # though `running` published more of the same chain
    assert late.num_cached_tokens == 8


def test_a_cached_prefix_is_not_evicted_to_make_room_for_its_own_request() -> None:
    engine = Engine(num_blocks=6, block_size=4, max_num_batched_tokens=64)
    engine.add(prompt(12), Params(max_tokens=1))
    engine.run()
    assert engine.pool.num_cached == 3
    whole = engine.add(prompt(19), Params(max_tokens=1))  # all 5 blocks, 3 of them cached
    engine.run()
    assert whole.num_cached_tokens == 12
