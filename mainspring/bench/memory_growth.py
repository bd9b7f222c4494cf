"""Tells a server's leak, which grows with every request, from its warm-up, which ends."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: Bytes by which memory may grow once the server is warm: allocators round, and keep what is in pieces.
WARM_SLACK = 32 << 20
#: Bytes by which it may grow where the run ends before the server is warm: modules, kernels compiled at first use,
#: the heaps of threads.
COLD_SLACK = 256 << 20


@dataclass(frozen=True)
class MemoryGrowth:
    """Bytes early and late in a run (medians), and by how many the second may be above the first."""

    early: int
    late: int
    slack: int

    @property
    def is_flat(self) -> bool:
        """Whether nothing leaks, as far as this run can show."""
        return self.late <= self.early + self.slack


def memory_growth(samples: Sequence[int], warm_at: int | None) -> MemoryGrowth:
    """Compare the last fifth of a run with an earlier one.

    Args:
        samples: resident bytes at regular moments of the run; at least one.
        warm_at: index of the first sample after every kind of request had been answered; None where that did not
            happen.

    The earlier fifth begins when the server is warm, and not before two fifths of the run have passed. Where that
    leaves less than two fifths, the run cannot tell warm-up from a leak: its second fifth is taken, and more growth is
    allowed.
    """
    fifth = max(len(samples) // 5, 1)
    begin = None if warm_at is None else max(warm_at, 2 * fifth)
    if begin is None or begin + 2 * fifth > len(samples):
        begin, slack = fifth, COLD_SLACK
    else:
        slack = WARM_SLACK
    early = statistics.median(samples[begin : begin + fifth] or samples)
    return MemoryGrowth(int(early), int(statistics.median(samples[-fifth:])), slack)
