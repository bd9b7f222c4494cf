"""What a loop promises, on every device: how it ends, what it leaves, what it refuses."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
import torch
from loop_helpers import DEVICES, ENDLESS, WAIT, Counter, capture, value

from mainspring.graphs import (
    GraphError,
    GraphPool,
    GraphRunner,
    Input,
    Ladder,
    Loop,
    LoopEnd,
    LoopProgress,
    Mailbox,
    StaleAddressError,
)
from mainspring.graphs.loop_layout import Words

pytestmark = pytest.mark.parametrize("device", DEVICES)


def wait_until_running(loop: Loop, iterations: int = 1) -> None:
    deadline = time.monotonic() + WAIT
    while loop.poll().iterations < iterations:
        assert time.monotonic() < deadline
        time.sleep(1e-4)


def test_the_flag_ends_a_loop(device: str) -> None:
    counter = Counter(device, record=None)
    assert counter.loop.poll() == LoopProgress(0, 0, False, None)
    counter.reset(goal=37)
    launch = counter.loop.launch(ENDLESS)
    assert counter.loop.join(WAIT) == LoopEnd(launch, 37, "flag")
    assert counter.loop.poll() == LoopProgress(launch, 37, False, "flag")
    assert value(counter.count) == 37


def test_max_steps_end_a_loop_and_the_next_launch_goes_on_from_there(device: str) -> None:
    counter = Counter(device, record=None)
    for launch, steps in enumerate((1, 2, 30), start=1):
        assert counter.loop.launch(steps) == launch
        assert counter.loop.join(WAIT) == LoopEnd(launch, steps, "max_steps")
    assert value(counter.count) == 33


def test_the_doorbell_ends_a_loop_after_the_iteration_under_way(device: str) -> None:
    counter = Counter(device, record=None)
    counter.loop.launch(ENDLESS)
    wait_until_running(counter.loop, 5)
    assert counter.loop.poll().running
    counter.loop.ring_doorbell()
    end = counter.loop.join(WAIT)
    assert end.reason == "doorbell"
    assert end.iterations == value(counter.count) >= 5


def test_the_flag_is_first_read_after_an_iteration_and_any_value_but_zero_goes_on(device: str) -> None:
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    left = torch.full((1,), -3, dtype=torch.int32, device=device)

    def step() -> None:
        left.add_(1)
        flag.copy_(left)

    loop = Loop(capture(step, device), flag=flag)
    left.fill_(-3)
    flag.zero_()
    loop.launch(ENDLESS)
    assert loop.join(WAIT) == LoopEnd(1, 3, "flag")
    loop.launch(ENDLESS)
    loop.ring_doorbell()
    assert loop.join(WAIT).reason == "doorbell"


def test_when_several_reasons_hold_the_recording_has_the_first_word(device: str) -> None:
    mailbox = Mailbox(device, record_shape=(2, 1), depth=4)
    counter = Counter(device, mailbox)
    counter.reset(goal=4)
    counter.loop.launch(4)
    assert counter.loop.join(WAIT).reason == "flag"
    mailbox.read()
    counter.loop.launch(4)
    assert counter.loop.join(WAIT).reason == "max_steps"


@pytest.mark.parametrize("pause", [0.0, 2e-3])
@pytest.mark.parametrize("depth", [1, 2, 7])
def test_every_record_arrives_once_whole_and_in_order(device: str, depth: int, pause: float) -> None:
    mailbox = Mailbox(device, record_shape=(2, 300), depth=depth)
    counter = Counter(device, mailbox, width=300, tag=9)
    goal, seen, ends = (60 if pause else 400) * depth, [], []
    counter.reset(goal=goal)
    counter.loop.launch(ENDLESS)
    while not ends or ends[-1].reason != "flag":
        if not counter.loop.poll().running:
            ends.append(counter.loop.join(WAIT))
            assert ends[-1].reason in ("ring_full", "flag")
            seen += mailbox.read()
            assert len(seen) == sum(end.iterations for end in ends)
            if ends[-1].reason == "ring_full":
                counter.loop.launch(ENDLESS)
        seen += mailbox.read()
        time.sleep(pause)
    assert mailbox.pending == 0
    assert [int(record[0, 0]) for record in seen] == list(range(1, goal + 1))
    for record in seen:
        assert record.dtype == np.int32
        assert (record[0] == record[0, 0]).all()
        assert (record[1] == 9).all()


def test_a_full_ring_ends_a_loop_before_it_would_overwrite(device: str) -> None:
    mailbox = Mailbox(device, record_shape=(2, 1), depth=5)
    counter = Counter(device, mailbox)
    counter.loop.launch(ENDLESS)
    assert counter.loop.join(WAIT) == LoopEnd(1, 5, "ring_full")
    counter.loop.launch(ENDLESS)
    assert counter.loop.join(WAIT) == LoopEnd(2, 0, "ring_full")
    assert [int(record[0, 0]) for record in mailbox.read()] == [1, 2, 3, 4, 5]
    counter.loop.launch(3)
    assert counter.loop.join(WAIT) == LoopEnd(3, 3, "max_steps")
    assert [int(record[0, 0]) for record in mailbox.read()] == [6, 7, 8]
    assert mailbox.read() == []


def test_a_block_of_records_goes_round_the_end_of_the_ring(device: str) -> None:
    mailbox = Mailbox(device, record_shape=(2, 3), depth=5)
    counter = Counter(device, mailbox, width=3)
    seen = []
    for steps in (3, 4, 5, 1):
        launch = counter.loop.launch(steps)
        counter.loop.join(WAIT)
        assert not counter.loop.running(launch)
        block = mailbox.read_block()
        assert (block.shape, block.dtype) == ((steps, 2, 3), np.int32)
        seen += block[:, 0, 0].tolist()
    assert seen == list(range(1, 14))
    assert mailbox.read_block().shape == (0, 2, 3)


def test_records_that_were_read_are_copies(device: str) -> None:
    mailbox = Mailbox(device, record_shape=(2, 1), depth=1)
    counter = Counter(device, mailbox)
    kept = []
    for _ in range(3):
        counter.loop.launch(1)
        counter.loop.join(WAIT)
        kept += mailbox.read()
    assert [int(record[0, 0]) for record in kept] == [1, 2, 3]


@pytest.mark.parametrize("moment", ["at once", "while it runs", "when it has ended", "by the mailbox"])
def test_a_doorbell_never_reaches_the_next_launch(device: str, moment: str) -> None:
    counter = Counter(device, record=None)
    draw = random.Random(5)
    for _ in range(60):
        counter.loop.launch(draw.randint(1, 12))
        if moment == "while it runs":
            time.sleep(draw.random() * 3e-4)
        if moment == "when it has ended":
            counter.loop.join(WAIT)
        (counter.loop.mailbox if moment == "by the mailbox" else counter.loop).ring_doorbell()
        launch = counter.loop.launch(3)
        assert counter.loop.join(WAIT) == LoopEnd(launch, 3, "max_steps")


def test_a_doorbell_rung_from_another_thread_at_any_time_ends_only_what_was_launched(device: str) -> None:
    counter = Counter(device, record=None)
    over = threading.Event()

    def ring() -> None:
        while not over.is_set():
            counter.loop.ring_doorbell()

    ringer = threading.Thread(target=ring)
    ringer.start()
    try:
        for _ in range(50):
            counter.loop.launch(ENDLESS)
            assert counter.loop.join(WAIT).reason == "doorbell"
    finally:
        over.set()
        ringer.join()
    launch = counter.loop.launch(4)
    assert counter.loop.join(WAIT) == LoopEnd(launch, 4, "max_steps")


def test_loops_of_one_mailbox_run_in_the_order_of_their_launches(device: str) -> None:
    mailbox, pool = Mailbox(device, record_shape=(2, 3), depth=64), GraphPool(device)
    first, second = (Counter(device, mailbox, width=3, tag=tag, pool=pool) for tag in (1, 2))
    launches = [first.loop.launch(2), second.loop.launch(3), first.loop.launch(1), second.loop.launch(1)]
    assert launches == [1, 2, 3, 4]
    assert second.loop.join(WAIT) == LoopEnd(4, 1, "max_steps")
    assert second.loop.join(WAIT, launch=2) == LoopEnd(2, 3, "max_steps")
    assert first.loop.poll() == LoopProgress(3, 1, False, "max_steps")
    seen = [(int(record[1, 0]), int(record[0, 2])) for record in mailbox.read()]
    assert seen == [(1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (1, 3), (2, 4)]


def test_a_doorbell_also_ends_what_waits_behind_but_not_what_comes_later(device: str) -> None:
    counter = Counter(device, record=None)
    launches = [counter.loop.launch(ENDLESS) for _ in range(Words.LAUNCHES)]
    wait_until_running_first(counter.loop, launches[0])
    with pytest.raises(GraphError, match="16 launches"):
        counter.loop.launch(1)
    counter.loop.ring_doorbell()
    ends = [counter.loop.join(WAIT, launch=launch) for launch in launches]
    assert {end.reason for end in ends} == {"doorbell"}
    assert ends[0].iterations == value(counter.count) > 0
    assert all(end.iterations == 0 for end in ends[1:])
    later = counter.loop.launch(2)
    assert counter.loop.join(WAIT) == LoopEnd(later, 2, "max_steps")
    with pytest.raises(GraphError, match="nothing is known of launch 1"):
        counter.loop.poll(launches[0])


def wait_until_running_first(loop: Loop, launch: int) -> None:
    deadline = time.monotonic() + WAIT
    while loop.poll(launch).iterations < 1:
        assert time.monotonic() < deadline


def test_a_loop_leaves_the_bits_of_as_many_replays(device: str) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(96, 96, device=device) * 0.12 for _ in range(4)]
    x, flag = torch.zeros(5, 96, device=device), torch.ones(1, dtype=torch.int32, device=device)

    def step() -> None:
        y = x
        for weight in weights:
            y = torch.nn.functional.gelu(y @ weight) + 0.1
        x.copy_(y)
        flag.copy_(x[0, 0].isfinite())

    graph = capture(step, device)
    start = torch.randn(5, 96, device=device)
    x.copy_(start)
    for _ in range(50):
        graph.replay()
    expected = x.clone()
    loop = Loop(graph, flag=flag)
    x.copy_(start)
    with torch.inference_mode(), torch.autocast(device):
        loop.launch(50)
        end = loop.join(WAIT)
    assert end.iterations == 50
    assert torch.equal(x, expected)
    assert not torch.equal(x, start)


def test_a_solver_stops_where_it_converged(device: str) -> None:
    torch.manual_seed(1)
    matrix = torch.rand(40, 40, dtype=torch.float64, device=device) + 40 * torch.eye(40, device=device)
    right = torch.rand(40, dtype=torch.float64, device=device)
    diagonal = matrix.diagonal().clone()
    rest = matrix - torch.diag(diagonal)
    x = torch.zeros(40, dtype=torch.float64, device=device)
    flag = torch.ones(1, dtype=torch.int32, device=device)

    def sweep() -> None:
        new = (right - rest @ x) / diagonal
        flag.copy_(((new - x).abs().max() > 1e-12).reshape(1))
        x.copy_(new)

    loop = Loop(capture(sweep, device), flag=flag, name="jacobi")
    x.zero_()
    loop.launch(10_000)
    end = loop.join(WAIT)
    assert end.reason == "flag"
    assert 5 < end.iterations < 1000
    assert torch.allclose(matrix @ x, right, atol=1e-10)


@pytest.mark.parametrize("steps", [3, Words.STAMPS - 1, Words.STAMPS, Words.STAMPS + 100])
def test_stamps_tell_when_each_iteration_ended(device: str, steps: int) -> None:
    counter = Counter(device, record=None)
    counter.loop.launch(7)
    counter.loop.join(WAIT)
    earlier = counter.loop.stamps()
    counter.loop.launch(steps)
    counter.loop.join(WAIT)
    stamps = counter.loop.stamps()
    assert len(earlier) == 8
    assert len(stamps) == min(steps + 1, Words.STAMPS)
    assert stamps[0] >= earlier[-1] > 0
    assert (np.diff(stamps) >= 0).all()
    assert stamps[-1] > stamps[0]


def test_a_rung_of_a_runner_repeats_on_what_was_loaded(device: str) -> None:
    total = torch.zeros(8, device=device)
    flag = torch.ones(1, dtype=torch.int32, device=device)

    def step(x: torch.Tensor) -> None:
        total[: x.shape[0]].add_(x)
        flag.copy_((total[0] < 10).reshape(1))

    runner = GraphRunner(
        step, inputs={"x": Input((), torch.float32)}, ladder=Ladder([2, 4]), device=device, progress=False
    )
    runner.capture()
    total.zero_()
    rung = runner.load(x=[1.0, 2.0, 3.0])
    assert rung == 4
    loop = Loop(runner.graph(rung), flag=flag, name="sum[4]")
    loop.launch(100)
    assert loop.join(WAIT) == LoopEnd(1, 10, "flag")
    assert total.tolist() == [10, 20, 30, 0, 0, 0, 0, 0]
    for act in (runner.release, lambda: runner.recapture("test"), runner.graph(4).release):
        with pytest.raises(GraphError, match=r"'sum\[4\]' repeats this graph"):
            act()
    assert sorted(runner.graphs) == [2, 4]
    loop.release()
    runner.recapture("test")
    runner.release()


def test_a_rung_cannot_be_had_where_nothing_is_recorded(device: str) -> None:
    inputs = {"x": Input((), torch.float32)}
    runner = GraphRunner(lambda x: x + 1, inputs=inputs, ladder=Ladder([2]), device=device, enforce_eager=True)
    with pytest.raises(GraphError, match="enforce_eager"):
        runner.graph(2)


def test_a_loop_that_is_dropped_while_it_runs_ends_and_lets_go_of_its_graph(device: str) -> None:
    counter = Counter(device, record=None)
    memory = counter.loop.mailbox.memory
    launch = counter.loop.launch(ENDLESS)
    wait_until_running(counter.loop)
    with pytest.raises(GraphError, match="repeats this graph"):
        counter.graph.release()
    del counter.loop
    assert memory.reason(launch)
    done = value(counter.count)
    counter.graph.replay()
    assert value(counter.count) == done + 1
    counter.graph.release()


def test_a_released_loop_refuses(device: str) -> None:
    counter = Counter(device, record=None)
    counter.loop.launch(ENDLESS)
    counter.loop.release()
    counter.loop.release()
    assert counter.loop.poll().reason == "doorbell"
    with pytest.raises(GraphError, match="released"):
        counter.loop.launch(1)


def test_what_cannot_be_right_is_refused_with_its_value(device: str) -> None:
    counter = Counter(device, record=None)
    long = torch.ones(1, dtype=torch.int64, device=device)
    two = torch.ones(2, dtype=torch.int32, device=device)
    mailbox = Mailbox(device, record_shape=(4,))
    flag = counter.flag
    with pytest.raises(GraphError, match=r"max_steps is 0"):
        counter.loop.launch(0)
    with pytest.raises(GraphError, match="never launched"):
        counter.loop.join()
    with pytest.raises(GraphError, match=r"flag of loop 'loop' is int64 \[1\].*int32 \[1\]"):
        Loop(counter.graph, flag=long)
    with pytest.raises(GraphError, match=r"flag of loop 'loop' is int32 \[2\]"):
        Loop(counter.graph, flag=two)
    with pytest.raises(GraphError, match=r"record of loop 'loop' is int32 \[2\].*int32 \[4\]"):
        Loop(counter.graph, flag=flag, mailbox=mailbox, record=two)
    with pytest.raises(GraphError, match="depth 0"):
        Mailbox(device, record_shape=(4,), depth=0)
    with pytest.raises(GraphError, match="nothing is known of launch 3"):
        counter.loop.poll(3)


def test_a_flag_that_moved_stops_the_launch(device: str) -> None:
    counter = Counter(device, name="moving")
    counter.flag.set_(torch.ones(1, dtype=torch.int32, device=device))
    with pytest.raises(StaleAddressError, match=r"moving\.flag"):
        counter.loop.launch(1)
    counter = Counter(device, name="moving")
    counter.record.set_(torch.ones(2, 1, dtype=torch.int32, device=device))
    with pytest.raises(StaleAddressError, match=r"moving\.record"):
        counter.loop.launch(1)
