"""The switch interval: shorter while the engine sleeps, longer while it launches, and always put back."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest

from mainspring import LLM, SamplingParams
from mainspring.engine.interpreter import SwitchInterval, switch_interval


@pytest.fixture
def other_thread() -> Iterator[None]:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, daemon=True)
    thread.start()
    yield
    done.set()
    thread.join()


def near(seconds: float) -> object:
    return pytest.approx(seconds, abs=2e-6)  # the interpreter keeps whole microseconds


def test_blocks_lie_inside_each_other_and_leave_nothing_behind(other_thread: None) -> None:
    usual, intervals = sys.getswitchinterval(), SwitchInterval()
    with intervals.of(0.02):
        assert sys.getswitchinterval() == near(0.02)
        with intervals.of(0.001):
            assert sys.getswitchinterval() == near(0.001)
        assert sys.getswitchinterval() == near(0.02)
    assert sys.getswitchinterval() == near(usual)
    with pytest.raises(ValueError, match="x"), intervals.of(0.02):
        raise ValueError("x")
    assert sys.getswitchinterval() == near(usual)


def test_blocks_of_threads_may_overlap_in_any_order(other_thread: None) -> None:
    usual, intervals = sys.getswitchinterval(), SwitchInterval()
    first, second = intervals.of(0.02), intervals.of(0.001)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() != near(usual)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == near(usual)


def test_what_the_program_sets_meanwhile_is_kept(other_thread: None) -> None:
    usual, intervals = sys.getswitchinterval(), SwitchInterval()
    try:
        with intervals.of(0.0001):
            sys.setswitchinterval(0.002)
            with intervals.of(0.0001):
                assert sys.getswitchinterval() == near(0.0001)
        assert sys.getswitchinterval() == near(0.002)
        with intervals.of(0.0001), intervals.of(0.0003):
            sys.setswitchinterval(0.003)
        assert sys.getswitchinterval() == near(0.003)
    finally:
        sys.setswitchinterval(usual)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_forked_in_a_step_has_the_usual_interval(other_thread: None) -> None:
    """Also where another thread holds the lock at that moment."""
    usual = sys.getswitchinterval()
    with switch_interval.of(0.0001):
        switch_interval._lock.acquire()
        child = os.fork()
        if child == 0:
            free = switch_interval._lock.acquire(timeout=5)
            os._exit(0 if free and sys.getswitchinterval() == near(usual) else 1)
        switch_interval._lock.release()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert sys.getswitchinterval() == near(0.0001)
    assert sys.getswitchinterval() == near(usual)


@pytest.mark.parametrize("mode", ["graph", "loop"])
def test_an_engine_leaves_the_interval_as_it_was(make_tiny: object, other_thread: None, mode: str) -> None:
    usual = sys.getswitchinterval()
    llm: LLM = make_tiny(launch_mode=mode)  # type: ignore[operator]
    stream = llm.stream({"prompt_token_ids": [5, 6]}, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    for _ in range(3):
        next(stream)
        assert sys.getswitchinterval() == near(usual)
    stream.close()
    assert sys.getswitchinterval() == near(usual)
