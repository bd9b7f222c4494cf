"""What a request comes to on the device: its seat, the seat's contents, and the variant of the step it needs."""

from __future__ import annotations

from mainspring.engine.request import Request
from mainspring.engine.seats import SeatState


def seat_of(request: Request) -> int:
    """The seat of a request that was planned; every such request has one."""
    if request.seat is None:
        raise RuntimeError(f"request {request.request_id} was planned without a seat")
    return request.seat


def seat_state(request: Request) -> SeatState:
    """The seat of a request whose prompt (and, after a preemption, answer so far) is about to be computed."""
    params = request.params
    generated = len(request.output_token_ids)
    return SeatState(
        token_id=request.token_span(request.num_tokens - 1, request.num_tokens)[0],
        position=request.num_tokens - 1,
        remaining=request.max_total_tokens - request.num_tokens,
        min_remaining=params.min_tokens - generated,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=request.seed,
        choice=request.choice,
        stop_ids=request.stop_ids,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        asks=int(request.asks),
    )


def needs_full_sampler(request: Request) -> bool:
    """Whether the request's next token asks for more than arg-max."""
    params = request.params
    return bool(request.asks or params.temperature > 0.0 or params.min_tokens > len(request.output_token_ids))
