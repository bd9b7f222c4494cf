"""Short words for tests that drive a scheduler by hand."""

from __future__ import annotations

from scheduler_device import Params

from mainspring.engine.block_pool import BlockPool
from mainspring.engine.plan import DecodePlan, PrefillPlan
from mainspring.engine.request import Request
from mainspring.engine.scheduler import Scheduler


def prompt(length: int, first: int = 5) -> list[int]:
    return [first + i for i in range(length)]


def make(num_blocks: int = 9, num_seats: int = 4, budget: int = 16, max_model_len: int = 1000) -> Scheduler:
    return Scheduler(BlockPool(num_blocks, 4), num_seats, budget, max_model_len)


def add(scheduler: Scheduler, length: int, max_tokens: int | None = 8, **options: int) -> Request:
    number = len(scheduler.requests)
    request = Request(f"r{number}", prompt(length, 100 * number), Params(max_tokens), number, **options)
    scheduler.add(request)
    return request


def chunks(plan: object) -> list[tuple[Request, int, int, bool]]:
    assert isinstance(plan, PrefillPlan)
    return [(c.request, c.start, c.length, c.is_last) for c in plan.chunks]


def rows(plan: object) -> list[Request]:
    assert isinstance(plan, DecodePlan)
    return plan.requests


def read_back(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.append_token(request, 1)
