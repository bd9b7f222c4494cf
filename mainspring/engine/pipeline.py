"""What was launched and not read back yet, in order: steps, and loops of steps."""

from __future__ import annotations

from collections import deque

from mainspring.engine.delivery import Delivery, Touched
from mainspring.engine.launched import LaunchedStep
from mainspring.engine.loop_driver import LoopDriver
from mainspring.engine.loops import RunningLoop
from mainspring.engine.model_runner import ModelRunner
from mainspring.engine.plan import DecodePlan, PrefillPlan
from mainspring.engine.request import Request
from mainspring.engine.scheduler import Scheduler
from mainspring.engine.stats import StepClock


class Pipeline:
    """Launches what the scheduler plans and hands out what comes back; called with the engine's lock held.

    Attributes:
        in_flight: oldest first.
        depth: steps that may be under way when a call ends.
        looping: whether decode steps may be launched as loops.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        delivery: Delivery,
        driver: LoopDriver,
        *,
        depth: int,
        looping: bool,
    ) -> None:
        self.in_flight: deque[LaunchedStep | RunningLoop] = deque()
        self.depth = depth
        self.looping = looping
        self.clock = StepClock()
        self.driver = driver
        self._scheduler = scheduler
        self._runner = runner
        self._delivery = delivery

    @property
    def last_loop(self) -> RunningLoop | None:
        """The loop that was launched last, if it may still be running."""
        return next((each for each in reversed(self.in_flight) if isinstance(each, RunningLoop)), None)

    def advance(self, touched: Touched, held: bool) -> None:
        """Take what has come, and launch what there is to launch. Answers that got tokens are added to ``touched``.

        ``held`` says that a request looks at all tokens so far before each, so that nothing may be under way.
        """
        if held:
            self.drain(touched)
        self.take_from_loops(touched)
        loop = self.last_loop
        if loop is not None:
            self.tend(loop, touched)
        else:
            self.launch(held, touched)
        self._delivery.tell()

    def launch(self, held: bool, touched: Touched) -> None:
        """Schedule and launch a step, or a loop of steps, and read back the oldest if enough are under way."""
        plan = self._scheduler.schedule(may_preempt=not self.in_flight)
        if plan is not None:
            self.clock.starting(idle=not self.in_flight)
            step = self._launched(plan, held)
            self.clock.launched(plan, step)
            self.in_flight.append(step)
        head = self.in_flight[0] if self.in_flight else None
        if isinstance(head, LaunchedStep) and (plan is None or len(self.in_flight) > (0 if held else self.depth)):
            self.in_flight.popleft()
            self._read_back(head, touched)

    def _launched(self, plan: PrefillPlan | DecodePlan, held: bool) -> LaunchedStep | RunningLoop:
        if self.looping and isinstance(plan, DecodePlan):
            loop = self.driver.launch(plan, held)
            if loop is not None:
                return loop
        return self._runner.launch(plan)

    def tend(self, loop: RunningLoop, touched: Touched) -> None:
        """Look after a loop under way; a step in front of it is read back."""
        head = self.in_flight[0]
        if isinstance(head, LaunchedStep):
            self.in_flight.popleft()
            self._read_back(head, touched)
        elif self.in_flight[-1] is loop:
            behind = self.driver.tend(loop)
            if behind is not None:
                self.in_flight.append(behind)

    def take_from_loops(self, touched: Touched) -> None:
        """Hand out what has come from the loops that are next to be read."""
        while self.in_flight and isinstance(loop := self.in_flight[0], RunningLoop):
            before, tokens = loop.seen, self._delivery.tokens
            records = loop.take()
            if len(records):
                self._tell_of(self._delivery.take_steps(loop.requests, records, touched))
            self.driver.taken(loop, len(records), before)
            self.clock.looped(len(records), self._delivery.tokens - tokens)
            if loop.end is None:
                return
            self.in_flight.popleft()
            self.driver.ended(loop)

    def drain(self, touched: Touched) -> None:
        """Ask loops to end, and read back everything under way."""
        self._runner.loops.end()
        while self.in_flight:
            self.take_from_loops(touched)
            if self.in_flight and isinstance(head := self.in_flight[0], LaunchedStep):
                self.in_flight.popleft()
                self._read_back(head, touched)

    def _read_back(self, launched: LaunchedStep, touched: Touched) -> None:
        """Wait for a step and give its tokens to their answers, which are added to ``touched``."""
        results = launched.results()
        self.clock.arrived(launched)
        for read in launched.prompt_reads:
            self._delivery.take_prompt(read)
        self._tell_of(self._delivery.take(results, touched))
        self._delivery.fail(launched.failures, touched)

    def _tell_of(self, ended: list[Request]) -> None:
        if ended:
            self.driver.tell_of_ending(self.last_loop, ended, "stop string")
