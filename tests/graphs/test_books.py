"""The quick reading of an address book finds what the whole reading finds."""

from __future__ import annotations

import random

import pytest
from fake_cuda import FILL, MUL, SPLIT_K, FakeDriver, kernel, pointers

from mainspring.graphs.books import Book
from mainspring.graphs.cuda_nodes import Allocation
from mainspring.graphs.read_cuda import RANKS, CudaReader
from mainspring.graphs.spans import Span, SpanMap

BASE = 0x7F00_0000_0000
SPANS = [
    Span("weight", "buffer", BASE, 0x1000),
    Span("weight.half", "buffer", BASE + 0x800, 0x800),
    Span("unnamed tensor", "tensor", BASE + 0x2000, 0x1000),
    Span("graph pool", "pool", BASE + 0x10_0000, 0x1000),
    Span("graph pool", "pool", BASE + 0x20_0000, 0x1000),
    Span("torch workspace", "workspace", BASE + 0x3000, 0x1000),
    Span("freed memory", "freed", BASE + 0x4000, 0x1000),
]
OUTSIDE = Allocation(BASE + 0x9000_0000, 0x1000, is_host=False)
WORDS = [
    *(span.address + offset for span in SPANS for offset in (0, 0x40, 0xFFF)),
    OUTSIDE.address + 8,
    BASE + 0x8000_0000,  # nobody's
    0,
    7,
    1 << 62,
]


def some_graph(seed: int) -> FakeDriver:
    """Kernels of several kinds over words of every kind, copies, fillings, and graphs in graphs."""
    draw = random.Random(seed)

    def word() -> bytes:
        return pointers(draw.choice(WORDS))

    def some_kernel() -> tuple[str, object]:
        symbol = draw.choice(["gemv", MUL, SPLIT_K, FILL, "nvjet_tst_64x8"])
        if symbol == FILL:
            return "kernel", kernel(symbol, word(), word(), word())
        if symbol == "gemv":
            return "kernel", kernel(symbol, word(), word(), b"1234", word())
        return "kernel", kernel(symbol, word() + word() + word() + b"1234", b"12", word(), word())

    def some_node() -> tuple[str, object]:
        kind = draw.choice(["kernel"] * 6 + ["memcpy", "memset", "empty"])
        if kind == "kernel":
            return some_kernel()
        if kind == "memcpy":
            return kind, [("write", draw.choice(WORDS[:22]), 16), ("read", draw.choice(WORDS[:22]), 16)]
        return kind, [("write", draw.choice(WORDS[:23]), 8)] if kind == "memset" else None

    held = {node: some_node() for node in range(1, 12)}
    held[20] = ("conditional", [2])
    held[21] = ("graph", [3])
    graphs = {1: ([*range(1, 6), 20, 21], [(1, 2, "full")]), 2: ([6, 7, 8], []), 3: ([9, 10, 11], [])}
    return FakeDriver(graphs, held, [OUTSIDE])


def entries(book: Book) -> set[tuple[int, str, str, bool]]:
    columns = zip(book.addresses, book.owners, book.kinds, book.typed, strict=True)
    return {
        (int(address), book.names[owner], book.kind_names[kind], bool(typed)) for address, owner, kind, typed in columns
    }


@pytest.mark.parametrize("seed", range(40))
def test_a_book_read_alone_is_the_book_of_the_whole_reading(seed: int) -> None:
    quick, whole = (CudaReader(some_graph(seed), SpanMap(SPANS, RANKS)) for _ in range(2))
    book, expected = quick.book(1), Book.of(whole.read(1))
    assert entries(book) == entries(expected)
    assert len(book.addresses) == len(expected.addresses)
    assert set(book.buffers) == set(expected.buffers)
    assert (book.pointers, book.structs, book.unresolved) == (expected.pointers, expected.structs, expected.unresolved)
    assert sorted(book.addresses.tolist()) == book.addresses.tolist()


def test_an_empty_graph_has_an_empty_book() -> None:
    book = CudaReader(FakeDriver({1: ([], [])}, {}), SpanMap(SPANS, RANKS)).book(1)
    assert (len(book.addresses), book.pointers, book.unresolved, book.buffers) == (0, 0, 0, ())
