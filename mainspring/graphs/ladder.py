"""The ordered list of batch sizes that are recorded, and which of them serves a batch."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Iterable, Iterator

from mainspring.graphs.errors import LadderError

__all__ = ["Ladder"]


def _as_size(value: object, what: str) -> int:
    """`value` as a positive int; bool, float and text are refused."""
    if isinstance(value, bool):
        raise LadderError(f"{what} {value!r} is not an integer; give sizes as whole numbers >= 1")
    try:
        size = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise LadderError(f"{what} {value!r} is not an integer; give sizes as whole numbers >= 1") from None
    if size < 1:
        raise LadderError(f"{what} {size} < 1; give sizes as whole numbers >= 1")
    return size


class Ladder:
    """Batch sizes ("rungs") to record, ascending and without duplicates.

    A batch of `n` rows runs on the smallest rung that is >= `n`, padded up to it.

    Args:
        sizes: the rungs in any order; each a whole number >= 1. Text is refused.

    Raises:
        LadderError: `sizes` is empty or text, or holds a zero, negative or non-integer size.
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        if isinstance(sizes, (str, bytes, bytearray)):
            raise LadderError(f"the ladder is {sizes!r}, which is text; give a list of whole numbers >= 1")
        self._sizes = tuple(sorted({_as_size(size, "ladder size") for size in sizes}))
        if not self._sizes:
            raise LadderError("the ladder is empty; give at least one batch size >= 1")

    @classmethod
    def default(cls, max_size: int) -> Ladder:
        """The ladder 1, 2, 4, 8, by 8 to 256, by 16 to 512, then a stride that doubles with each doubling.

        It is cut to `max_size`, which is always a rung.

        Raises:
            LadderError: `max_size` is not a whole number >= 1.
        """
        top = _as_size(max_size, "max_size")
        sizes = [1, 2, 4]
        size = 8
        while size < top:
            sizes.append(size)
            size += 8 if size < 256 else 16 << ((size // 256).bit_length() - 1)
        return cls([rung for rung in sizes if rung < top] + [top])

    def cut_to(self, max_size: int) -> Ladder:
        """This ladder without rungs above `max_size`; where some were dropped, `max_size` becomes the top."""
        top = _as_size(max_size, "max_size")
        return self if self.top <= top else Ladder([rung for rung in self._sizes if rung < top] + [top])

    @property
    def sizes(self) -> tuple[int, ...]:
        """The rungs, ascending."""
        return self._sizes

    @property
    def top(self) -> int:
        """The largest rung."""
        return self._sizes[-1]

    def rung_for(self, rows: int) -> int:
        """The smallest rung >= `rows`.

        Raises:
            LadderError: `rows` is below 1, not an integer, or above the top rung.
        """
        rows = _as_size(rows, "number of rows")
        if rows > self.top:
            raise LadderError(f"{rows} rows > top rung {self.top}; split the batch (Ladder.split) or add a rung")
        return self._sizes[bisect_left(self._sizes, rows)]

    def split(self, rows: int) -> list[int]:
        """Rows of each replay that together serve `rows`: the top rung as often as it fits, then the rest.

        Raises:
            LadderError: `rows` is below 1 or not an integer.
        """
        full, rest = divmod(_as_size(rows, "number of rows"), self.top)
        return [self.top] * full + ([rest] if rest else [])

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[int]:
        return iter(self._sizes)

    def __contains__(self, size: object) -> bool:
        return size in self._sizes

    def __eq__(self, other: object) -> bool:
        return self._sizes == other._sizes if isinstance(other, Ladder) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._sizes)

    def __repr__(self) -> str:
        return f"Ladder({list(self._sizes)})"
