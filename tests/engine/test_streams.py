"""Streams end with what they hold given back, however they end; calls from several places do not mix."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import pytest
import torch

from mainspring import LLM, SamplingParams
from mainspring.engine.errors import EngineError

MakeLLM = Callable[..., LLM]
PROMPT = {"prompt_token_ids": [11, 45, 200, 31, 8]}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(seed=4, top_k=20, max_tokens=12, ignore_eos=True)


def ids(llm: LLM, params: SamplingParams = GREEDY) -> list[int]:
    return list(llm.generate(PROMPT, params)[0].outputs[0].token_ids)


def assert_idle(llm: LLM) -> None:
    while llm.core.has_work():  # a loop that was asked to end is still to be read
        assert llm.core.launch_mode == "loop"
        llm.core.step()
    assert not llm.core.scheduler.requests
    assert llm.core.scheduler.pool.num_free == llm.core.memory.num_blocks


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_stream_that_was_never_read_leaves_nothing(make_tiny: MakeLLM, how: str) -> None:
    llm = make_tiny()
    stream = llm.stream(PROMPT, GREEDY)
    if how == "closed":
        stream.close()  # type: ignore[attr-defined]
    del stream
    gc.collect()
    assert_idle(llm)


def test_a_stream_whose_request_is_ended_from_elsewhere_says_so(
    make_tiny: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_tiny()
    stream = llm.stream(PROMPT, GREEDY)
    before = next(stream)
    monkeypatch.setattr(llm.core.runner, "launch", lambda plan: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.generate(PROMPT, GREEDY)
    monkeypatch.undo()
    last = list(stream)[-1]
    assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
    assert last.outputs[0].token_ids == before.outputs[0].token_ids


def test_a_stream_that_is_dropped_in_the_middle_of_a_step_ends_after_it(
    make_tiny: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_tiny(num_gpu_blocks_override=4)
    expected = ids(llm)
    streams = [llm.stream(PROMPT, GREEDY), llm.stream(PROMPT, GREEDY)]
    pool = llm.core.scheduler.pool
    allocate = pool.allocate

    def drop_and_allocate(count: int) -> list[int]:  # as the garbage collector may, at any moment
        while len(streams) > 1:
            streams.pop(0).close()  # type: ignore[attr-defined]
        return allocate(count)

    monkeypatch.setattr(pool, "allocate", drop_and_allocate)
    assert list(streams[-1])[-1].outputs[0].token_ids == expected
    assert_idle(llm)


def test_a_call_from_inside_a_step_is_refused_and_the_engine_goes_on(
    make_tiny: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_tiny()
    expected = ids(llm)
    monkeypatch.setattr(llm.core.runner, "launch", lambda plan: llm.generate(PROMPT, GREEDY))
    with pytest.raises(EngineError, match="from inside"):
        ids(llm)
    monkeypatch.undo()
    assert ids(llm) == expected
    assert_idle(llm)


def test_threads_take_turns_and_each_gets_its_own_answer(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    expected = {params: ids(llm, params) for params in (GREEDY, DRAWN)}
    got: list[bool] = []

    def ask() -> None:
        for params in (GREEDY, DRAWN, GREEDY):
            got.append(ids(llm, params) == expected[params])

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert got == [True] * 9
    assert_idle(llm)


CUT_AT = {
    "eager": ["add", "_admit", "end", "_step", "schedule", "take", "service_order"],
    "loop": ["take_from_loops", "take", "tend", "launch", "await_news", "forget", "reserve_ahead"],
}


@pytest.mark.parametrize(("mode", "function"), [(mode, name) for mode, names in CUT_AT.items() for name in names])
@pytest.mark.parametrize("line", [1, 4, 9])
def test_ctrl_c_at_any_line_leaves_nothing_half_done(make_tiny: MakeLLM, mode: str, function: str, line: int) -> None:
    llm = make_tiny(launch_mode=mode, num_gpu_blocks_override=8, max_num_seqs=2, block_size=4)
    expected = ids(llm)
    seen = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal seen
        if frame.f_code.co_name != function or "mainspring" not in frame.f_code.co_filename:
            return None if event == "call" else trace
        if event == "line":
            seen += 1
            if seen == line:
                signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPT] * 3, GREEDY)
    finally:
        sys.settrace(None)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_idle(llm)
    assert ids(llm) == expected


def test_an_engine_whose_recovery_was_cut_short_says_so(make_tiny: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_tiny()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.core.runner, "launch", interrupted)
    monkeypatch.setattr(llm.core.scheduler, "abort_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ids(llm)
    monkeypatch.undo()
    with pytest.raises(EngineError, match="has stopped"):
        ids(llm)
    llm.close()


class DefaultDevice(AbstractContextManager[None]):
    """``torch.set_default_device``, and back."""

    def __enter__(self) -> None:
        torch.set_default_device("meta")

    def __exit__(self, *_: object) -> None:
        torch.set_default_device(None)


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference mode": torch.inference_mode,
    "gradients": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default device": DefaultDevice,
}


@pytest.mark.parametrize("mode", ["eager", "graph", "loop"])
@pytest.mark.parametrize("around", AROUND)
def test_what_the_caller_has_set_in_torch_changes_nothing(make_tiny: MakeLLM, around: str, mode: str) -> None:
    plain = make_tiny(launch_mode=mode)
    expected = ids(plain), ids(plain, DRAWN)
    with AROUND[around]():
        made_inside = make_tiny(launch_mode=mode)
        assert (ids(plain), ids(plain, DRAWN)) == expected
        assert ids(made_inside) == expected[0]
    assert (ids(made_inside), ids(made_inside, DRAWN)) == expected
