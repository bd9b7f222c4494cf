"""An engine loop over the stub device, which checks everything that the scheduler promises at each step."""

from __future__ import annotations

from collections import deque
from typing import Any

from scheduler_device import EOS, Device, Params, Results, ideal_answer

from mainspring.engine.block_pool import BlockPool
from mainspring.engine.plan import DecodePlan, PrefillPlan
from mainspring.engine.request import Request, RequestStatus, service_order
from mainspring.engine.scheduler import Scheduler


class Engine:
    """The loop that a real engine runs: launch, then read back with ``depth`` steps left in flight."""

    def __init__(
        self,
        num_blocks: int = 9,
        block_size: int = 4,
        num_seats: int = 3,
        max_num_batched_tokens: int = 16,
        max_model_len: int = 10_000,
        depth: int = 0,
        prefix_caching: bool = True,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size, prefix_caching)
        self.scheduler = Scheduler(self.pool, num_seats, max_num_batched_tokens, max_model_len)
        self.device = Device(num_blocks, block_size, num_seats)
        self.depth = depth
        self.in_flight: deque[Results] = deque()
        self.requests: list[Request] = []
        self.num_arrived = 0
        self.cut_short: set[Request] = set()
        self.plans: list[str] = []
        self.num_steps = 0

    # -- what a user does ----------------------------------------------------------------------------------

    def add(self, prompt: list[int], params: Params | None = None, **options: Any) -> Request:
        number = self.num_arrived
        self.num_arrived += 1
        request = Request(f"r{number}", prompt, params or Params(), arrival=number, **options)
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def abort(self, request: Request) -> None:
        if self.scheduler.abort(request):
            self.cut_short.add(request)

    def stop_on_cpu(self, request: Request) -> None:
        """As a stop string would: the device does not know of it."""
        if not request.is_finished:
            self.scheduler.finish(request, "stop")
            self.cut_short.add(request)

    def run(self, max_steps: int = 100_000) -> None:
        """Until nothing is left to do."""
        for _ in range(max_steps):
            if not self.step():
                break
        assert not self.scheduler.has_unfinished
        self.check_end()

    # -- the loop ------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Launch one step, or read one back where none can be launched. False: idle."""
        plan = self._schedule(may_preempt=not self.in_flight)
        if isinstance(plan, PrefillPlan):
            self.in_flight.append(self.device.run_prefill(plan))
        elif isinstance(plan, DecodePlan):
            self.device.apply(plan)
            self.in_flight.append(self.device.run_decode(plan.requests))
        elif self.in_flight:
            self._read_back()
        else:
            return False
        while len(self.in_flight) > self.depth:
            self._read_back()
        self.check()
        return True

    def loop_step(
        self, max_steps: int, stop_after: int, keep_free: int = 0, more_steps: int = 0, admit: bool = False
    ) -> None:
        """A decode step that the device repeats by itself, up to ``max_steps`` times or ``stop_after``.

        ``more_steps`` are asked for when the first are done, before the CPU has read any; ``admit`` launches a prefill
        step behind, if there can be one, before unused blocks are returned.
        """
        while self.in_flight:
            self._read_back()
        plan = self._schedule(may_preempt=True)
        if isinstance(plan, PrefillPlan):
            self.in_flight.append(self.device.run_prefill(plan))
        elif isinstance(plan, DecodePlan):
            self.device.apply(plan)
            left = stop_after
            steps = 1 + self._reserve(plan.requests, max_steps - 1, keep_free)
            left -= self._repeat(plan.requests, min(steps, left))
            if more_steps and left:
                self._repeat(plan.requests, min(self._reserve(plan.requests, more_steps, keep_free), left))
            behind = self.scheduler.plan_admission() if admit else None
            if behind is not None:
                self.num_steps += 1
                self.plans.append("prefill")
                prefilled = self.device.run_prefill(behind)
            while self.in_flight:
                self._read_back()
            waits = self.scheduler.prefill_waits(plan.requests)
            self.scheduler.return_unused(plan.requests)
            assert self.scheduler.prefill_waits() == waits, "blocks to be returned were counted wrongly"
            if behind is not None:
                self.in_flight.append(prefilled)
        while len(self.in_flight) > self.depth:
            self._read_back()
        self.check()

    def _reserve(self, requests: list[Request], steps: int, keep_free: int) -> int:
        """Reserve ahead and write the tables; the steps granted."""
        ahead = self.scheduler.reserve_ahead(requests, steps, keep_free)
        assert 0 <= ahead.steps <= max(steps, 0)
        assert not ahead.table_writes or self.pool.num_free >= keep_free
        self.device.apply(DecodePlan(requests, ahead.table_writes))
        self.check(in_loop=True)
        return ahead.steps

    def _repeat(self, requests: list[Request], steps: int) -> int:
        for _ in range(steps):
            self.in_flight.append(self.device.run_decode(requests))
        return steps

    def _schedule(self, may_preempt: bool) -> PrefillPlan | DecodePlan | None:
        scheduler = self.scheduler
        before = [r for r in scheduler.requests if r.status is RequestStatus.RUNNING]
        ready = [r for r in before if r.can_decode]
        preempted_before = scheduler.num_preemptions
        prefill_possible = self._prefill_possible(before)
        free_seats = scheduler.num_seats - len(before)
        queue = [r for r in scheduler.requests if r.status is RequestStatus.WAITING]
        plan = scheduler.schedule(may_preempt)
        self.num_steps += plan is not None
        running = [r for r in scheduler.requests if r.status is RequestStatus.RUNNING]
        victims = [r for r in before if r not in running]
        if not may_preempt:
            assert scheduler.num_preemptions == preempted_before
        for victim in victims:
            assert not victim.block_ids
            assert victim.in_flight == 0
            assert all(service_order(victim) > service_order(r) for r in running), "not the youngest"
        if isinstance(plan, PrefillPlan):
            assert 0 < plan.num_tokens <= scheduler.max_num_batched_tokens
            if self.plans[-1:] == ["prefill"]:
                assert not ready or victims, "two prefill steps between two decode steps"
            order = [service_order(c.request) for c in plan.chunks]
            assert order == sorted(order)
            admitted = [r for r in running if r not in before]
            assert len(admitted) <= free_seats
            assert victims or admitted == queue[: len(admitted)], "a request was overtaken in the queue"
            self.plans.append("prefill")
        elif isinstance(plan, DecodePlan):
            assert plan.requests
            assert self.plans[-1:] != ["decode"] or not prefill_possible, "prefill was put off twice"
            assert plan.requests[0] is ready[0], "the oldest does not advance"
            assert plan.requests == [r for r in ready if r in running]
            self.plans.append("decode")
        elif may_preempt:
            assert not running, "nothing is in flight, requests are running, and none advances"
        return plan

    def _prefill_possible(self, running: list[Request]) -> bool:
        scheduler = self.scheduler
        if any(r.in_prefill for r in running):
            return True
        head = next((r for r in scheduler.requests if r.status is RequestStatus.WAITING), None)
        return (
            head is not None
            and len(running) < scheduler.num_seats
            and self.pool.blocks_for(head.num_tokens) + len(running) <= self.pool.num_free
        )

    def _read_back(self) -> None:
        for request, token in self.in_flight.popleft():
            if request.is_finished:
                continue
            assert token is not None, "the device ended a row that the CPU still runs"
            at_limit = self.scheduler.append_token(request, token)
            if token == EOS:
                self.scheduler.finish(request, "stop")
            elif at_limit:
                self.scheduler.finish(request, "length")

    # -- what must hold ------------------------------------------------------------------------------------

    def check(self, in_loop: bool = False) -> None:
        scheduler, pool = self.scheduler, self.pool
        running = [r for r in scheduler.requests if r.status is RequestStatus.RUNNING]
        pool.check([r.block_ids for r in running])
        seats = [r.seat for r in running]
        assert len(set(seats)) == len(seats) == scheduler.num_running <= scheduler.num_seats
        results = [request for step in self.in_flight for request, _ in step]
        for request in scheduler.requests:
            if request.status is RequestStatus.WAITING:
                assert request.seat is None
                assert not request.block_ids
                assert request.in_flight == request.num_computed_tokens == 0
                continue
            assert request.seat is not None
            assert self.device.tables[request.seat][: len(request.block_ids)] == request.block_ids
            assert request.budget_left >= 0
            assert request.num_computed_tokens <= len(request.block_ids) * pool.block_size
            for block_id in request.block_ids[request.num_computed_tokens // pool.block_size :]:
                assert pool.ref_count(block_id) == 1, "a block that will be written is shared"
            if not request.in_prefill:
                assert request.num_computed_tokens == request.num_tokens - 1 + request.in_flight
            if not in_loop:
                assert request.in_flight == results.count(request) <= self.depth
        for request in self.requests:
            if request.is_finished:
                assert not request.block_ids
                assert request.seat is None

    def check_end(self) -> None:
        """After all requests ended: nothing is held, and every answer is the right one."""
        self.check()
        assert self.pool.num_free == self.pool.num_usable_blocks
        for request in self.requests:
            self.check_answer(request)

    def check_answer(self, request: Request) -> None:
        assert request.is_finished
        assert isinstance(request.params, Params)
        ideal = ideal_answer(request.prompt_token_ids, request.params, request.max_total_tokens)
        answer = request.output_token_ids
        if request in self.cut_short:
            assert answer == ideal[: len(answer)]
        else:
            assert answer == ideal
            assert request.finish_reason == ("stop" if answer[-1] == EOS else "length")
