"""The recorded step by itself: a batch is stopped in mid-answer, and its step replayed from there at will."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mainspring.engine.answers import Answer
    from mainspring.engine.core import EngineCore
    from mainspring.engine.sampling_params import SamplingParams

#: Steps replayed in a row where the KV blocks that the rows hold have room for so many.
STEPS_IN_A_ROW = 8
#: Clock cycles that a GPU is kept busy while the CPU queues the replays: about a millisecond.
HEAD_START = 2_000_000
GROUPS = {"cuda": 20, "cpu": 3}


class PausedBatch:
    """A running batch with nothing in flight, and the state to which each replay goes back.

    Replaying moves only the seats, the token ring and KV entries that come later anyway: after ``rewind`` the engine
    goes on as if nothing had been.
    """

    def __init__(self, core: EngineCore, replay: Callable[[], None], steps: int) -> None:
        self.device = core.limits.device
        self.steps = steps
        self._replay = replay
        runner = core.runner
        self._state = [runner.seats.matrix, runner.ring.step, runner.ring.entries]
        self._saved = [tensor.clone() for tensor in self._state]

    def rewind(self) -> None:
        """Put the state back to where the batch was paused."""
        for tensor, saved in zip(self._state, self._saved, strict=True):
            tensor.copy_(saved)

    def replay(self) -> None:
        """Launch the step once; at most ``steps`` times between two rewinds, or rows run out of KV blocks."""
        self._replay()

    def step_ms(self) -> float:
        """Milliseconds of one step among ``steps`` in a row, on the device's own clock where it is a GPU."""
        measure = self._on_gpu if self.device.type == "cuda" else self._on_cpu
        times = []
        for _ in range(GROUPS[self.device.type]):
            self.rewind()
            times.append(measure() / self.steps)
        self.rewind()
        return statistics.median(times)

    def _on_gpu(self) -> float:
        import torch

        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(HEAD_START)
        begin.record()
        for _ in range(self.steps):
            self._replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def _on_cpu(self) -> float:
        started = time.perf_counter()
        for _ in range(self.steps):
            self._replay()
        return 1e3 * (time.perf_counter() - started)


@contextmanager
def paused_batch(
    core: EngineCore, prompts: Sequence[Sequence[int]], params: SamplingParams, after: int
) -> Iterator[PausedBatch | None]:
    """Answer ``prompts`` until each has ``after`` tokens, then hold; the answers are aborted in the end.

    None where nothing is recorded (eager), or where no moment comes at which every row's KV blocks have room for a
    step. ``params`` should allow for ``after`` and two KV blocks of tokens more.
    """
    with core.step_by_step(), _paused(core, prompts, params, after) as paused:
        yield paused


@contextmanager
def _paused(
    core: EngineCore, prompts: Sequence[Sequence[int]], params: SamplingParams, after: int
) -> Iterator[PausedBatch | None]:
    answers = [core.add(f"paused-{index}", prompt, params) for index, prompt in enumerate(prompts)]
    paused = None
    try:
        while min(_tokens(answer) for answer in answers) < after:
            core.step()
        room = _room(core, answers)
        for _ in range(core.limits.block_size):
            if room >= STEPS_IN_A_ROW:
                break
            core.step()
            room = _room(core, answers)
        replay = _recorded_step(core, answers)
        _synchronize(core)
        if replay is not None and room > 0:
            paused = PausedBatch(core, replay, min(room, STEPS_IN_A_ROW))
        yield paused
    finally:
        if paused is not None:
            paused.rewind()
        for answer in answers:
            core.abort(answer)
        while core.has_work():
            core.step()


def _tokens(answer: Answer) -> int:
    return len(answer.choices[0].request.output_token_ids)


def _room(core: EngineCore, answers: Sequence[Answer]) -> int:
    """Steps that every row can make before one needs another KV block; 0 once one has ended."""
    if any(answer.finished for answer in answers):
        return 0
    size = core.limits.block_size
    requests = [answer.choices[0].request for answer in answers]
    return min(len(request.block_ids) * size - request.num_computed_tokens for request in requests)


def _recorded_step(core: EngineCore, answers: Sequence[Answer]) -> Callable[[], None] | None:
    from mainspring.engine.request_state import needs_full_sampler
    from mainspring.engine.samplers import FULL, PLAIN

    full = any(needs_full_sampler(answer.choices[0].request) for answer in answers)
    runner = core.runner.runners[FULL if full else PLAIN]
    graph = runner.graphs.get(runner.ladder.rung_for(len(answers)))
    return None if graph is None else graph.replay


def _synchronize(core: EngineCore) -> None:
    if core.limits.device.type == "cuda":
        import torch

        torch.cuda.synchronize(core.limits.device)
