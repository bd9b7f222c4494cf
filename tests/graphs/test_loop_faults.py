"""A loop that fails, hangs, is forked or is left behind says so, and what comes after it works or refuses."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loop_helpers import ENDLESS, WAIT, Counter, capture, value

from mainspring.graphs import (
    GraphError,
    GraphPool,
    Loop,
    LoopEnd,
    LoopError,
    LoopStuckError,
    Mailbox,
    loop_backend,
    loop_cuda,
)
from mainspring.graphs.loop_layout import REASONS, Slot, slot_at


@pytest.fixture(autouse=True)
def nothing_stays_left(monkeypatch: Any) -> None:
    """What a test leaves behind for good is not for good here."""
    monkeypatch.setattr(loop_backend, "_LEFT", [])


def test_an_error_in_a_replay_names_the_launch_and_the_next_launch_runs() -> None:
    table, index = torch.arange(4.0), torch.zeros(1, dtype=torch.int64)
    out, flag = torch.zeros(1), torch.ones(1, dtype=torch.int32)

    def step() -> None:
        out.copy_(table.index_select(0, index))
        index.add_(1)

    looped = Loop(capture(step, "cpu"), flag=flag, name="lookup[1]")
    index.zero_()
    looped.launch(3)
    assert looped.join(WAIT).iterations == 3
    looped.launch(ENDLESS)
    with pytest.raises(LoopError, match=r"launch 2 of 'lookup\[1\]' failed: .*out of range") as caught:
        looped.join(WAIT)
    assert caught.value.launch == 2
    assert not caught.value.fatal
    assert isinstance(caught.value.__cause__, (IndexError, RuntimeError))
    with pytest.raises(LoopError, match="launch 2"):
        looped.poll()
    index.zero_()
    looped.launch(2)
    assert looped.join(WAIT) == LoopEnd(3, 2, "max_steps")


def test_a_loop_that_makes_no_iteration_is_stuck_and_one_that_makes_some_is_not(monkeypatch: Any) -> None:
    counter = Counter("cpu", record=None, name="held")
    go = threading.Semaphore(2)
    replay = counter.graph.replay

    def held() -> None:
        go.acquire()
        replay()

    monkeypatch.setattr(counter.graph, "replay", held)
    counter.loop.launch(4)
    with pytest.raises(LoopStuckError, match=r"launch 1 of 'held' finished no iteration for 0.2 s, after 2") as caught:
        counter.loop.join(0.2)
    assert caught.value.launch == 1
    assert counter.loop.poll().running
    go.release(2)
    assert counter.loop.join(WAIT) == LoopEnd(1, 4, "max_steps")


def test_a_launch_that_waits_behind_one_that_moves_is_not_stuck() -> None:
    counter = Counter("cpu", record=None)
    counter.loop.launch(ENDLESS)
    behind = counter.loop.launch(1)
    ends: list[LoopEnd] = []
    waiter = threading.Thread(target=lambda: ends.append(counter.loop.join(0.2, launch=behind)))
    waiter.start()
    time.sleep(0.6)
    assert waiter.is_alive()
    counter.loop.mailbox.memory.ring_doorbell(behind - 1)
    waiter.join(WAIT)
    assert ends == [LoopEnd(behind, 1, "max_steps")]


def test_a_lost_device_is_reported_once_seen_and_refuses_further_launches(monkeypatch: Any) -> None:
    counter = Counter("cpu", record=None, name="decode[8]")
    memory = counter.loop.mailbox.memory
    error = RuntimeError("CUDA error: an illegal memory access was encountered\nFor debugging consider ...")
    with memory.lock:
        memory.number_launch(9)
    counter.loop._newest[0] = 1
    monkeypatch.setattr(counter.loop._backend, "fault", lambda launch: error)
    with pytest.raises(LoopError, match=r"launch 1 of 'decode\[8\]' failed: .*illegal memory access") as caught:
        counter.loop.join(WAIT)
    assert caught.value.fatal
    assert "For debugging" not in str(caught.value)
    with pytest.raises(GraphError, match=r"'decode\[8\]' cannot run: launch 1 .*illegal memory access"):
        counter.loop.launch(1)
    monkeypatch.setattr(counter.loop._backend, "fault", lambda launch: None)  # it is not asked at every look
    with pytest.raises(LoopError, match="illegal memory access"):
        counter.loop.poll()
    counter.loop.release()
    assert any(left[1] is counter.graph for left in loop_backend._LEFT)


def test_a_device_that_counts_otherwise_is_an_error() -> None:
    counter = Counter("cpu", record=None)
    memory = counter.loop.mailbox.memory
    with memory.lock:
        memory.number_launch(9)
    memory.store(slot_at(1) + Slot.REASON, REASONS.index("lost"))
    with pytest.raises(LoopError, match="lost count"):
        counter.loop.poll(1)
    with pytest.raises(GraphError, match="lost count"):
        counter.loop.launch(1)


def test_a_loop_that_does_not_end_keeps_its_memory(monkeypatch: Any) -> None:
    counter = Counter("cpu", record=None)
    inside, go = threading.Event(), threading.Event()
    replay = counter.graph.replay
    monkeypatch.setattr(counter.graph, "replay", lambda: (inside.set(), go.wait(WAIT), replay()))
    monkeypatch.setattr(loop_backend, "STOP_SECONDS", 0.1)
    launch = counter.loop.launch(ENDLESS)
    assert inside.wait(WAIT)
    memory = counter.loop.mailbox.memory
    del counter.loop
    assert any(left[1] is counter.graph for left in loop_backend._LEFT)
    with pytest.raises(GraphError, match="repeats this graph"):
        counter.graph.release()
    go.set()
    deadline = time.monotonic() + WAIT
    while not memory.reason(launch):
        assert time.monotonic() < deadline


def test_other_graphs_of_the_pool_refuse_to_run_beside_a_loop() -> None:
    pool = GraphPool("cpu")
    counter, other = Counter("cpu", record=None, pool=pool), Counter("cpu", record=None, pool=pool)
    counter.loop.launch(ENDLESS)
    for act in (other.graph.replay, counter.graph.replay, lambda: other.loop.launch(1)):
        with pytest.raises(GraphError, match="join it first"):
            act()
    counter.loop.ring_doorbell()
    counter.loop.join(WAIT)
    for _ in range(200):  # at once after the end that was seen
        counter.loop.launch(1)
        counter.loop.join(WAIT, interval=0)
        other.graph.replay()
    assert value(other.count) == 200


def test_a_fork_of_the_process_is_refused_and_does_not_touch_the_loop() -> None:
    mailbox = Mailbox("cpu", record_shape=(2, 1), depth=8)
    counter = Counter("cpu", mailbox)
    counter.loop.launch(3)
    counter.loop.join(WAIT)
    looped = counter.loop
    acts = [
        lambda: looped.launch(1),
        looped.poll,
        looped.join,
        looped.ring_doorbell,
        mailbox.read,
        mailbox.ring_doorbell,
    ]
    child = os.fork()
    if child == 0:
        refused = 0
        for act in acts:
            try:
                act()
            except GraphError as error:
                refused += "spawn" in str(error)
        looped.release()
        os._exit(refused)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == len(acts)
    assert len(mailbox.read()) == 3
    looped.launch(1)
    assert looped.join(WAIT).reason == "max_steps"


def test_a_process_that_ends_while_a_loop_runs_ends_cleanly() -> None:
    program = """
        import torch
        from mainspring.graphs import CpuGraph, Loop
        x, flag = torch.zeros(64, 64), torch.ones(1, dtype=torch.int32)
        def step():
            x.add_(x @ x)
            flag.copy_((x[0, 0] == 0).reshape(1))
        loop = Loop(CpuGraph.capture(step), flag=flag)
        loop.launch(10**12)
        while loop.poll().iterations < 10: pass
        print("ended")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")


