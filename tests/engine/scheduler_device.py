"""A device without a model: each KV slot keeps a hash of all tokens up to and including the slot's own.

A step verifies every slot that its attention would read, so a block shared, reused or read wrongly is an
error at once. The next token is a function of that hash and the request's seed: what a request answers does
not depend on its company, and `ideal_answer` says what it must be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mainspring.engine.plan import DecodePlan, PrefillPlan, TableWrite
from mainspring.engine.request import Request

Results = list[tuple[Request, int | None]]

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

    def run_prefill(self, plan: PrefillPlan) -> Results:
        self._write_tables(plan.table_writes)
        results: Results = []
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

    def run_decode(self, requests: list[Request]) -> Results:
        results: Results = []
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

    def _write_tables(self, writes: Sequence[TableWrite]) -> None:
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
