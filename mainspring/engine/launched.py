"""Steps on their way: whose rows they have, and where tokens and log-probabilities will arrive."""

from __future__ import annotations

from collections.abc import Mapping
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


@dataclass(frozen=True)
class TokenRead:
    """The tokens of one entry of the ring, a row for each of ``requests``; those in ``held`` have none there."""

    requests: tuple[Request, ...]
    entries: Download
    logprobs: Download | None
    held: frozenset[Request] = frozenset()

    def results(self) -> list[RowResult]:
        """Wait for the entry."""
        entries = self.entries.wait().tolist()
        packed = None if self.logprobs is None else self.logprobs.wait()
        results = []
        for row, (request, (token, status)) in enumerate(zip(self.requests, entries, strict=True)):
            if request not in self.held:
                logprobs = None if packed is None or request.params.logprobs is None else packed[row]
                results.append(RowResult(request, token, status, logprobs))
        return results


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
