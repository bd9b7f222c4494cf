"""What the CPU does about loops: how far one may run, when it is asked to end, and what is queued behind it then."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from contextlib import suppress

import numpy as np

from mainspring.engine.launched import LaunchedStep
from mainspring.engine.loop_times import StepTimes
from mainspring.engine.loops import RunningLoop
from mainspring.engine.model_runner import ModelRunner
from mainspring.engine.plan import DecodePlan, PrefillPlan, Reservation
from mainspring.engine.request import Request, RequestStatus
from mainspring.engine.samplers import variant_for
from mainspring.engine.scheduler import Scheduler
from mainspring.graphs import GraphError

#: Steps that are kept of a reservation, one for each launch that takes over the rows of a loop that is ending.
SPARE_STEPS = 4
#: No number of launches uses these up.
UNLIMITED = 1 << 30
#: Seconds that one call of `step` waits for tokens at most, so that Ctrl-C and other callers are heard.
LONGEST_WAIT = 0.05


class Bell:
    """Wakes a thread that waits for tokens. Rung while nobody waits, it ends the next wait at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """End one wait."""
        try:
            self._lock.release()
        except RuntimeError:  # rung already
            return

    def wait(self, seconds: float) -> bool:
        """Wait until someone rings, at most so long; whether someone did."""
        return self._lock.acquire(timeout=seconds)


