"""A debugging aid: what an engine launched, written down, and launched again in another mode, to compare bit by bit.

A log holds everything that reached the device: table writes, prompt chunks, and for each decode step which seats its
rows served and which variant of the step they ran. So it can be replayed without scheduler, clock or chance. What a
step left behind is compared where it can still be read: the tokens of every step, and the state of the device whenever
nothing was queued behind the step.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from mainspring.engine.asks import Asks
from mainspring.engine.loops import RunningLoop
from mainspring.engine.model_runner import ModelRunner
from mainspring.engine.plan import DecodePlan, PrefillPlan, TableWrite
from mainspring.engine.request import Request
from mainspring.engine.request_state import seat_of
from mainspring.engine.samplers import variant_for

#: Name of a part of the device's state -> SHA-256 of its bytes.
Digest = dict[str, str]


@dataclass
class Launch:
    """One thing that was launched.

    ``asks`` is what buffers were allocated for; ``prefill`` is a prefill step; else it is ``steps`` decode steps of
    ``rows``, after ``table_writes``. ``tokens`` has ``(token, status)`` of each row, step by step. ``digest`` is of the
    state after it, None where that could not be read.
    """

    asks: Asks = Asks.NOTHING
    prefill: PrefillPlan | None = None
    rows: tuple[Request, ...] = ()
    table_writes: list[TableWrite] = field(default_factory=list)
    steps: int = 0
    tokens: list[list[tuple[int, int]]] = field(default_factory=list)
    digest: Digest | None = None


class ScheduleLog:
    """What one runner launched; filled by the runner, which it slows down: every state is copied to the CPU."""

    def __init__(self, runner: ModelRunner) -> None:
        self.launches: list[Launch] = []
        self._runner = runner
        self._loops: dict[RunningLoop, Launch] = {}

    @property
    def num_steps(self) -> int:
        """Decode steps in the log."""
        return sum(launch.steps for launch in self.launches)

    def required(self, asks: Asks) -> None:
        """Buffers for these kinds are about to be allocated."""
        self.launches.append(Launch(asks=asks))

    def launched(self, plan: PrefillPlan | DecodePlan) -> Callable[[], None]:
        """A step is about to be launched; what is returned is to be called when it was."""
        if isinstance(plan, PrefillPlan):
            chunks = [replace(chunk, request=_snapshot(chunk.request)) for chunk in plan.chunks]
            completed = tuple(chunk.request for chunk in chunks if chunk.is_last)
            launch = Launch(prefill=PrefillPlan(chunks, list(plan.table_writes)), rows=completed)
        else:
            rows = tuple(_snapshot(request) for request in plan.requests)
            launch = Launch(rows=rows, table_writes=list(plan.table_writes), steps=1)
        self.launches.append(launch)

        def done() -> None:
            if launch.rows:
                launch.tokens.append(_record(self._runner, launch))
            launch.digest = digest(self._runner, len(launch.rows))

        return done

    def loop_launched(self, loop: RunningLoop, table_writes: Sequence[TableWrite]) -> None:
        """A loop is about to run; its steps are written down when they are known."""
        launch = Launch(rows=tuple(_snapshot(request) for request in loop.requests), table_writes=list(table_writes))
        self.launches.append(launch)
        self._loops[loop] = launch
        loop.history = []

    def loop_extended(self, loop: RunningLoop, table_writes: Sequence[TableWrite]) -> None:
        """A running loop has got more blocks."""
        self._loops[loop].table_writes.extend(table_writes)

    def loop_ended(self, loop: RunningLoop) -> None:
        """All records of a loop were taken."""
        launch = self._loops.pop(loop)
        history = loop.history or []
        launch.steps = len(history)
        launch.tokens = [_pairs(record, len(launch.rows)) for record in history]
        if history and launch is self.launches[-1]:  # without a step, the logits are no step's: recording leaves some
            launch.digest = digest(self._runner, len(launch.rows))


@contextmanager
def record_schedule(runner: ModelRunner) -> Iterator[ScheduleLog]:
    """Write down what ``runner`` launches inside the block; a log that is to be replayed begins at its first launch."""
    log = runner.log = ScheduleLog(runner)
    try:
        yield log
    finally:
        runner.log = None


def replay_schedule(
    log: ScheduleLog, runner: ModelRunner, step: Callable[[Callable[[], object]], object] = lambda run: run()
) -> Iterator[str]:
    """Launch what ``log`` holds on another, fresh ``runner``, step by step, and tell every difference.

    ``step`` is called with what runs a decode step, and calls it, so as to look at more than is compared here.
    """
    for index, launch in enumerate(log.launches):
        tokens: list[list[tuple[int, int]]] = []
        if launch.asks:
            runner.require(launch.asks)
        elif launch.prefill is not None:
            runner.launch(launch.prefill)
            if launch.rows:
                tokens.append(_record(runner, launch))
        else:
            runner.seats.write_tables(launch.table_writes, runner.upload)
            decode = runner.runners[variant_for(launch.rows)]
            run = partial(decode, rows=[seat_of(request) for request in launch.rows])
            for _ in range(launch.steps):
                step(run)
                tokens.append(_record(runner, launch))
        what = f"launch {index} ({'prefill' if launch.prefill else f'{launch.steps} decode steps'})"
        for number, (wanted, got) in enumerate(zip(launch.tokens, tokens, strict=True)):
            if wanted != got:
                yield f"{what}, step {number}: tokens {got} instead of {wanted}"
        if launch.digest is not None and not launch.asks:
            now = digest(runner, len(launch.rows))
            for name, wanted_bits in launch.digest.items():
                if now[name] != wanted_bits:
                    yield f"{what}: {name} has other bits"


def digest(runner: ModelRunner, rows: int) -> Digest:
    """Of the seats, the token ring and the logits of the latest step's ``rows`` rows."""
    parts = {"seats": runner.seats.matrix, "ring": runner.ring.entries, "step": runner.ring.step}
    parts["logits"] = runner.logits[:rows]
    return {name: _sha256(tensor) for name, tensor in parts.items()}


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


def _record(runner: ModelRunner, launch: Launch) -> list[tuple[int, int]]:
    """What the latest step left for its rows."""
    return _pairs(runner.record_of(variant_for(launch.rows)).cpu().numpy(), len(launch.rows))


def _pairs(record: np.ndarray, rows: int) -> list[tuple[int, int]]:
    return [(int(token), int(status)) for token, status in record[:rows, :2].tolist()]


def _snapshot(request: Request) -> Request:
    """The request as it is now; what a launch reads of it does not change any more."""
    taken = copy.copy(request)
    taken.output_token_ids = list(request.output_token_ids)
    taken.block_ids = list(request.block_ids)
    return taken
