"""Steps on their way: whose rows they have, and where tokens and log-probabilities will arrive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mainspring.engine.errors import RequestError
from mainspring.engine.request import Request
from mainspring.engine.transfer import Download


class RowResult(NamedTuple):
    """What a step did for one request; ``token`` is -1 where it did nothing.

    ``logprobs`` is the packed row ``[2 + 2 k]`` int32 of the token's log-probabilities, where the request asked.
    """

    request: Request
    token: int
    status: int
    logprobs: np.ndarray | None


def row_results(
    requests: Sequence[Request], record: np.ndarray, held: frozenset[Request] = frozenset()
) -> list[RowResult]:
    """What the ``record`` ``[rows or more, 2 or more]`` int32 of a step tells of its rows, but for those ``held``."""
    wide = record.shape[1] > 2
    results = []
    for row, (request, (token, status)) in enumerate(zip(requests, record[: len(requests), :2].tolist(), strict=True)):
        if request not in held:
            logprobs = record[row, 2:] if wide and request.params.logprobs is not None else None
            results.append(RowResult(request, token, status, logprobs))
    return results


@dataclass(frozen=True)
class TokenRead:
    """The tokens of one step's record, a row for each of ``requests``; those in ``held`` have none there."""

    requests: tuple[Request, ...]
    record: Download
    held: frozenset[Request] = frozenset()

    def results(self) -> list[RowResult]:
        """Wait for the record."""
        return row_results(self.requests, self.record.wait(), self.held)


@dataclass(frozen=True)
class PromptRead:
    """Log-probabilities of the prompt's tokens from position ``start`` on: ``[tokens, 2 + 2 k]`` int32, packed."""

    request: Request
    start: int
    packed: Download


@dataclass(frozen=True)
class LaunchedStep:
    """A step on its way.

    ``failures`` holds the requests whose Python logits processors failed; they have no result.
    """

    reads: tuple[TokenRead, ...]
    is_prefill: bool
    prompt_reads: tuple[PromptRead, ...] = ()
    failures: Mapping[Request, RequestError] = field(default_factory=dict)

    def results(self) -> list[RowResult]:
        """Wait for the step; what it did for each request."""
        return [result for read in self.reads for result in read.results()]
