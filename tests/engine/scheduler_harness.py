"""A device and an engine loop without a model, which check everything that the scheduler promises.

The device keeps, in each KV slot, a hash of all tokens up to and including the slot's own. A step verifies
every slot that its attention would read, so a block shared, reused or read wrongly is an error at once. The
next token is a function of that hash and the request's seed: what a request answers does not depend on its
company, and `ideal_answer` says what it must be.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from mainspring.engine.block_pool import BlockPool
from mainspring.engine.plan import DecodePlan, PrefillPlan
from mainspring.engine.request import Request, RequestStatus, service_order
from mainspring.engine.scheduler import Scheduler

EOS = 0
VOCABULARY = 4


@dataclass(frozen=True)
class Params:
    max_tokens: int | None = 16
    seed: int = 0
    eos_every: int = 0
    """One token in this many is EOS; 0 ignores EOS."""


def chain(previous: int, token: int) -> int:
    return hash((previous, token))


def next_token(history: int, params: Params) -> int:
    noise = hash((history, params.seed, 1)) >> 7
    if params.eos_every and noise % params.eos_every == 0:
        return EOS
    return 1 + (noise >> 9) % (VOCABULARY - 1)


def ideal_answer(prompt: list[int], params: Params, max_total_tokens: int) -> list[int]:
    """What the stub model answers when nothing else exists."""
    history = 0
    for token in prompt:
        history = chain(history, token)
    answer: list[int] = []
    while len(prompt) + len(answer) < max_total_tokens:
        answer.append(next_token(history, params))
        if answer[-1] == EOS:
            break
        history = chain(history, answer[-1])
    return answer


@dataclass
class Seat:
    """What the device knows of the request in a seat."""

    histories: list[int] = field(default_factory=list)
    """Hash after each token whose KV is written."""
    token: int = -1
    """The token whose KV the next step writes."""
    alive: bool = False
    budget: int = 0
    params: Params = field(default_factory=Params)


class Device:
    """Block tables, KV slots and seats; runs a plan when it is launched, as one stream would."""

    def __init__(self, num_blocks: int, block_size: int, num_seats: int) -> None:
        self.block_size = block_size
        self.kv: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.tables = [[0] * num_blocks for _ in range(num_seats)]
        self.seats = [Seat() for _ in range(num_seats)]

    def run_prefill(self, plan: PrefillPlan) -> list[tuple[Request, int | None]]:
        self._write_tables(plan.table_writes)
        results: list[tuple[Request, int | None]] = []
        for chunk in plan.chunks:
            request, seat_index = chunk.request, chunk.request.seat
            assert seat_index is not None
            assert isinstance(request.params, Params)
            stop = chunk.start + chunk.length
            histories, history = [], 0
            for token in request.token_span(0, stop):
                history = chain(history, token)
                histories.append(history)
            for position in range(chunk.start, stop):
                self._write_kv(seat_index, position, histories[position])
            self._verify_kv(seat_index, histories)
            if chunk.is_last:
                assert stop == request.num_tokens
                token = next_token(history, request.params)
                budget = request.max_total_tokens - request.num_tokens - 1
                alive = token != EOS and budget > 0
                self.seats[seat_index] = Seat(histories, token, alive, budget, request.params)
                results.append((request, token))
        return results

    def run_decode(self, requests: list[Request]) -> list[tuple[Request, int | None]]:
        results: list[tuple[Request, int | None]] = []
        for request in requests:
            assert request.seat is not None
            results.append((request, self._decode_row(request.seat)))
        return results

    def apply(self, plan: DecodePlan) -> None:
        self._write_tables(plan.table_writes)

    def _decode_row(self, seat_index: int) -> int | None:
        seat = self.seats[seat_index]
        if not seat.alive:
            return None
        position = len(seat.histories)
        history = chain(seat.histories[-1], seat.token)
        seat.histories.append(history)
        self._write_kv(seat_index, position, history)
        self._verify_kv(seat_index, seat.histories)
        seat.token = next_token(history, seat.params)
        seat.budget -= 1
        seat.alive = seat.token != EOS and seat.budget > 0
        return seat.token

    def _write_tables(self, writes: list) -> None:
        for seat, column, block_id in writes:
            assert block_id > 0, "the null block was given to a request"
            self.tables[seat][column] = block_id

    def _write_kv(self, seat: int, position: int, content: int) -> None:
        block_id = self.tables[seat][position // self.block_size]
        assert block_id > 0, f"seat {seat} writes position {position} without a block"
        self.kv[block_id][position % self.block_size] = content

    def _verify_kv(self, seat: int, expected: list[int]) -> None:
        size, table = self.block_size, self.tables[seat]
        for column in range(-(-len(expected) // size)):
            wanted = expected[column * size : (column + 1) * size]
            found = self.kv[table[column]][: len(wanted)]
            assert found == wanted, f"seat {seat} reads wrong KV in column {column} (block {table[column]})"


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
        self.in_flight: deque[list[tuple[Request, int | None]]] = deque()
        self.requests: list[Request] = []
        self.num_arrived = 0
        self.cut_short: set[Request] = set()
        self.plans: list[str] = []
        self.num_steps = 0

    # -- what a user does ----------------------------------------------------------------------------------

    def add(self, prompt: list[int], params: Params | None = None, **options: object) -> Request:
        number = self.num_arrived
        self.num_arrived += 1
        request = Request(f"r{number}", prompt, params or Params(), arrival=number, **options)  # type: ignore
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

    def loop_step(self, max_steps: int, stop_after: int) -> None:
        """A decode step that the device repeats by itself, up to ``max_steps`` times or ``stop_after``."""
        while self.in_flight:
            self._read_back()
        plan = self._schedule(may_preempt=True)
        if isinstance(plan, PrefillPlan):
            self.in_flight.append(self.device.run_prefill(plan))
        elif isinstance(plan, DecodePlan):
            self.device.apply(plan)
            ahead = self.scheduler.reserve_ahead(plan.requests, max_steps - 1)
            assert 0 <= ahead.steps < max_steps
            self.device.apply(DecodePlan(plan.requests, ahead.table_writes))
            self.check(in_loop=True)
            for _ in range(min(1 + ahead.steps, stop_after)):
                self.in_flight.append(self.device.run_decode(plan.requests))
            while self.in_flight:
                self._read_back()
            self.scheduler.return_unused(plan.requests)
        while len(self.in_flight) > self.depth:
            self._read_back()
        self.check()

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
            and self.pool.blocks_for(head.num_tokens) <= self.pool.num_free
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
