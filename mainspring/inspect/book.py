"""The address book by owner, and the memory in which owners lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mainspring.graphs import Recording, Span
from mainspring.inspect.layers import pattern_of

__all__ = ["Owner", "OwnerGroup", "Region", "group_owners", "memory_class", "owners", "regions"]

GAP = 4 << 20
"""Bytes of unused addresses that part two regions of the memory map."""

CLASSES = {
    "weights": "weights and constants",
    "kv": "KV cache",
    "buffers": "fixed buffers",
    "pool": "graph pool",
    "other": "unnamed tensors, workspaces, host memory",
    "bad": "freed or unknown",
}
"""What the memory map tells apart."""


@dataclass(frozen=True, slots=True)
class Owner:
    """What a recording knows of one owner.

    Attributes:
        name: of the owner.
        kind: one of `mainspring.graphs.spans.KINDS`.
        address: where it begins, or None.
        nbytes: its length, or None where that is not known.
        addresses: different addresses in it that are recorded.
        operations: of the rung with most rows of each runner, those that use it.
        rungs: recordings in which it is used.
        typed: some operation has it as a pointer parameter; False where it was only seen within structs.
    """

    name: str
    kind: str
    address: int | None
    nbytes: int | None
    addresses: int
    operations: int
    rungs: int
    typed: bool


@dataclass(frozen=True, slots=True)
class OwnerGroup:
    """Owners whose names differ only in the number of the layer."""

    pattern: str
    owners: tuple[Owner, ...]

    @property
    def kind(self) -> str:
        """Of the first; they are alike."""
        return self.owners[0].kind

    @property
    def nbytes(self) -> int | None:
        """Of all together, or None where some are not known."""
        known = [owner.nbytes for owner in self.owners if owner.nbytes is not None]
        return sum(known) if len(known) == len(self.owners) else None

    @property
    def addresses(self) -> int:
        """Different addresses in all."""
        return sum(owner.addresses for owner in self.owners)

    @property
    def operations(self) -> int:
        """Uses by operations, in all."""
        return sum(owner.operations for owner in self.owners)

    @property
    def typed(self) -> bool:
        """Some operation has one of them as a pointer parameter."""
        return any(owner.typed for owner in self.owners)


@dataclass(frozen=True, slots=True)
class Region:
    """A stretch of addresses with less than `GAP` bytes unused between its spans, which are by address."""

    start: int
    end: int
    spans: tuple[Span, ...]


def owners(recording: Recording) -> list[Owner]:
    """Everybody in whose memory a recorded address lies, the largest first."""
    spans: dict[str, list[Span]] = {}
    for span in recording.memory:
        spans.setdefault(span.owner, []).append(span)
    tops: dict[str, int] = {}
    for rung in recording.rungs:
        tops[rung.name] = max(rung.size, tops.get(rung.name, 0))
    kinds: dict[str, str] = {}
    addresses: dict[str, set[int | None]] = {}
    rungs: dict[str, int] = {}
    operations: dict[str, set[tuple[str, int]]] = {}
    typed: set[str] = set()
    for rung in recording.rungs:
        for name in {entry.owner for entry in rung.addresses}:
            rungs[name] = rungs.get(name, 0) + 1
        for entry in rung.addresses:
            kinds.setdefault(entry.owner, entry.kind)
            addresses.setdefault(entry.owner, set()).add(entry.address)
            users = operations.setdefault(entry.owner, set())
            if rung.size == tops[rung.name]:
                users.update((rung.name, index) for index in entry.operations)
            if entry.typed:
                typed.add(entry.owner)
    found = []
    for name, kind in kinds.items():
        own = spans.get(name, [])
        found.append(
            Owner(
                name=name,
                kind=kind,
                address=min((span.address for span in own), default=None),
                nbytes=sum(span.nbytes for span in own) if own else None,
                addresses=len(addresses[name]),
                operations=len(operations[name]),
                rungs=rungs[name],
                typed=name in typed,
            )
        )
    return sorted(found, key=lambda owner: (-(owner.nbytes or 0), owner.kind, owner.name))


def group_owners(listed: Sequence[Owner]) -> list[OwnerGroup]:
    """Put owners together whose names differ only in the layer's number; in the order of the largest group."""
    groups: dict[tuple[str, str], list[Owner]] = {}
    for owner in listed:
        groups.setdefault((pattern_of(owner.name), owner.kind), []).append(owner)
    found = []
    for (pattern, _), members in groups.items():
        ordered = sorted(members, key=lambda owner: [int(p) if p.isdecimal() else p for p in _parts(owner.name)])
        found.append(OwnerGroup(members[0].name if len(members) == 1 else pattern, tuple(ordered)))
    return sorted(found, key=lambda group: (-(group.nbytes or 0), group.kind, group.pattern))


def _parts(name: str) -> list[str]:
    """The name in parts that can be compared: numbers stand at the same places in all names of a pattern."""
    return name.split(".")


def regions(memory: Sequence[Span]) -> list[Region]:
    """Spans that lie near each other, by address."""
    found: list[Region] = []
    for span in sorted(memory, key=lambda each: (each.address, -each.nbytes, each.owner)):
        if found and span.address - found[-1].end < GAP:
            last = found[-1]
            found[-1] = Region(last.start, max(last.end, span.end), (*last.spans, span))
        else:
            found.append(Region(span.address, span.end, (span,)))
    return found


def memory_class(owner: str, kind: str) -> str:
    """Which of `CLASSES` an owner is shown as."""
    if kind in ("freed", "unknown"):
        return "bad"
    if kind == "pool":
        return "pool"
    if owner == "kv_cache":
        return "kv"
    if kind == "opaque" or owner.endswith((".weight", ".bias")) or owner == "cos_sin":
        return "weights"
    return "buffers" if kind == "buffer" else "other"
