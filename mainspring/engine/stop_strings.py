"""Finding stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StopMatch:
    """A stop string that is complete: which one, and where in the piece fed last it ends (in characters)."""

    stop: str
    end: int


class StopMatcher:
    """Watches a text, character by character, for the first of several strings to become complete.

    The first is the one that ends earliest; of two that end at the same character, the longer. So the answer
    depends on the text alone, never on how it was cut into pieces. Each string is followed by its
    Knuth-Morris-Pratt automaton, hence one step a character, and no look back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)

    @property
    def held(self) -> int:
        """How many of the last characters may be the beginning of a stop string."""
        return max(self._matched, default=0)

    def feed(self, piece: str, counts: bool = True) -> StopMatch | None:
        """Take in the next piece of the text; the first stop string that becomes complete in it, or None.

        With ``counts`` False a string that becomes complete in this piece is passed over; one that begins
        in it may still be completed by a later piece. What follows a match in the same piece is not looked
        at.
        """
        if not self._stops:
            return None
        for end, character in enumerate(piece, start=1):
            found = self._step(character)
            if found is not None and counts:
                return StopMatch(found, end)
        return None

    def _step(self, character: str) -> str | None:
        found = None
        for index, stop in enumerate(self._stops):
            borders = self._borders[index]
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                found = found or stop
                matched = borders[matched - 1]
            self._matched[index] = matched
        return found


def _borders(stop: str) -> list[int]:
    """For each prefix of ``stop``, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = borders[length - 1]
        if stop[index] == stop[length]:
            length += 1
        borders[index] = length
    return borders
