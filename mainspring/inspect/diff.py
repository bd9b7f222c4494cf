"""What differs between two rungs, or between the rungs of two recordings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from typing import Any

from mainspring.graphs import RecordedOperation, Recording, RungRecording
from mainspring.inspect.layers import pattern_of

__all__ = ["Change", "ChangeGroup", "RungDiff", "compare_recordings", "compare_rungs"]

_NUMBERED = re.compile(r" #\d+$")


@dataclass(frozen=True, slots=True)
class Change:
    """One operation that differs.

    Attributes:
        what: "added", "removed" or "changed".
        before: index in the first rung, or None where it was added.
        after: index in the second, or None where it was removed.
        name: of the operation.
        fields: what changed: name of the field, and both values as text.
    """

    what: str
    before: int | None
    after: int | None
    name: str
    fields: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ChangeGroup:
    """Changes that are the same but for the layer in which they are."""

    what: str
    name: str
    fields: tuple[tuple[str, str, str], ...]
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class RungDiff:
    """What differs between two rungs.

    Attributes:
        before: label of the first, such as "decode.plain[1]".
        after: label of the second.
        same: operations that are equal in kind, name, grid, block, shared memory, parameters and owners.
        changes: those that are not, in order.
        owners_added: owners in whose memory only the second has an address.
        owners_removed: owners in whose memory only the first has one.
        numbers: figures that differ: name, and both values.
    """

    before: str
    after: str
    same: int
    changes: tuple[Change, ...]
    owners_added: tuple[str, ...]
    owners_removed: tuple[str, ...]
    numbers: tuple[tuple[str, float, float], ...]

    @property
    def equal(self) -> bool:
        """Whether operations and owners are the same; figures, such as seconds, may differ."""
        return not (self.changes or self.owners_added or self.owners_removed)

    def groups(self) -> list[ChangeGroup]:
        """Changes put together that are the same but for the layer, in the order of the first of each."""
        found: dict[tuple[str, str, tuple[tuple[str, str, str], ...]], list[Change]] = {}
        for change in self.changes:
            fields = tuple((name, _by_pattern(old), _by_pattern(new)) for name, old, new in change.fields)
            found.setdefault((change.what, change.name, fields), []).append(change)
        return [ChangeGroup(what, name, told, tuple(each)) for (what, name, told), each in found.items()]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def compare_rungs(a: RungRecording, b: RungRecording) -> RungDiff:
    """What differs between two rungs. Operations are matched by kind and name, in order; addresses do not count."""
    changes: list[Change] = []
    same = 0
    for one, other in _matched(a.operations, b.operations):
        if one is None or other is None:
            there = one or other
            if there is not None:
                what = "added" if one is None else "removed"
                indices = [None if each is None else each.index for each in (one, other)]
                changes.append(Change(what, indices[0], indices[1], there.name))
            continue
        fields = tuple(_changed_fields(one, other, (a.size, b.size)))
        same += not fields
        if fields:
            changes.append(Change("changed", one.index, other.index, one.name, fields))
    owners_a, owners_b = {_owner(each.owner) for each in a.addresses}, {_owner(each.owner) for each in b.addresses}
    numbers = (
        ("operations", len(a.operations), len(b.operations)),
        ("addresses", len(a.addresses), len(b.addresses)),
        ("words that look like addresses", a.unresolved, b.unresolved),
        ("pool bytes", a.pool_bytes, b.pool_bytes),
        ("executable bytes", a.executable_bytes, b.executable_bytes),
        ("capture seconds", round(a.capture_seconds, 6), round(b.capture_seconds, 6)),
    )
    return RungDiff(
        label(a),
        label(b),
        same,
        tuple(changes),
        tuple(sorted(owners_b - owners_a)),
        tuple(sorted(owners_a - owners_b)),
        tuple(each for each in numbers if each[1] != each[2]),
    )


def compare_recordings(a: Recording, b: Recording) -> tuple[list[RungDiff], list[str], list[str]]:
    """The rungs that both have, compared, and the labels of those that only the first, or only the second, has."""
    ours, theirs = {label(rung): rung for rung in a.rungs}, {label(rung): rung for rung in b.rungs}
    both = [compare_rungs(rung, theirs[name]) for name, rung in ours.items() if name in theirs]
    return both, [name for name in ours if name not in theirs], [name for name in theirs if name not in ours]


def label(rung: RungRecording) -> str:
    """Such as "decode.plain[8]"."""
    return f"{rung.name or 'graph'}[{rung.size}]"


Pair = tuple[RecordedOperation | None, RecordedOperation | None]


def _matched(a: Sequence[RecordedOperation], b: Sequence[RecordedOperation]) -> Iterator[Pair]:
    keys = [[(each.kind, each.name) for each in listed] for listed in (a, b)]
    if keys[0] == keys[1]:
        yield from zip(a, b, strict=True)
        return
    for tag, a0, a1, b0, b1 in SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_opcodes():
        if tag == "equal":
            yield from zip(a[a0:a1], b[b0:b1], strict=True)
        else:
            yield from ((each, None) for each in a[a0:a1])
            yield from ((None, each) for each in b[b0:b1])


def _changed_fields(
    a: RecordedOperation, b: RecordedOperation, sizes: tuple[int, int]
) -> Iterator[tuple[str, str, str]]:
    for name in ("grid", "block", "shared_memory", "parameters", "note"):
        old, new = getattr(a, name), getattr(b, name)
        if old != new:
            yield name.replace("_", " "), _text(old), _text(new)
    pairs = (
        ("owners", _owners(a), _owners(b)),
        ("shapes", _shapes(a, sizes[0]), _shapes(b, sizes[1])),
        ("waits for", _waits(a), _waits(b)),
    )
    for title, old, new in pairs:
        if old == new:
            continue
        if len(old) == len(new):  # only those that differ
            both = dict.fromkeys((x, y) for x, y in zip(old, new, strict=True) if x != y)
            old, new = [x for x, _ in both], [y for _, y in both]
        yield title, "; ".join(old) or "none", "; ".join(new) or "none"


def _owners(operation: RecordedOperation) -> list[str]:
    return list(dict.fromkeys(_owner(use.owner) for use in operation.uses))


def _shapes(operation: RecordedOperation, size: int) -> list[str]:
    """Shapes, with "rows" for a first dimension that is the rung's size: that one is meant to differ."""
    return [re.sub(rf"\[{size}(?=[,\]])", "[rows", use.text) for use in operation.uses if use.text]


def _waits(operation: RecordedOperation) -> list[str]:
    """Kinds of the edges to it, since indices shift where something is added before."""
    return sorted(edge.kind for edge in operation.dependencies)


def _owner(name: str) -> str:
    """Without the number that tells unnamed owners apart, which another recording may count differently."""
    return _NUMBERED.sub("", name)


def _text(value: object) -> str:
    return " x ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _by_pattern(text: str) -> str:
    return "; ".join(pattern_of(part) for part in text.split("; "))
