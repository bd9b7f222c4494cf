"""The two ways a recorded step chooses tokens.

``PlainSampler`` is arg-max alone. ``FullSampler`` does everything that a request may ask of the device. A batch in
which every row is greedy and unrestricted runs the plain one, so that it does not pay for what it does not use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from mainspring.engine.asks import Asks
from mainspring.engine.logits_state import LogitsState
from mainspring.engine.request import Request
from mainspring.engine.request_state import needs_full_sampler
from mainspring.engine.seats import SeatTable
from mainspring.kernels import sampling

PLAIN, FULL = "plain", "full"


def variant_for(requests: Iterable[Request]) -> str:
    """The variant of the step that a batch of these requests needs."""
    return FULL if any(needs_full_sampler(request) for request in requests) else PLAIN


@dataclass(frozen=True)
class PlainSampler:
    """Greedy: the first of the largest logits."""

    def __call__(self, logits: torch.Tensor, seats: torch.Tensor) -> torch.Tensor:
        """See ``Sampler``; ``seats`` are not needed."""
        return sampling.greedy(logits)

    def adjust(self, logits: torch.Tensor, seats: torch.Tensor) -> None:
        """Nothing is changed."""

    def held(self, seats: torch.Tensor) -> torch.Tensor | None:
        """None: no row waits for the CPU."""
        return None

    def note(self, logits: torch.Tensor, seats: torch.Tensor, tokens: torch.Tensor, runs: torch.Tensor) -> None:
        """Nothing is kept."""

    def record(self, plain: torch.Tensor) -> torch.Tensor:
        """The plain record."""
        return plain


@dataclass(frozen=True)
class FullSampler:
    """Whatever requests have asked for so far: biases, penalties and masks, stop ids held back until ``min_tokens`` are
    there, then temperature, min-p, top-k and top-p per row. Log-probabilities are of the model's own logits."""

    table: SeatTable
    state: LogitsState

    def __call__(self, logits: torch.Tensor, seats: torch.Tensor) -> torch.Tensor:
        """See ``Sampler``. The random number depends on (seed, choice, position) alone."""
        table = self.table
        if self.state.active:
            # In fp32, where small changes are not lost, and beside the model's own logits, which are still needed.
            logits = logits.to(torch.float32, copy=True)
        self.adjust(logits, seats)
        return sampling.sample(
            logits,
            table.temperature[seats],
            table.top_k[seats],
            table.top_p[seats],
            table.min_p[seats],
            (table.seed_high[seats].long() << 32) | (table.seed_low[seats].long() & 0xFFFFFFFF),
            table.choices[seats],
            table.positions[seats] + 1,
        )

    def adjust(self, logits: torch.Tensor, seats: torch.Tensor) -> None:
        """See ``Sampler``."""
        table = self.table
        if self.state.active:
            self.state.adjust(logits, seats)
        sampling.mask_stop_ids(logits, table.stop_ids[:, seats].t(), table.min_remaining[seats] > 0)

    def held(self, seats: torch.Tensor) -> torch.Tensor | None:
        """The rows with Python logits processors, once there has been a request with any."""
        return self.state.asking(Asks.PROCESSORS, seats) if self.state.active & Asks.PROCESSORS else None

    def note(self, logits: torch.Tensor, seats: torch.Tensor, tokens: torch.Tensor, runs: torch.Tensor) -> None:
        """See ``Sampler``."""
        self.state.note(logits, seats, tokens, runs)

    def record(self, plain: torch.Tensor) -> torch.Tensor:
        """One with room for log-probabilities, once there has been a request for any."""
        wide = self.state.record
        return plain if wide is None else wide
