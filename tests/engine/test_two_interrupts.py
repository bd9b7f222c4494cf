"""However closely two Ctrl-C follow each other, and wherever they come, nothing is left behind.

Python looks for signals when a function begins, after a call and when it jumps back, and nowhere else; the tests raise
them at each of these places.
"""

from __future__ import annotations

import dis
import gc
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any

import pytest

from mainspring import LLM, SamplingParams

MakeLLM = Callable[..., LLM]
PROMPT = {"prompt_token_ids": [11, 45, 200, 31, 8]}
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
#: What holds signals back, or gives back what a request has.
CRITICAL = ("llm.py", "core.py", "interrupts.py", "interpreter.py", "contextlib.py", "delivery.py")
LOOKS_FOR_SIGNALS = ("CALL", "RESUME", "JUMP_BACKWARD")


class Interruption:
    """Raises ``count`` SIGINTs at the ``place``-th place from where it is started at which Python looks for them."""

    def __init__(self, place: int, count: int) -> None:
        self.place = place
        self.count = count
        self.seen = 0
        self._looks: dict[CodeType, set[int]] = {}
        self._before: dict[FrameType, int] = {}

    def __enter__(self) -> Interruption:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self._before.clear()

    @property
    def has_come(self) -> bool:
        return self.seen >= self.place

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.endswith(CRITICAL):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            last = self._before.get(frame)
            self._before[frame] = frame.f_lasti
            if last in self._places(frame.f_code) and not self.has_come:
                self.seen += 1
                if self.has_come:
                    self._raise()
        return self._trace

    def _places(self, code: CodeType) -> set[int]:
        if code not in self._looks:
            self._looks[code] = {
                each.offset for each in dis.get_instructions(code) if each.opname.startswith(LOOKS_FOR_SIGNALS)
            }
        return self._looks[code]

    def _raise(self) -> None:
        for remaining in range(self.count, 0, -1):
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                self.count = remaining - 1  # what is left comes when the exception is on its way
                raise


def assert_idle(llm: LLM) -> None:
    """At the latest after the next call."""
    llm.core.step()
    assert not llm.core._delivery.choices, "a request was left behind"
    while llm.core.has_work():
        llm.core.step()
    assert not llm.core.scheduler.requests
    assert llm.core.scheduler.pool.num_free == llm.core.memory.num_blocks
    assert not llm.core.doomed


def read(llm: LLM) -> None:
    for _ in llm.stream(PROMPT, GREEDY):
        pass


def drop(llm: LLM) -> None:
    next(llm.stream(PROMPT, GREEDY))


def leave(llm: LLM) -> None:
    """As by Ctrl-C in the reader's own code."""
    with suppress(KeyboardInterrupt):
        llm.stream(PROMPT, GREEDY).throw(KeyboardInterrupt)  # type: ignore[attr-defined]


def generate(llm: LLM) -> None:
    llm.generate([PROMPT] * 2, GREEDY)


@pytest.mark.parametrize(
    ("mode", "ask", "count"),
    [("eager", ask, 2) for ask in (generate, read, drop, leave)]
    + [("loop", read, 2), ("loop", leave, 2), ("eager", read, 1), ("eager", leave, 3)],
)
def test_interrupts_at_any_place_leave_nothing(
    make_tiny: MakeLLM, ask: Callable[[LLM], None], mode: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # a stream that is dropped has nobody to tell
    llm = make_tiny(launch_mode=mode, num_gpu_blocks_override=4, block_size=4, enable_prefix_caching=False)
    expected = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    place = 1
    while True:
        interruption = Interruption(place, count)
        with suppress(KeyboardInterrupt), interruption:
            ask(llm)
        if not interruption.has_come:
            break
        gc.collect(0)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, place
        assert_idle(llm)
        place += 1
    assert place > 20
    assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == expected
