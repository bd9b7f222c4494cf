"""StopMatcher: the first stop string is a matter of the text, not of how it comes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mainspring.engine.stop_strings import StopMatcher

# Few letters, so that stop strings overlap themselves and each other all the time.
TEXTS = st.text("ab🌟", max_size=24)
STOPS = st.lists(st.text("ab🌟", min_size=1, max_size=5), max_size=4)


def first_stop(text: str, stops: list[str], from_end: int = 0) -> tuple[int, str] | None:
    """The specification: the earliest end after ``from_end`` characters; there, the longest stop."""
    for end in range(from_end + 1, len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            return end, max(here, key=len)
    return None


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in zip(edges, edges[1:], strict=False)]


@given(TEXTS, STOPS, st.lists(st.integers(0, 100), max_size=8))
def test_the_first_stop_is_found_wherever_the_pieces_are_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher, before = StopMatcher(stops), 0
    found = None
    for piece in pieces_of(text, cuts):
        match = matcher.feed(piece)
        if match:
            found = (before + match.end, match.stop)
            break
        before += len(piece)
    assert found == first_stop(text, stops)


@given(TEXTS, STOPS)
def test_what_is_held_is_exactly_the_longest_end_that_may_become_a_stop(text: str, stops: list[str]) -> None:
    if first_stop(text, stops):
        return
    matcher = StopMatcher(stops)
    matcher.feed(text)
    beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
    assert matcher.held == max((len(b) for b in beginnings if text.endswith(b)), default=0)


@given(TEXTS, TEXTS, STOPS)
def test_a_stop_counts_when_its_last_character_does(early: str, late: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    assert matcher.feed(early, counts=False) is None
    match = matcher.feed(late)
    found = (len(early) + match.end, match.stop) if match else None
    assert found == first_stop(early + late, stops, from_end=len(early))


def test_a_stop_that_begins_inside_a_false_start_is_found() -> None:
    matcher = StopMatcher(["aab"])
    assert matcher.feed("aaa") is None
    assert matcher.held == 2
    match = matcher.feed("b!")
    assert match is not None and (match.stop, match.end) == ("aab", 1)