class LoopDriver:
    """Starts, extends and ends loops for one engine. All but `await_news` is called with the engine's lock held.

    Args:
        scheduler: of the engine.
        runner: of the engine.
        steps_ahead: decode steps for which blocks are reserved.
        stuck_after: seconds without a step after which a loop counts as stuck.

    Attributes:
        times: seconds of a step, as measured.
        ends: launches that have ended, by reason: as the device tells it, or why the CPU asked for it.
        single_steps: decode steps launched one at a time, by reason.
        gaps: seconds that the device stood still between a loop's end and the next loop, where no prefill was between.
        stamps: where it is a list, each loop that ends adds to it the times of its beginning and of the end of each of
            its steps, in nanoseconds of the device's clock.
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, steps_ahead: int, stuck_after: float) -> None:
        self.bell = Bell()
        self.times = StepTimes()
        self.ends: Counter[str] = Counter()
        self.single_steps: Counter[str] = Counter()
        self.gaps: deque[float] = deque(maxlen=10_000)
        self.stamps: list[np.ndarray] | None = None
        self.news = False
        self._latest: RunningLoop | None = None
        self._scheduler = scheduler
        self._runner = runner
        self._steps_ahead = steps_ahead
        self._stuck_after = stuck_after

    # -- launching -----------------------------------------------------------------------------------------

    def launch(self, plan: DecodePlan, held: bool) -> RunningLoop | None:
        """Launch a planned decode step, and as many more as blocks can be reserved for, as one loop.

        None where it has to be a step alone, which is then still to be launched; ``held`` says that a request needs the
        CPU at every token.
        """
        requests, scheduler = plan.requests, self._scheduler
        why = "a row needs the CPU" if held else self._why_single(requests)
        if why is None:
            reserved = self._reserve(requests, self._steps_ahead - 1)
            if reserved.steps or all(request.budget_left == 0 for request in requests):
                until, spare = self._bounds(requests, self._runner.steps_launched + 1 + reserved.steps)
                self.news = False
                return self._runner.loops.launch(
                    requests,
                    [*plan.table_writes, *reserved.table_writes],
                    until=until,
                    spare=spare,
                    leave_on_end=scheduler.num_waiting > 0,
                    stuck_after=self._stuck_after,
                )
            why = "no free block"
        self.single_steps[why] += 1
        return None

    def _why_single(self, requests: list[Request]) -> str | None:
        if len(requests) > self._runner.limits.ladder.top:
            return "split batch"
        if self._scheduler.prefill_waits():
            return "a prefill waits"
        if not self._runner.loops.fits(requests):
            return "large records"
        return None

    def _reserve(self, requests: list[Request], steps: int) -> Reservation:
        """Blocks for ``steps`` more steps out of one half of those that are free, or, if that gives none, of all."""
        scheduler = self._scheduler
        reserved = scheduler.reserve_ahead(requests, steps, keep_free=scheduler.pool.num_free // 2)
        return reserved if reserved.steps else scheduler.reserve_ahead(requests, steps)

    def _bounds(self, requests: list[Request], reserved_until: int) -> tuple[int, int]:
        """``until`` and ``spare`` of a loop whose rows have blocks up to the step ``reserved_until``."""
        if all(request.budget_left == 0 for request in requests):
            return reserved_until, UNLIMITED  # every row ends before its blocks do
        spare = min(SPARE_STEPS, (reserved_until - self._runner.steps_launched) // 4)
        return reserved_until - spare, spare

    # -- while it runs -------------------------------------------------------------------------------------

    def tell_of_arrival(self, loop: RunningLoop | None) -> None:
        """A request has come: where it can be admitted, the loop is asked to end at once."""
        self.news = True
        if loop is not None and not loop.ringing and self._scheduler.prefill_waits(loop.requests):
            self._ring(loop, "arrival")
            self.bell.ring()

    def tell_of_ending(self, loop: RunningLoop | None, ended: list[Request], why: str) -> None:
        """The CPU has ended requests, of which the device does not know."""
        self.news = True
        if loop is not None and not loop.stale and not set(ended).isdisjoint(loop.requests):
            loop.stale = True
            if not loop.ringing:
                self._ring(loop, why)
            self.bell.ring()

    def tend(self, loop: RunningLoop) -> LaunchedStep | RunningLoop | None:
        """Look after the loop behind which nothing is queued yet; what this queues there, if anything."""
        scheduler = self._scheduler
        if not loop.ringing:
            if self.news:
                self.news = False
                if scheduler.prefill_waits(loop.requests):
                    self._ring(loop, "room for a waiting request")
            if not loop.ringing and not self._lower_rung_pays(loop):
                self._extend(loop)
                return None
            if not loop.ringing:
                self._ring(loop, "lower rung")
        if loop.answered:
            return None
        loop.answered = True
        if scheduler.prefill_waits(loop.requests):
            # Blocks that are reserved still cannot be given to it: then it is planned when the loop has ended.
            plan = scheduler.plan_admission()
            return None if plan is None else self._launch_prefill(plan)
        return self._take_over(loop)

    def _launch_prefill(self, plan: PrefillPlan) -> LaunchedStep:
        return self._runner.launch(plan)

    def _take_over(self, loop: RunningLoop) -> RunningLoop | None:
        """Queue a launch behind a loop that is ending, for the rows that are left and in the blocks that they have."""
        rows = _running(loop)
        runner = self._runner
        if not rows or not loop.spare:
            return None
        if runner.record_of(variant_for(rows)) is not runner.record_of(loop.rung[0]):
            return None  # its records arrive elsewhere, so that their order would be lost
        loop.tied = True
        return runner.loops.launch(
            rows,
            [],
            until=loop.until + 1,
            spare=loop.spare if loop.spare == UNLIMITED else loop.spare - 1,
            leave_on_end=self._scheduler.num_waiting > 0,
            stuck_after=self._stuck_after,
        )

    def _lower_rung_pays(self, loop: RunningLoop) -> bool:
        rows = len(_running(loop))
        if rows == 0:
            return False  # it ends by itself
        variant, size = loop.rung
        lower = self._runner.limits.ladder.rung_for(rows)
        if lower == size or not loop.spare:
            return False
        return self.times.lower_pays(loop.rung, lower, rows, loop.longest - loop.taken)

    def _extend(self, loop: RunningLoop) -> None:
        """Reserve more when half of the steps are gone. Its first record is there, so nothing earlier is under way."""
        if loop.spare == UNLIMITED or loop.settled or loop.stale or not loop.taken:
            return
        left = loop.until - self._runner.steps_launched - loop.taken
        if 2 * left > self._steps_ahead:
            return
        rows = _running(loop)
        reserved = self._reserve(rows, self._steps_ahead - left) if rows else Reservation(0, [])
        if not reserved.steps:
            loop.settled = True
            return
        until, loop.spare = self._bounds(rows, loop.until + loop.spare + reserved.steps)
        self._runner.loops.extend(loop, reserved.table_writes, until)

    def _ring(self, loop: RunningLoop, why: str) -> None:
        loop.ring()
        loop.why = why

    # -- its end -------------------------------------------------------------------------------------------

    def taken(self, loop: RunningLoop, steps: int, before: float) -> None:
        """Note the time of ``steps`` steps that were taken from a loop seen last at the time ``before``."""
        if not steps:
            return
        if loop.taken > steps:  # the first ones waited for what ran before
            self.times.add(loop.rung, loop.seen - before, steps)
        else:
            self._note_gap(loop)

    def _note_gap(self, loop: RunningLoop) -> None:
        """By the device's own clock, how long it stood still before the loop whose first steps have come."""
        before, self._latest = self._latest, loop
        if before is not None and before.mark == loop.mark:  # nothing else ran between
            with suppress(GraphError):  # that launch may be too long ago
                end, begin = before.loop.stamps(before.launch)[-1], loop.loop.stamps(loop.launch)[0]
                gap = max(0.0, float(begin - end) * 1e-9)
                self.gaps.append(gap)
                self.times.add_switch(gap)

    def ended(self, loop: RunningLoop) -> None:
        """All of a loop's records were taken: what it did not use goes back, unless another goes on with it."""
        if self.stamps is not None:
            self.stamps.append(loop.loop.stamps(loop.launch))
        self._runner.loops.forget(loop)
        if not loop.tied:
            self._scheduler.return_unused(loop.requests)
        reason = "" if loop.end is None else loop.end.reason
        self.ends[loop.why if reason == "doorbell" and loop.why else reason] += 1

    # -- waiting -------------------------------------------------------------------------------------------

    def await_news(self, loop: RunningLoop, patient: bool = False) -> None:
        """Wait until there are tokens of ``loop``, or someone rings the bell; without the engine's lock.

        ``patient`` says that nobody reads tokens before their answer has ended: then until there are many, or it ends.
        """
        deadline = time.perf_counter() + LONGEST_WAIT
        rows = _running(loop)
        left = min(loop.longest, loop.until - self._runner.steps_launched) - loop.taken
        enough, may_stop = 1, any(request.stop_ids for request in rows)
        if patient and not loop.ringing and not (may_stop and len(rows) > 1):
            # A row that ends gives way to a waiting request, or to a lower rung.
            left = min([left, *(request.max_total_tokens - request.num_tokens for request in rows)])
            enough = self._enough(loop, rows, left)
        while not loop.has_news(enough) and time.perf_counter() < deadline:
            if enough > 1 and not loop.ringing:
                due = enough - loop.post.pending
                seconds = self.times.sleep_through(loop.rung, due, left <= enough, may_stop)
            else:
                looked_for = 1 if patient else len(loop.requests)
                seconds = self.times.look_again(loop.rung, looked_for, left, loop.ringing)
            if self.bell.wait(seconds):
                return

    def _enough(self, loop: RunningLoop, rows: list[Request], left: int) -> int:
        """Steps that are worth a look of somebody who only waits for the end; the first row ends in ``left`` steps."""
        if any(request.params.stop for request in rows):
            return 1  # only the CPU knows when such a row ends
        enough = min(self.times.unseen_steps(loop.rung), left, loop.post.mailbox.depth // 4)
        if loop.spare != UNLIMITED and not loop.settled:  # more blocks are wanted in time
            reserved = loop.until - self._runner.steps_launched - loop.taken
            enough = min(enough, max(reserved - self._steps_ahead // 2, reserved // 2))
        return max(1, enough)


def _running(loop: RunningLoop) -> list[Request]:
    """The rows that go on, as far as the CPU knows."""
    return [request for request in loop.requests if request.status is RequestStatus.RUNNING]
