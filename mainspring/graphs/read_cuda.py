"""Reads CUDA recordings: nodes, edges, and every address in their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mainspring.graphs.cuda_nodes import GraphDriver, KernelFunction, KernelNode
from mainspring.graphs.kernel_names import parameter_types, readable
from mainspring.graphs.recording import Dependency, RecordedOperation, RungRecording, Use, address_entries
from mainspring.graphs.spans import Span, SpanMap

__all__ = ["RANKS", "CudaReader"]

RANKS = {"buffer": 4, "tensor": 3, "pool": 2, "workspace": 1, "freed": 1}
"""Which kind of owner answers first; what the driver alone knows comes last."""

_REGION = 38
"""Words that share all but this many low bits (256 GiB) with a known address look like addresses of the device."""

Words = npt.NDArray[np.uint64]


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
    word's position in the parameters' bytes, each padded to 8.
    """

    parameter: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    pointer: npt.NDArray[np.bool_]
    at: npt.NDArray[np.int64]

    @classmethod
    def of(cls, function: KernelFunction) -> _Layout:
        """The layout of a kernel: a parameter of 8 bytes is a pointer unless its name's C++ type says otherwise."""
        types = parameter_types(function.symbol)
        told = types is not None and len(types) == len(function.sizes)
        rows: list[tuple[int, int, bool, int]] = []
        position = 0
        for parameter, size in enumerate(function.sizes):
            pointer = size == 8 and (not told or types is None or types[parameter].rstrip(" const").endswith("*"))
            rows += [(parameter, 8 * word, pointer, position + word) for word in range(size // 8)]
            position += -(-size // 8)
        columns = np.array(rows, dtype=np.int64).reshape(-1, 4)
        return cls(columns[:, 0], columns[:, 1], columns[:, 2].astype(np.bool_), columns[:, 3])


@dataclass(slots=True)
class CudaReader:
    """Reads graphs of one device, keeping kernels' layouts from one to the next.

    Args:
        driver: where nodes come from.
        spans: who owns which memory, as it is now.
        bodies: graphs inside of conditional nodes, by node handle, for a driver that does not tell.
    """

    driver: GraphDriver
    spans: SpanMap
    bodies: Mapping[int, Sequence[int]] = field(default_factory=dict)
    found: list[Span] = field(default_factory=list)
    _layouts: dict[KernelFunction, _Layout] = field(default_factory=dict)
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
        places: dict[int, Span] = {}
        operations = tuple(self._operations(nodes, places))
        book = address_entries(operations, places)
        return RungRecording(size, operations, book, pool_bytes, capture_seconds, executable_bytes, name)

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
            after = tuple(Dependency(index[source], edge) for source, edge in sorted(before.get(handle, ())))
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

    def _operations(self, nodes: Sequence[_Node], places: dict[int, Span]) -> Iterable[RecordedOperation]:
        """Look all words of a graph up at once, then put the operations together."""
        words = iter(self._look_up(nodes))
        word = next(words, None)
        for node in nodes:
            uses: list[Use] = []
            unresolved = 0
            for at, (role, address, nbytes) in enumerate(node.touched):
                owner = self._owner(address, self._place(address, True), places)
                uses.append(Use(address, owner, at, role=role, nbytes=nbytes))
            while word is not None and word[0] == node.index:
                _, address, known, parameter, offset, pointer = word
                word = next(words, None)
                span = self.spans.spans[known] if known >= 0 else None
                if span is None or span.kind == "freed":
                    span = self._place(address, pointer)
                if span is None and not pointer:
                    unresolved += 1
                    continue
                owner = self._owner(address, span, places)
                uses.append(Use(address, owner, parameter, offset, "pointer" if pointer else "struct"))
            kernel = node.kernel
            yield RecordedOperation(
                index=node.index,
                kind=node.kind,
                name=node.name,
                symbol=kernel.function.symbol if kernel and kernel.function.symbol != node.name else None,
                grid=kernel.grid if kernel else None,
                block=kernel.block if kernel else None,
                shared_memory=kernel.shared_memory if kernel else None,
                parameters=kernel.function.sizes if kernel else (),
                dependencies=node.dependencies,
                uses=tuple(uses),
                unresolved=unresolved,
                parent=node.parent,
                note=node.note,
            )

    def _look_up(self, nodes: Sequence[_Node]) -> Iterable[tuple[int, int, int, int, int, bool]]:
        """The words in kernels' parameters that are, or look like, addresses, in order.

        Returns:
            For each: index of the node, the word, the index of its span or -1, parameter, offset in it, and whether the
            parameter is a pointer.
        """
        parts: list[Words] = []
        layouts: list[_Layout] = []
        indices: list[int] = []
        for node in nodes:
            if node.kernel is None:
                continue
            function = node.kernel.function
            layout = self._layouts.get(function)
            if layout is None:
                layout = self._layouts[function] = _Layout.of(function)
            padded = b"".join(value + bytes(-len(value) % 8) for value in node.kernel.values)
            whole = np.frombuffer(padded, dtype=np.uint64)
            parts.append(whole[layout.at] if len(whole) else np.zeros(len(layout.at), np.uint64))
            layouts.append(layout)
            indices.append(node.index)
        if not parts:
            return ()
        words = np.concatenate(parts)
        owners = self.spans.find_all(words)
        kept = np.flatnonzero((owners >= 0) | self._look_like_addresses(words))
        return zip(
            np.repeat(indices, [len(part) for part in parts])[kept].tolist(),
            words[kept].tolist(),
            owners[kept].tolist(),
            np.concatenate([layout.parameter for layout in layouts])[kept].tolist(),
            np.concatenate([layout.offset for layout in layouts])[kept].tolist(),
            np.concatenate([layout.pointer for layout in layouts])[kept].tolist(),
            strict=True,
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

    @staticmethod
    def _owner(address: int, span: Span | None, places: dict[int, Span]) -> str:
        if span is None:
            return "unknown"
        places[address] = span
        return span.owner


def _ordered(nodes: Sequence[int], edges: Iterable[tuple[int, int, str]]) -> list[int]:
    """`nodes` in the driver's order, changed only where one would come before what it depends on."""
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