def test_the_thread_of_a_mailbox_ends_with_it() -> None:
    counter = Counter("cpu", record=None)
    counter.loop.launch(1)
    counter.loop.join(WAIT)
    thread = counter.loop.mailbox.runner.thread
    assert thread.is_alive()
    del counter
    gc.collect()
    thread.join(WAIT)
    assert not thread.is_alive()


def test_why_a_gpu_has_no_loop_is_said(monkeypatch: Any) -> None:
    device = torch.device("cuda", 0)
    assert Loop.available("cpu") is None
    assert "only CPU and CUDA" in str(Loop.available("meta"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Loop.available("cuda") == "torch sees no NVIDIA GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    assert "below 7.5" in str(Loop.available(device))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(loop_cuda, "_driver", lambda: None)
    assert "pip install cuda-bindings" in str(Loop.available(device))
    monkeypatch.setattr(loop_cuda, "_driver", lambda: SimpleNamespace(cuDriverGetVersion=lambda: (0, 12030)))
    assert "older than CUDA 12.4" in str(Loop.available(device))
    for version, answer in ((12030, "the driver has CUDA 12.3"), (12040, None), (13000, None)):
        driver = SimpleNamespace(
            cuDriverGetVersion=lambda version=version: (0, version), cuGraphConditionalHandleCreate=None
        )
        monkeypatch.setattr(loop_cuda, "_driver", lambda driver=driver: driver)
        why = Loop.available(device)
        assert why is None if answer is None else str(why).startswith(answer)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert "spawn" in str(Loop.available(device))


def test_a_signal_handler_may_ring_while_the_same_thread_polls() -> None:
    counter = Counter("cpu", record=None)
    rung = 0

    def ring(*_: object) -> None:
        nonlocal rung
        rung += 1
        counter.loop.ring_doorbell()

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 2e-4, 2e-4)
    try:
        while rung < 500:
            counter.loop.launch(ENDLESS)
            while counter.loop.poll().running:
                pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    launch = counter.loop.launch(2)
    assert counter.loop.join(WAIT) == LoopEnd(launch, 2, "max_steps")
