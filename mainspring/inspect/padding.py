"""What padding to a rung wastes, for every batch size of a ladder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mainspring.graphs import Ladder, Recording

__all__ = ["RungPadding", "ladders", "padding_by_rung", "padding_waste"]


@dataclass(frozen=True, slots=True)
class RungPadding:
    """The batch sizes `first` to `size` that a rung serves, and the share of its rows that is padding then, 0 to 1."""

    size: int
    first: int
    worst: float
    mean: float


def ladders(recording: Recording) -> dict[str, tuple[int, ...]]:
    """The recorded sizes of each runner, ascending; a graph of no ladder (size 0) is left out."""
    sizes: dict[str, set[int]] = {}
    for rung in recording.rungs:
        if rung.size > 0:
            sizes.setdefault(rung.name, set()).add(rung.size)
    return {name: tuple(sorted(found)) for name, found in sizes.items()}


def padding_waste(sizes: Sequence[int]) -> list[float]:
    """For each batch size from 1 to the top rung, the share of the rung's rows that is padding, 0 to 1."""
    ladder = Ladder(sizes)
    rungs = (ladder.rung_for(rows) for rows in range(1, ladder.top + 1))
    return [(rung - rows) / rung for rows, rung in enumerate(rungs, start=1)]


def padding_by_rung(sizes: Sequence[int]) -> list[RungPadding]:
    """The same, by rung, ascending."""
    waste = padding_waste(sizes)
    found, first = [], 1
    for size in sorted(sizes):
        served = waste[first - 1 : size]
        found.append(RungPadding(size, first, max(served), sum(served) / len(served)))
        first = size + 1
    return found
