"""Reads CUDA recordings: nodes, edges, and every address in their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mainspring.graphs.books import Book
from mainspring.graphs.cuda_nodes import GraphDriver, KernelFunction, KernelNode
from mainspring.graphs.kernel_names import has_typed_pointers, parameter_types, readable
from mainspring.graphs.recording import AddressEntry, Dependency, RecordedOperation, RungRecording, Use, address_entries
from mainspring.graphs.spans import Span, SpanMap

__all__ = ["RANKS", "CudaReader"]

RANKS = {"buffer": 4, "tensor": 3, "pool": 2, "workspace": 1, "freed": 1}
"""Which kind of owner answers first; what the driver alone knows comes last."""

_REGION = 38
"""Words that share all but this many low bits (256 GiB) with a known address look like addresses of the device."""

_UNKNOWN = Span("unknown", "unknown", 0, 0)

Words = npt.NDArray[np.uint64]

_Word = tuple[int, int, int, bool, int]
"""A word, its parameter, its offset in that, whether the parameter is a pointer, and the index of its span or -1."""

T = TypeVar("T", bound=tuple[Any, ...])


@dataclass(slots=True)
class _Node:
    """An operation before its words are looked up."""

    index: int
    kind: str
    name: str
    parent: int | None
    dependencies: tuple[Dependency, ...]
    kernel: KernelNode | None = None
    touched: Sequence[tuple[str, int, int]] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where in a kernel's parameters an address may stand: one entry for each word.

    `parameter` and `offset` [n] say where, `pointer` [n] whether the parameter is a pointer by itself; `at` [n] is the
    word's position in the parameters' bytes, each padded to 8. `padding` is what each parameter lacks to that, or None
    where none lacks any; `words` is how many there are with it.
    """

    parameter: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    pointer: npt.NDArray[np.bool_]
    at: npt.NDArray[np.int64]
    padding: tuple[bytes, ...] | None
    words: int

    @classmethod
    def of(cls, function: KernelFunction) -> _Layout:
        """The layout of a kernel: a parameter of 8 bytes is a pointer unless its name's C++ type says otherwise."""
        types = _types(function)
        rows: list[tuple[int, int, bool, int]] = []
        position = 0
        for parameter, size in enumerate(function.sizes):
            pointer = size == 8 and (types is None or types[parameter].rstrip(" const").endswith("*"))
            rows += [(parameter, 8 * word, pointer, position + word) for word in range(size // 8)]
            position += -(-size // 8)
        columns = np.array(rows, dtype=np.int64).reshape(-1, 4)
        padding = tuple(bytes(-size % 8) for size in function.sizes)
        return cls(
            columns[:, 0],
            columns[:, 1],
            columns[:, 2].astype(np.bool_),
            columns[:, 3],
            padding if any(padding) else None,
            position,
        )

    def padded(self, values: Sequence[bytes]) -> bytes:
        """The parameters' bytes, `words` times 8; zeros where the driver gave none."""
        if self.padding is not None:
            values = [value + padding for value, padding in zip(values, self.padding, strict=False)]
        return b"".join(values) or bytes(8 * self.words)


def _types(function: KernelFunction) -> tuple[str, ...] | None:
    """C++ types of the kernel's parameters; None where its name does not tell them."""
    types = parameter_types(function.symbol)
    return types if types is not None and len(types) == len(function.sizes) else None


@dataclass(frozen=True, slots=True)
class _Found:
    """Words [n] of some kernels' parameters with their parameter, offset in it, whether that is a pointer, and the
    index of their span or -1; `ends` says where each kernel's end."""

    words: Words
    parameter: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    pointer: npt.NDArray[np.bool_]
    owners: npt.NDArray[np.int64]
    ends: list[int]

    @classmethod
    def nothing(cls) -> _Found:
        """No kernels."""
        none = np.zeros(0, dtype=np.int64)
        return cls(none.astype(np.uint64), none, none, none.astype(np.bool_), none, [])

    def rows(self, which: slice | npt.NDArray[np.int64]) -> list[_Word]:
        """Some of the words as tuples."""
        columns = (self.words, self.parameter, self.offset, self.pointer, self.owners)
        return list(zip(*(column[which].tolist() for column in columns), strict=True))


@dataclass(slots=True)
class CudaReader:
    """Reads graphs of one device, keeping kernels' layouts and uses from one to the next: rungs share most of them.

    A pointer is told as "unknown" where nothing known holds it and the kernel says itself that it is a pointer (see
    `has_typed_pointers`). A library's kernel may leave garbage where another call has a pointer, or hold an address of
    the host that it never follows: such a word is counted as unresolved, as one within a struct is.

    Args:
        driver: where nodes come from.
        spans: who owns which memory, as it is now.
        bodies: graphs inside of conditional nodes, by node handle, for a driver that does not tell.
        expected: addresses that were pointers when they were recorded, and still are where nothing is there any more.
    """

    driver: GraphDriver
    spans: SpanMap
    bodies: Mapping[int, Sequence[int]] = field(default_factory=dict)
    expected: frozenset[int] = frozenset()
    found: list[Span] = field(default_factory=list)
    _layouts: dict[KernelFunction, _Layout] = field(default_factory=dict)
    _strict: dict[KernelFunction, bool] = field(default_factory=dict)
    _edges: dict[tuple[int, str], Dependency] = field(default_factory=dict)
    _tuples: dict[Any, Any] = field(default_factory=dict)
    _entries: dict[Any, AddressEntry] = field(default_factory=dict)
    _uses: dict[_Word, Use] = field(default_factory=dict)
    _places: dict[int, Span] = field(default_factory=dict)
    _asked: dict[int, Span | None] = field(default_factory=dict)
    _regions: Words | None = None

    def read(
        self,
        graph: int,
        *,
        size: int = 0,
        name: str = "",
        pool_bytes: int = 0,
        capture_seconds: float = 0.0,
        executable_bytes: int = 0,
    ) -> RungRecording:
        """One graph's recording; the numbers are passed through."""
        nodes: list[_Node] = []
        self._collect(graph, None, nodes)
        operations = tuple(self._operations(nodes))
        book = address_entries(operations, self._places, self._entries)
        return RungRecording(size, operations, book, pool_bytes, capture_seconds, executable_bytes, name)

    def book(self, graph: int) -> Book:
        """One graph's address book alone, without the operations, which takes a part of the time of `read`."""
        kernels: list[KernelNode] = []
        touched: list[tuple[str, int, int]] = []
        self._contents(graph, kernels, touched)
        found = self._find(kernels)
        spans = list(self.spans.spans)
        is_live = np.array([*(span.kind != "freed" for span in spans), False])[found.owners]  # the last is for -1
        addresses, owners, typed = [found.words[is_live]], [found.owners[is_live]], [found.pointer[is_live]]
        rest = np.flatnonzero(~is_live)
        kernel_of = np.searchsorted(found.ends, rest, side="right").tolist()
        uses = [self._use(kernels[at].function, word) for at, word in zip(kernel_of, found.rows(rest), strict=True)]
        uses += [self._touched(0, *each) for each in touched]
        known = [use for use in uses if use is not None and use.address is not None]
        places = [self._places.get(use.address, _UNKNOWN) for use in known if use.address is not None]
        addresses.append(np.array([use.address for use in known], dtype=np.uint64))
        owners.append(np.arange(len(spans), len(spans) + len(places)))
        typed.append(np.array([use.kind != "struct" for use in known], dtype=np.bool_))
        return Book.of_entries(
            np.concatenate(addresses),
            [*spans, *places],
            np.concatenate(owners),
            np.concatenate(typed),
            sum(use is None for use in uses),
        )

    def _contents(self, graph: int, kernels: list[KernelNode], touched: list[tuple[str, int, int]]) -> None:
        """Append the kernels of `graph` and of what it holds, and what its copies and fillings touch."""
        driver = self.driver
        for handle in driver.nodes(graph):
            kind = driver.kind(handle)
            if kind == "kernel":
                kernels.append(driver.kernel(handle))
            elif kind == "memcpy":
                touched += driver.memcpy(handle)
            elif kind == "memset":
                touched += driver.memset(handle)
            elif kind in ("graph", "conditional"):
                for body in self.bodies.get(handle, driver.bodies(handle, kind)[0]):
                    self._contents(body, kernels, touched)

    def _collect(self, graph: int, parent: int | None, nodes: list[_Node]) -> None:
        """Append the nodes of `graph` in an order in which each follows those that it depends on."""
        driver = self.driver
        listed, edges = driver.nodes(graph), driver.edges(graph)
        before: dict[int, list[tuple[int, str]]] = {}
        for source, target, kind in edges:
            before.setdefault(target, []).append((source, kind))
        index: dict[int, int] = {}
        for handle in _ordered(listed, edges):
            kind = driver.kind(handle)
            after = self._same(
                tuple([self._edge(index[source], edge) for source, edge in sorted(before.get(handle, ()))])
            )
            node = _Node(len(nodes), kind, kind, parent, after)
            index[handle] = node.index
            nodes.append(node)
            if kind == "kernel":
                node.kernel = driver.kernel(handle)
                node.name = readable(node.kernel.function.symbol)
            elif kind == "memcpy":
                node.touched = driver.memcpy(handle)
            elif kind == "memset":
                node.touched = driver.memset(handle)
            elif kind in ("graph", "conditional"):
                inside, node.note = driver.bodies(handle, kind)
                for body in self.bodies.get(handle, inside):
                    self._collect(body, node.index, nodes)

    def _edge(self, operation: int, kind: str) -> Dependency:
        key = (operation, kind)
        if key not in self._edges:
            self._edges[key] = Dependency(operation, kind)
        return self._edges[key]

    def _same(self, values: T) -> T:
        """An equal tuple that was seen before, if any: fewer objects, which the garbage collector need not look at."""
        same: T = self._tuples.setdefault(values, values)
        return same

    def _operations(self, nodes: Sequence[_Node]) -> Iterable[RecordedOperation]:
        """Look all words of a graph up at once, then put the operations together."""
        words = self._look_up(nodes)
        known_uses = self._uses
        for node in nodes:
            uses = [self._touched(at, *touched) for at, touched in enumerate(node.touched)]
            unresolved = 0
            kernel = node.kernel
            if kernel is not None:
                for word in next(words):
                    use = known_uses.get(word) or self._use(kernel.function, word)
                    if use is None:
                        unresolved += 1
                    else:
                        uses.append(use)
            yield RecordedOperation(
                index=node.index,
                kind=node.kind,
                name=node.name,
                symbol=kernel.function.symbol if kernel and kernel.function.symbol != node.name else None,
                grid=self._same(kernel.grid) if kernel else None,
                block=self._same(kernel.block) if kernel else None,
                shared_memory=kernel.shared_memory if kernel else None,
                parameters=kernel.function.sizes if kernel else (),
                dependencies=node.dependencies,
                uses=tuple(uses),
                unresolved=unresolved,
                parent=node.parent,
                note=node.note,
            )

    def _look_up(self, nodes: Sequence[_Node]) -> Iterator[list[_Word]]:
        """For each kernel the words in its parameters that are, or look like, addresses, in order.

        Yields:
            For each such word: the word, parameter, offset in it, whether the parameter is a pointer, and the index of
            its span or -1.
        """
        found = self._find([node.kernel for node in nodes if node.kernel is not None])
        words = found.rows(slice(None))
        for begin, end in zip([0, *found.ends], found.ends, strict=False):
            yield words[begin:end]

    def _find(self, kernels: Sequence[KernelNode]) -> _Found:
        """The words in these kernels' parameters that are, or look like, addresses, in order."""
        layouts: list[_Layout] = []
        parts: list[bytes] = []
        for kernel in kernels:
            function = kernel.function
            layout = self._layouts.get(function)
            if layout is None:
                layout = self._layouts[function] = _Layout.of(function)
            layouts.append(layout)
            parts.append(layout.padded(kernel.values))
        if not layouts:
            return _Found.nothing()
        begins = np.cumsum([0, *(layout.words for layout in layouts)])[:-1]
        counts = [len(layout.at) for layout in layouts]
        at = np.concatenate([layout.at for layout in layouts]) + np.repeat(begins, counts)
        words = np.frombuffer(b"".join(parts), dtype=np.uint64)[at]
        owners = self.spans.find_all(words)
        looks = (owners >= 0) | self._look_like_addresses(words)
        if self.expected:
            looks |= np.isin(words, np.array(list(self.expected), dtype=np.uint64))
        kept = np.flatnonzero(looks)
        return _Found(
            words[kept],
            np.concatenate([layout.parameter for layout in layouts])[kept],
            np.concatenate([layout.offset for layout in layouts])[kept],
            np.concatenate([layout.pointer for layout in layouts])[kept],
            owners[kept],
            np.searchsorted(kept, np.cumsum(counts)).tolist(),
        )

    def _look_like_addresses(self, words: Words) -> npt.NDArray[np.bool_]:
        """Whether each word lies in the same region as some known memory, or in one beside it."""
        if self._regions is None:
            ends = np.array([edge for span in self.spans.spans for edge in (span.address, span.end)], dtype=np.uint64)
            regions, one = np.unique(ends >> np.uint64(_REGION)), np.uint64(1)
            beside = np.concatenate([regions, regions + one, regions[regions > 0] - one])
            self._regions = np.unique(beside[beside > 0])
        return np.isin(words >> np.uint64(_REGION), self._regions)

    def _place(self, address: int, pointer: bool) -> Span | None:
        """The span of an address that nothing live of torch's holds, asking the driver; None where there is none.

        A freed block of torch's is live for the driver: there a pointer gets that block, and a word within a struct
        nothing, since it may well be no address.
        """
        span = self.spans.find(address)
        if span is not None:
            return span if span.kind != "freed" or pointer else None
        if address not in self._asked:
            allocation = self.driver.allocation(address)
            if allocation is None:
                self._asked[address] = None
            else:
                kind = "host" if allocation.is_host else "workspace"
                owner = "pinned host memory" if allocation.is_host else "device memory outside torch"
                found = Span(owner, kind, allocation.address, allocation.nbytes)
                self.found.append(found)
                self._asked[address] = found
        return self._asked[address]

    def _use(self, function: KernelFunction, word: _Word) -> Use | None:
        """What a word of a kernel's parameters is; None for one that only looks like an address."""
        address, parameter, offset, pointer, known = word
        span = self.spans.spans[known] if known >= 0 else None
        if span is None or span.kind == "freed":
            span = self._place(address, pointer)
        if span is None and not (pointer and (address in self.expected or self._is_strict(function))):
            return None
        use = Use(address, self._owner(address, span), parameter, offset, "pointer" if pointer else "struct")
        if span is not None:
            self._uses[word] = use
        return use

    def _touched(self, at: int, role: str, address: int, nbytes: int) -> Use:
        return Use(address, self._owner(address, self._place(address, True)), at, role=role, nbytes=nbytes)

    def _is_strict(self, function: KernelFunction) -> bool:
        if function not in self._strict:
            self._strict[function] = has_typed_pointers(function.symbol, _types(function) is not None)
        return self._strict[function]

    def _owner(self, address: int, span: Span | None) -> str:
        if span is None:
            return "unknown"
        self._places[address] = span
        return span.owner


def _ordered(nodes: Sequence[int], edges: Iterable[tuple[int, int, str]]) -> list[int]:
    """`nodes` in the driver's order, changed only where one would come before what it depends on."""
    edges = list(edges)
    place = {node: at for at, node in enumerate(nodes)}
    if all(place[source] < place[target] for source, target, _ in edges):
        return list(nodes)
    before: dict[int, set[int]] = {}
    for source, target, _ in edges:
        before.setdefault(target, set()).add(source)
    done: dict[int, None] = {}
    for node in nodes:
        stack = [node]
        while stack:
            waiting = sorted(each for each in before.get(stack[-1], ()) if each not in done)
            if stack[-1] in done or not waiting:
                done.setdefault(stack.pop())
            else:
                stack += waiting
    return list(done)
