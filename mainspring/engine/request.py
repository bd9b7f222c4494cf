"""One answer being made: its tokens, where it stands, and what it holds on the device."""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from mainspring.engine.asks import Asks

if TYPE_CHECKING:
    from mainspring.engine.sampling_params import SamplingParams
    from mainspring.engine.structured import Grammar

FinishReason = Literal["stop", "length", "abort"]


class RequestStatus(enum.Enum):
    """Where a request is: in the queue, holding a seat, or done."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One choice of one user's request (``n`` > 1 makes ``n`` of these, told apart by ``choice``).

    ``num_tokens`` counts the prompt and the outputs known to the CPU. While a prefill is under way,
    ``num_computed_tokens`` is how many of them have their KV written or launched; it ends at ``num_tokens``
    (``prefill_target``), and from then on

        num_computed_tokens == num_tokens - 1 + in_flight

    which is also the position that the next decode step writes: the last known token's KV is not written yet,
    and each step in flight writes one more. The last chunk of a prefill samples a token and so counts as a
    step in flight.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: int
    """Sequence number; requests of equal priority are served in this order."""
    priority: int = 0
    """Lower is served first."""
    choice: int = 0
    """Which of the ``n`` answers to one prompt this is."""
    seed: int = 0
    """What the draws of this answer depend on, together with ``choice`` and the position."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the answer, end-of-sequence ids included."""
    asks: Asks = Asks.NOTHING
    """What the request wants of the sampling beyond temperature and filters."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences of which the last id is not chosen where it would complete them."""
    prompt_logprobs_due: bool = False
    """Whether log-probabilities of the prompt are still to be computed: its blocks are not taken from the cache."""
    grammar: Grammar | None = None
    """Where the answer stands in the grammar that it has to keep to."""
    cache_salt: str | None = None
    """Requests share cached blocks only with requests of the same salt."""

    output_token_ids: list[int] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    seat: int | None = None
    block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    in_flight: int = 0
    """Launched steps whose token for this request has not been read back."""
    max_total_tokens: int = 0
    """Prompt and outputs together never exceed this; set when the scheduler takes the request."""
    prefill_target: int = 0
    """Tokens that the prefill under way has to compute; 0 before admission."""
    num_cached_tokens: int = 0
    """Prompt tokens that the first admission found in the prefix cache."""
    num_preemptions: int = 0
    num_published_blocks: int = 0
    """Leading blocks that the prefix cache has been told of since admission."""
    block_keys: list[bytes] = field(default_factory=list, repr=False)
    """Prefix cache keys: the root, then one for each full block so far. Never change, as tokens do not."""

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and outputs."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def in_prefill(self) -> bool:
        """Whether a seated request has prompt tokens (or tokens to recompute) left to launch."""
        return self.num_computed_tokens < self.prefill_target

    @property
    def can_decode(self) -> bool:
        """Whether a seated request's prefill is launched and its limit allows for one more token."""
        return self.prefill_target <= self.num_computed_tokens < self.max_total_tokens - 1

    @property
    def budget_left(self) -> int:
        """Tokens that may still be launched: the limit less what is known and what is in flight."""
        return self.max_total_tokens - self.num_tokens - self.in_flight

    @property
    def at_limit(self) -> bool:
        """Whether the known tokens have reached ``max_total_tokens``: the answer ends with "length"."""
        return self.num_tokens >= self.max_total_tokens

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended, in whichever way."""
        return self.status is RequestStatus.FINISHED

    def token_span(self, start: int, stop: int) -> list[int]:
        """Token ids at the positions ``start`` .. ``stop`` - 1 of prompt and outputs together."""
        prompt_length = len(self.prompt_token_ids)
        if stop <= prompt_length:
            return self.prompt_token_ids[start:stop]
        if start >= prompt_length:
            return self.output_token_ids[start - prompt_length : stop - prompt_length]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - prompt_length]

    def drop_holdings(self) -> None:
        """Forget seat, blocks and what was computed; whoever gave them takes them back beforehand."""
        self.seat = None
        self.block_ids = []
        self.num_computed_tokens = 0
        self.prefill_target = 0
        self.num_published_blocks = 0

    def end(self, reason: FinishReason) -> None:
        """Mark the request as finished; steps still in flight no longer count."""
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason
        self.in_flight = 0
        self.block_keys.clear()


def service_order(request: Request) -> tuple[int, int, int]:
    """Sort key: the request with the smaller key is served first and preempted last."""
    return (request.priority, request.arrival, request.choice)


class RequestQueue:
    """Requests kept in service order."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def first(self) -> Request | None:
        """The next to be served; None if empty."""
        return self._requests[0] if self._requests else None

    @property
    def last(self) -> Request | None:
        """The youngest of the lowest priority; None if empty."""
        return self._requests[-1] if self._requests else None

    def add(self, request: Request) -> None:
        """Put a request at its place."""
        insort(self._requests, request, key=service_order)

    def remove(self, request: Request) -> None:
        """Take this very request out.

        Raises:
            ValueError: it is not here.
        """
        index = bisect_left(self._requests, service_order(request), key=service_order)
        del self._requests[self._requests.index(request, index)]

    def clear(self) -> None:
        """Take all out."""
        self._requests.clear()
