"""Does every recorded address still lie in live memory of the one that it was recorded with?"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mainspring.graphs.books import Book
from mainspring.graphs.errors import StaleAddressError
from mainspring.graphs.outside import OutsideTensor, holders_by_storage
from mainspring.graphs.read_cuda import RANKS
from mainspring.graphs.reading import RecordedRunner, cuda_spans, read_books, read_graphs
from mainspring.graphs.spans import SpanMap

__all__ = ["AuditReport", "Auditor", "Finding"]

_BAD = ("freed", "unknown")


@dataclass(frozen=True, slots=True)
class Finding:
    """One owner's memory that a recording must not use any more.

    Attributes:
        what: "moved" (the owner lies elsewhere now), "freed" (nobody owns the memory any more, or somebody else does),
            "unknown" (nothing known ever held the address), or "escaped" (what the run made is held from outside,
            though the memory is the pool's: replays and other graphs use it again).
        owner: the last known owner.
        rungs: sizes of the rungs that use it.
        uses: each operation and parameter that uses it, such as "rung 4: operation 7 gemv_kernel, parameter 0".
        recorded: where it was when it was recorded, as text.
        current: what is there, or where it is, now.
        address: the first address concerned, or None for a packed weight.
    """

    what: str
    owner: str
    rungs: tuple[int, ...]
    uses: tuple[str, ...]
    recorded: str
    current: str
    address: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        used = "; ".join(self.uses[:3]) + (f"; and {len(self.uses) - 3} more" if len(self.uses) > 3 else "")
        return f"{self.what}: {self.owner!r} was recorded at {self.recorded}, now {self.current} (used by {used})"


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit found.

    Attributes:
        findings: one for each owner that is not what it was.
        rungs: recordings looked at.
        addresses: entries of their address books that are pointers.
        struct_addresses: entries that were only seen within structs.
        unresolved: words of no known type (within structs, or 8 bytes of a library's kernel) that look like device
            addresses but lay in nothing known when they were read; they are no findings, since they may well be none.
        owners: address book entries by kind of owner.
        seconds: time that it took.
    """

    findings: tuple[Finding, ...]
    rungs: int
    addresses: int
    struct_addresses: int
    unresolved: int
    owners: Mapping[str, int]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def raise_findings(self) -> None:
        """Raise what was found.

        Raises:
            StaleAddressError: for the first finding.
        """
        for finding in self.findings:
            raise StaleAddressError(finding.owner, finding.recorded, finding.current, finding.uses)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        head = (
            f"{len(self.findings)} findings in {self.rungs} rungs: {self.addresses} pointers, {self.struct_addresses} "
            f"addresses within structs, {self.unresolved} words that only look like some"
        )
        return "\n".join([head, *(f"- {finding}" for finding in self.findings)])


class _Uses:
    """Which operations use an owner or an address: read anew, each rung once, since only a finding needs to know."""

    def __init__(self, runner: RecordedRunner, books: Mapping[int, Book]) -> None:
        self._runner = runner
        self._books = books
        self._texts: dict[int, dict[str | int | None, list[str]]] = {}

    def of(self, sizes: Iterable[int], key: str | int) -> tuple[str, ...]:
        """The operations, with their parameter, of the rungs in `sizes` that use `key`, an owner or an address."""
        sizes = list(sizes)
        runner = self._runner
        missing = {size: runner.graphs[size] for size in sizes if size not in self._texts and size in runner.graphs}
        if missing:
            books = [self._books[size] for size in missing if size in self._books]
            recording = read_graphs(
                missing,
                runner.buffers,
                runner.pool,
                name=runner.name,
                device=runner.device,
                expected={address for book in books for address in book.addresses[book.typed].tolist()},
            )
            for rung in recording.rungs:
                texts = self._texts[rung.size] = {}
                for operation in rung.operations:
                    for use in operation.uses:
                        text = (
                            f"rung {rung.size}: operation {operation.index} {operation.name}, parameter {use.parameter}"
                        )
                        texts.setdefault(use.owner, []).append(text)
                        texts.setdefault(use.address, []).append(text)
        return tuple(text for size in sizes for text in self._texts.get(size, {}).get(key, ()))


class Auditor:
    """Watches over one runner's recordings.

    `take` reads what was just recorded and keeps where everything was; `audit` compares all of it, with the allocator's
    present state; `check` compares, before a replay, only what can have moved.

    Args:
        runner: whose recordings; its `graphs` and `buffers` are read anew each time.
    """

    def __init__(self, runner: RecordedRunner) -> None:
        self._runner = runner
        self._books: dict[int, Book] = {}
        self._held: tuple[list[tuple[OutsideTensor, ...]], dict[int, int]] = [], {}

    def take(self, sizes: Iterable[int]) -> None:
        """Read the address books of the rungs in `sizes` as they are now, which is right after they were recorded."""
        runner = self._runner
        graphs = {size: runner.graphs[size] for size in sizes}
        self._books.update(read_books(graphs, runner.buffers, runner.pool))

    def forget(self) -> None:
        """The recordings are gone."""
        self._books.clear()

    def check(self, size: int) -> None:
        """Before a replay: compare the named buffers and the tensors from outside that this rung uses.

        Raises:
            StaleAddressError: the first that is not what was recorded.
        """
        book = self._books.get(size)
        names = self._runner.buffers if book is None else book.buffers
        for name in names:
            if name not in self._runner.buffers:
                continue
            change = self._runner.buffers.change(name)
            if change is not None:
                raise StaleAddressError(name, *change, _Uses(self._runner, self._books).of([size], name))
        for _, outside, became in self._changed([size]):
            uses = _Uses(self._runner, self._books).of([size], outside.owner) or (f"rung {size}: {outside.operation}",)
            raise StaleAddressError(outside.owner, outside.recorded, became[1], uses)

    def audit(self, sizes: Iterable[int] | None = None) -> AuditReport:
        """Compare everything that is recorded now, or the rungs in `sizes`."""
        started = time.perf_counter()
        runner = self._runner
        sizes = [size for size in runner.graphs] if sizes is None else list(sizes)
        missing = [size for size in sizes if size not in self._books]
        if missing:
            self.take(missing)
        uses = _Uses(runner, self._books)
        findings = [*self._named_findings(sizes, uses), *self._outside_findings(sizes), *self._escaped(sizes)]
        if runner.pool.device.type == "cuda":
            told = {finding.owner for finding in findings}
            findings += [finding for finding in self._memory_findings(sizes, uses) if finding.owner not in told]
        books = [self._books[size] for size in sizes]
        owners: dict[str, int] = {}
        for book in books:
            for kind, count in zip(book.kind_names, np.bincount(book.kinds).tolist(), strict=True):
                owners[kind] = owners.get(kind, 0) + count
        return AuditReport(
            findings=tuple(findings),
            rungs=len(books),
            addresses=sum(book.pointers for book in books),
            struct_addresses=sum(book.structs for book in books),
            unresolved=sum(book.unresolved for book in books),
            owners=owners,
            seconds=time.perf_counter() - started,
        )

    def _named_findings(self, sizes: list[int], uses: _Uses) -> list[Finding]:
        users: dict[str, list[int]] = {}
        for size in sizes:
            for name in self._books[size].buffers:
                users.setdefault(name, []).append(size)
        findings = []
        for name, rungs in users.items():
            change = self._runner.buffers.change(name) if name in self._runner.buffers else _removed(name)
            if change is not None:
                what = "moved" if change[1].startswith("address") else "freed"
                used = uses.of(rungs, name)
                findings.append(Finding(what, name, tuple(rungs), used, *change, self._first(rungs, name)))
        return findings

    def _outside_findings(self, sizes: list[int]) -> list[Finding]:
        found: dict[int, Finding] = {}
        for size, outside, (what, current) in self._changed(sizes):
            known = found.get(outside.reference.cdata)
            rungs = (*known.rungs, size) if known else (size,)
            uses = (*(known.uses if known else ()), f"rung {size}: {outside.operation}")
            found[outside.reference.cdata] = Finding(
                what, outside.owner, rungs, uses, outside.recorded, current, outside.address
            )
        return list(found.values())

    def _escaped(self, sizes: list[int]) -> list[Finding]:
        return [
            Finding(
                "escaped",
                "graph pool",
                (size,),
                (f"rung {size}: {what.partition(' made by ')[2]}",),
                f"an intermediate, {what}",
                "held from outside, where no replay reaches it; return it, or copy it into a buffer from outside",
            )
            for size in sizes
            for what in self._runner.graphs[size].escaped
        ]

    def _memory_findings(self, sizes: list[int], uses: _Uses) -> list[Finding]:
        """Addresses that lie in memory which nobody owns now, or which they were recorded with from the start."""
        runner = self._runner
        spans = SpanMap(cuda_spans(runner.graphs.values(), runner.buffers, runner.pool), RANKS)
        is_freed = np.array([*(span.kind == "freed" for span in spans.spans), False])  # the last is for -1
        findings: dict[str, Finding] = {}
        for size in sizes:
            book = self._books[size]
            now = spans.find_all(book.addresses)
            freed = is_freed[now]
            ours = book.is_kind("pool", "tensor") | book.is_owner("torch workspace")
            gone = freed | ((now < 0) & ours)
            # A word that pointed into some workspace may never have been an address; tensors have entries of their own.
            bad = (gone | book.is_kind(*_BAD)) & (book.typed | ~book.is_kind("workspace"))
            for at in np.flatnonzero(bad).tolist():
                kind, owner = book.kind_names[book.kinds[at]], book.names[book.owners[at]]
                address = int(book.addresses[at])
                what = "unknown" if kind == "unknown" else "freed"
                current = "in memory that nobody owns" if gone[at] else "in memory that nobody was known to own"
                known = findings.get(owner)
                rungs = tuple(dict.fromkeys((*(known.rungs if known else ()), size)))
                used = (*(known.uses if known else ()), *uses.of([size], address))
                first = known.address if known else address
                findings[owner] = Finding(what, owner, rungs, used, f"address {first:#x}", current, first)
        return list(findings.values())

    def _changed(self, sizes: Iterable[int]) -> Iterable[tuple[int, OutsideTensor, tuple[str, str]]]:
        """The tensors from outside, without a name, that are not what they were, with the rung that uses them."""
        graphs, owner_of = self._runner.graphs, self._runner.buffers.owner_of
        held = self._holders()
        changes: dict[tuple[int, ...], tuple[str, str] | None] = {}  # rungs use the same ones
        for size in sizes:
            for outside in graphs[size].outside:
                key = outside.key
                if key not in changes:
                    named = owner_of(outside.address) is not None
                    changes[key] = None if named else outside.change(held.get(outside.reference.cdata))
                became = changes[key]
                if became is not None:
                    yield size, outside, became

    def _holders(self) -> dict[int, int]:
        """How many tensors of the recordings hold each storage, counted anew where there are other recordings."""
        listed = [graph.outside for graph in self._runner.graphs.values()]
        known, held = self._held
        if len(known) != len(listed) or any(one is not other for one, other in zip(known, listed, strict=True)):
            held = holders_by_storage(listed)
            self._held = listed, held
        return held

    def _first(self, sizes: Iterable[int], owner: str) -> int | None:
        for size in sizes:
            book = self._books[size]
            if owner in book.names:
                return int(book.addresses[np.flatnonzero(book.owners == book.names.index(owner))[0]])
        return None


def _removed(name: str) -> tuple[str, str]:
    return "a buffer of that name", f"gone: {name!r} was removed from the buffers"
