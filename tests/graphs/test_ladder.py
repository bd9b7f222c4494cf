"""Which sizes a ladder holds and which rung serves a batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring.graphs import Ladder, LadderError

SIZES = st.lists(st.integers(1, 2000), min_size=1, max_size=30)


@pytest.mark.parametrize(
    ("max_size", "expected"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (12, (1, 2, 4, 8, 12)),
        (20, (1, 2, 4, 8, 16, 20)),
        (100, (1, 2, 4, *range(8, 97, 8), 100)),
        (300, (1, 2, 4, *range(8, 256, 8), *range(256, 289, 16), 300)),
        (513, (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16), 513)),
    ],
)
def test_default_ladder_is_cut_to_its_maximum_which_is_a_rung(max_size: int, expected: tuple[int, ...]) -> None:
    assert Ladder.default(max_size).sizes == expected


def test_above_512_the_stride_doubles_with_each_doubling() -> None:
    sizes = Ladder.default(5000).sizes
    strides = {low: high - low for low, high in zip(sizes, sizes[1:], strict=False)}
    assert [strides[at] for at in (504 - 248, 496, 512, 992, 1024, 1984, 2048, 4096)] == [
        16,
        16,
        32,
        32,
        64,
        64,
        128,
        256,
    ]


@given(st.integers(1, 3000), st.data())
def test_every_batch_up_to_the_maximum_has_the_smallest_rung_that_holds_it(max_size: int, data: st.DataObject) -> None:
    ladder = Ladder.default(max_size)
    rows = data.draw(st.integers(1, max_size))
    assert ladder.top == max_size
    assert ladder.rung_for(rows) == min(size for size in ladder.sizes if size >= rows)


@given(SIZES, st.data())
def test_given_sizes_become_ascending_and_serve_the_smallest_fit(sizes: list[int], data: st.DataObject) -> None:
    ladder = Ladder(sizes)
    assert ladder.sizes == tuple(sorted(set(sizes)))
    rows = data.draw(st.integers(1, ladder.top))
    assert ladder.rung_for(rows) == min(size for size in sizes if size >= rows)


@given(SIZES, st.integers(1, 10_000))
def test_split_serves_every_row_with_as_few_replays_as_the_top_rung_allows(sizes: list[int], rows: int) -> None:
    ladder = Ladder(sizes)
    parts = ladder.split(rows)
    assert sum(parts) == rows
    assert len(parts) == -(-rows // ladder.top)
    assert all(1 <= part <= ladder.top for part in parts)


def test_split_of_ten_rows_over_a_top_of_four() -> None:
    assert Ladder([1, 2, 4]).split(10) == [4, 4, 2]


@given(SIZES, st.integers(1, 2500))
def test_cut_drops_what_is_above_and_makes_the_limit_the_top(sizes: list[int], limit: int) -> None:
    cut = Ladder(sizes).cut_to(limit)
    assert cut.top == min(max(sizes), limit)
    assert {size for size in sizes if size < cut.top} == set(cut.sizes) - {cut.top}


@pytest.mark.parametrize("sizes", [[], [0], [4, 0], [-1], [2.0], [2.5], ["4"], [None], [True], "4", b"4"])
def test_empty_zero_negative_and_non_integer_sizes_are_refused(sizes: object) -> None:
    with pytest.raises(LadderError):
        Ladder(sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("max_size", [0, -3, 1.5, "8", None])
def test_default_refuses_a_maximum_that_is_no_positive_integer(max_size: object) -> None:
    with pytest.raises(LadderError):
        Ladder.default(max_size)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [0, -1, 9, 1.0])
def test_a_batch_without_a_rung_is_an_error_that_names_it(rows: object) -> None:
    with pytest.raises(LadderError, match=str(rows)):
        Ladder([1, 8]).rung_for(rows)  # type: ignore[arg-type]
