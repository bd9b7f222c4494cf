"""What is kept of a rung's address book: where each address was, whose it was, and of which kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mainspring.graphs.recording import RungRecording
from mainspring.graphs.spans import Span

__all__ = ["Book"]


@dataclass(frozen=True, slots=True)
class Book:
    """What is kept of a rung's address book: arrays, since Python objects by the thousand slow the collector down.

    `addresses` [n] uint64 without packed weights; `owners` [n] are indices into `names`; `kinds` [n] into `kind_names`;
    `typed` [n] says which are pointers by themselves, not only words within structs.
    """

    addresses: npt.NDArray[np.uint64]
    owners: npt.NDArray[np.int32]
    kinds: npt.NDArray[np.int8]
    typed: npt.NDArray[np.bool_]
    names: tuple[str, ...]
    kind_names: tuple[str, ...]
    buffers: tuple[str, ...]
    pointers: int
    structs: int
    unresolved: int

    @classmethod
    def of(cls, rung: RungRecording) -> Book:
        """The book of a rung that was read as a whole."""
        entries = [entry for entry in rung.addresses if entry.address is not None]
        names: dict[str, int] = {}
        kinds: dict[str, int] = {}
        named = [entry.owner for entry in rung.addresses if entry.kind in ("buffer", "opaque")]
        pointers = sum(entry.typed for entry in entries)
        return cls(
            np.array([entry.address for entry in entries], dtype=np.uint64),
            np.array([names.setdefault(entry.owner, len(names)) for entry in entries], dtype=np.int32),
            np.array([kinds.setdefault(entry.kind, len(kinds)) for entry in entries], dtype=np.int8),
            np.array([entry.typed for entry in entries], dtype=np.bool_),
            tuple(names),
            tuple(kinds),
            tuple(dict.fromkeys(named)),
            pointers,
            len(entries) - pointers,
            rung.unresolved,
        )

    @classmethod
    def of_entries(
        cls,
        addresses: npt.NDArray[np.uint64],
        spans: Sequence[Span],
        owners: npt.NDArray[np.int64],
        typed: npt.NDArray[np.bool_],
        unresolved: int,
    ) -> Book:
        """The book of a rung of which only the addresses were read.

        Args:
            addresses: [n], in any order; one that is there more often becomes one entry, typed if one of them is.
            spans: who may own them.
            owners: [n], indices into `spans`; those of one address are the same.
            typed: [n], whether each is a pointer by itself.
            unresolved: words that only look like addresses.
        """
        unique, first, inverse = np.unique(addresses, return_index=True, return_inverse=True)
        is_typed = np.bincount(inverse, weights=typed, minlength=len(unique)) > 0
        used = owners[first]
        names: dict[str, int] = {}
        kinds: dict[str, int] = {}
        name_of, kind_of = np.zeros(len(spans), dtype=np.int32), np.zeros(len(spans), dtype=np.int8)
        for at in dict.fromkeys(used.tolist()):
            name_of[at] = names.setdefault(spans[at].owner, len(names))
            kind_of[at] = kinds.setdefault(spans[at].kind, len(kinds))
        pointers = int(is_typed.sum())
        return cls(
            unique,
            name_of[used],
            kind_of[used],
            is_typed,
            tuple(names),
            tuple(kinds),
            tuple(dict.fromkeys(spans[at].owner for at in used.tolist() if spans[at].kind == "buffer")),
            pointers,
            len(unique) - pointers,
            unresolved,
        )

    def is_kind(self, *kinds: str) -> npt.NDArray[np.bool_]:
        """Which entries are of one of these kinds; [n] bool."""
        which = [index for index, kind in enumerate(self.kind_names) if kind in kinds]
        found: npt.NDArray[np.bool_] = np.isin(self.kinds, which)
        return found

    def is_owner(self, name: str) -> npt.NDArray[np.bool_]:
        """Which entries lie in what has this name; [n] bool."""
        return np.equal(self.owners, self.names.index(name) if name in self.names else -1)
