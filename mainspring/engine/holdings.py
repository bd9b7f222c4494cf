"""What requests hold on the device: a seat each, and the KV blocks of their tokens.

The mechanics below the scheduler's decisions. Every change of a block table is reported as a `TableWrite`,
which the runner copies to the device before the step that needs it.
"""

from __future__ import annotations

from collections.abc import Sequence

from mainspring.engine.block_pool import BlockPool
from mainspring.engine.plan import Reservation, TableWrite
from mainspring.engine.request import Request, RequestStatus


class SchedulerError(RuntimeError):
    """The scheduler was driven against its rules; always a defect in the engine, never a user's mistake."""


class Holdings:
    """Gives seats and blocks to requests, takes them back, and tells the prefix cache of full blocks."""

    def __init__(self, pool: BlockPool, num_seats: int) -> None:
        self.pool = pool
        self.num_seats = num_seats
        self._free_seats = list(range(num_seats - 1, -1, -1))  # a stack, seat 0 on top

    @property
    def num_free_seats(self) -> int:
        """Seats that no request holds."""
        return len(self._free_seats)

    def try_admit(self, request: Request, headroom: int, writes: list[TableWrite]) -> bool:
        """Give a request a seat and all blocks of its known tokens at once, or nothing (False).

        ``headroom`` blocks must stay free beside.
        """
        pool = self.pool
        if not self._free_seats or pool.num_free <= headroom:
            return False
        hits, unheld = self._cached_blocks(request)
        missing = pool.blocks_for(request.num_tokens) - len(hits)
        if missing + unheld + headroom > pool.num_free:
            return False
        pool.acquire(hits)
        request.seat = self._free_seats.pop()
        request.block_ids = list(hits)
        writes.extend(TableWrite(request.seat, column, block_id) for column, block_id in enumerate(hits))
        self.grow(request, missing, writes)
        cached = len(hits) * pool.block_size
        request.num_computed_tokens = cached
        request.prefill_target = request.num_tokens
        request.num_published_blocks = len(hits)
        if request.num_preemptions == 0:
            request.num_cached_tokens = cached
        if pool.enable_prefix_caching and not request.prompt_logprobs_due:
            pool.counters.queried_tokens += request.num_tokens
            pool.counters.hit_tokens += cached
        return True

    def may_admit(self, request: Request, headroom: int, returned: int) -> bool:
        """Whether `try_admit` would succeed once ``returned`` more blocks are free; changes nothing."""
        free = self.pool.num_free + returned
        if not self._free_seats or free <= headroom:
            return False
        hits, unheld = self._cached_blocks(request)
        return self.pool.blocks_for(request.num_tokens) - len(hits) + unheld + headroom <= free

    def give_up(self, request: Request) -> None:
        """Free the seat and the blocks of a request that stops running, for whichever reason."""
        self._free_seats.append(_seat_of(request))
        self.pool.release(request.block_ids)
        request.drop_holdings()

    def reset(self) -> None:
        """Take back every seat and block, whoever holds them, and empty the prefix cache."""
        self._free_seats = list(range(self.num_seats - 1, -1, -1))  # a stack, seat 0 on top
        self.pool.reset()

    def lacks_block(self, request: Request) -> bool:
        """Whether the position that the next decode step writes lies past the request's blocks."""
        return request.num_computed_tokens >= len(request.block_ids) * self.pool.block_size

    def will_lack_block(self, request: Request, after_return: bool = False) -> bool:
        """Whether a running request will need another block for its next ``block_size`` tokens.

        With ``after_return`` as it will be once `return_unused` has taken back what was reserved ahead.
        """
        size = self.pool.block_size
        if after_return and not request.in_prefill:
            written = request.num_tokens - 1
            blocks = min(len(request.block_ids), self.pool.blocks_for(request.num_tokens))
        else:
            written, blocks = max(request.num_computed_tokens, request.prefill_target), len(request.block_ids)
        return min(written + size, request.max_total_tokens - 1) > blocks * size

    def grow(self, request: Request, count: int, writes: list[TableWrite]) -> None:
        """Append ``count`` blocks to the request's table."""
        seat = _seat_of(request)
        column = len(request.block_ids)
        new = self.pool.allocate(count)
        request.block_ids += new
        writes.extend(TableWrite(seat, column + i, block_id) for i, block_id in enumerate(new))

    # -- steps that the device repeats by itself -----------------------------------------------------------

    def reserve_ahead(self, requests: Sequence[Request], steps: int, keep_free: int = 0) -> Reservation:
        """Reserve blocks so that decoding requests can take up to ``steps`` further steps without the CPU.

        Never preempts: grants the most steps for which the free blocks suffice, perhaps 0, with ``keep_free`` of
        them left over. The granted steps
        count as launched (``in_flight``), each request's up to its budget; `return_unused` takes back what
        was not used.

        Raises:
            SchedulerError: a request does not run or is still in prefill.
        """
        for request in requests:
            if request.status is not RequestStatus.RUNNING or request.in_prefill:
                raise SchedulerError(f"{describe(request)} cannot reserve ahead: it is not decoding")
        low, high = 0, max([0, *(min(steps, r.budget_left) for r in requests)])
        while low < high:
            middle = (low + high + 1) // 2
            if sum(self._blocks_ahead(r, middle) for r in requests) <= self.pool.num_free - keep_free:
                low = middle
            else:
                high = middle - 1
        writes: list[TableWrite] = []
        for request in requests:
            self.grow(request, self._blocks_ahead(request, low), writes)
            taken = min(low, request.budget_left)
            request.num_computed_tokens += taken
            request.in_flight += taken
        return Reservation(low, writes)

    def return_unused(self, requests: Sequence[Request]) -> None:
        """After the device stopped and every token it made was appended: nothing is in flight any more.

        Gives back the blocks past each request's known tokens. Their ids may stay in the device's block
        table: no step reads a column before the position reaches it, and by then it has been written again.
        Requests that ended meanwhile are passed over.
        """
        for request in requests:
            if request.status is not RequestStatus.RUNNING or request.in_prefill:
                continue
            request.num_computed_tokens -= request.in_flight
            request.in_flight = 0
            keep = self.pool.blocks_for(request.num_tokens)
            self.pool.release(request.block_ids[keep:])
            del request.block_ids[keep:]

    def returnable(self, requests: Sequence[Request]) -> int:
        """Blocks that `return_unused` would give back now: less than that once the device has moved on."""
        return sum(max(0, len(r.block_ids) - self.pool.blocks_for(r.num_tokens)) for r in requests)

    def _blocks_ahead(self, request: Request, steps: int) -> int:
        tokens = request.num_computed_tokens + min(steps, request.budget_left)
        return max(0, self.pool.blocks_for(tokens) - len(request.block_ids))

    # -- prefix cache --------------------------------------------------------------------------------------

    def publish(self, request: Request, num_written: int) -> None:
        """Tell the cache of the blocks that the first ``num_written`` tokens, written or launched, fill."""
        full = num_written // self.pool.block_size
        known = request.num_published_blocks
        if full <= known or not self.pool.enable_prefix_caching:
            return
        self._extend_keys(request, full)
        for index in range(known, full):
            self.pool.publish(request.block_ids[index], request.block_keys[index + 1])
        request.num_published_blocks = full

    def _cached_blocks(self, request: Request) -> tuple[list[int], int]:
        """The cached blocks that begin the request, and how many of them nobody holds."""
        if not self.pool.enable_prefix_caching or request.prompt_logprobs_due:
            return [], 0
        if request.block_keys and request.block_keys[0] != self.pool.root_key(request.cache_salt):
            request.block_keys.clear()  # made before the pool forgot its content
        # The last token is always computed, even where its block is cached: its logits are wanted.
        count = (request.num_tokens - 1) // self.pool.block_size
        self._extend_keys(request, count)
        return self.pool.lookup(request.block_keys[1 : count + 1])

    def _extend_keys(self, request: Request, num_blocks: int) -> None:
        """Make the keys of the request's first ``num_blocks`` full blocks, where they are not made yet."""
        keys = request.block_keys
        if not keys:
            keys.append(self.pool.root_key(request.cache_salt))
        size = self.pool.block_size
        for index in range(len(keys) - 1, num_blocks):
            keys.append(self.pool.chain_key(keys[-1], request.token_span(index * size, (index + 1) * size)))


def describe(request: Request) -> str:
    """The request as error messages name it."""
    return f"request {request.request_id!r} (choice {request.choice}, {request.status.value})"


def _seat_of(request: Request) -> int:
    if request.seat is None:
        raise SchedulerError(f"{describe(request)} has no seat")
    return request.seat
