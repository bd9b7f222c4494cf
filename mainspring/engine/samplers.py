"""The two ways a recorded step chooses tokens.

``PlainSampler`` is arg-max alone. ``FullSampler`` does everything that a request may ask of the device. A batch in
which every row is greedy and unrestricted runs the plain one, so that it does not pay for what it does not use.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mainspring.engine.seats import SeatTable
from mainspring.kernels import sampling

PLAIN, FULL = "plain", "full"


@dataclass(frozen=True)
class PlainSampler:
    """Greedy: the first of the largest logits."""

    def __call__(self, logits: torch.Tensor, seats: torch.Tensor) -> torch.Tensor:
        """See ``Sampler``; ``seats`` are not needed."""
        return sampling.greedy(logits)


@dataclass(frozen=True)
class FullSampler:
    """Temperature, min-p, top-k and top-p per row, and stop ids held back until ``min_tokens`` are there."""

    table: SeatTable

    def __call__(self, logits: torch.Tensor, seats: torch.Tensor) -> torch.Tensor:
        """See ``Sampler``. The random number depends on (seed, choice, position) alone."""
        table = self.table
        sampling.mask_stop_ids(logits, table.stop_ids[:, seats].t(), table.min_remaining[seats] > 0)
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
