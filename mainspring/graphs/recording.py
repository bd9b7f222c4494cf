"""What was recorded, as plain data: each rung's operation list and address book, to JSON and back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mainspring.graphs.errors import GraphError
from mainspring.graphs.plain_data import make
from mainspring.graphs.spans import Span

if TYPE_CHECKING:
    from mainspring.graphs.buffers import FixedBuffers
    from mainspring.graphs.cpu_graph import CpuGraph
    from mainspring.graphs.cuda_graph import CudaGraph
    from mainspring.graphs.reading import RecordedRunner

__all__ = [
    "SCHEMA",
    "AddressEntry",
    "Dependency",
    "RecordedOperation",
    "Recording",
    "RungRecording",
    "Use",
    "address_entries",
]

SCHEMA = 1
"""Version of the JSON form; goes up when a key changes its meaning or goes away."""


@dataclass(frozen=True, slots=True)
class Dependency:
    """An edge from an earlier operation.

    Attributes:
        operation: index of the operation that comes first.
        kind: "full" (its end is waited for), or "programmatic" (it is waited for inside the kernel: PDL).
    """

    operation: int
    kind: str = "full"


@dataclass(frozen=True, slots=True)
class Use:
    """One address that an operation was recorded with.

    Attributes:
        address: in bytes; None for a packed weight, which has none.
        owner: name of what it lies in.
        parameter: position of the parameter, or of the tensor among an ATen operation's.
        offset: where in the parameter the address stands, in bytes; 0 unless the parameter is a struct.
        kind: "pointer" (the parameter is a pointer), "struct" (a word within a struct), or "opaque".
        role: "read", "write", "read_write", or "use" where a kernel's parameters do not tell.
        nbytes: bytes from the first to the last element, or None where that is not known.
        text: such as "float32[4, 64]", where it is known.
    """

    address: int | None
    owner: str
    parameter: int
    offset: int = 0
    kind: str = "pointer"
    role: str = "use"
    nbytes: int | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class RecordedOperation:
    """One entry of the operation list.

    Attributes:
        index: position in the list. Operations of a body or a child graph follow the operation that holds them.
        kind: "kernel", "memcpy", "memset", "graph" (a child graph), "conditional", "host", "empty", ... on a GPU; on a
            CPU how it is replayed: "out", "in_place", "copy", "run_and_copy",
            "prepared".
        name: readable.
        symbol: the name as the driver has it, where that differs; else None.
        grid: blocks in x, y, z, or None for what is no kernel.
        block: threads in x, y, z, or None.
        shared_memory: dynamic shared memory in bytes, or None.
        parameters: size of each kernel parameter in bytes.
        dependencies: edges from earlier operations.
        uses: every address found in the parameters.
        unresolved: words that look like device addresses but lie in nothing known, within structs or where a library's
            kernel has 8 bytes of unknown type; not in `uses`.
        parent: index of the operation whose body or child graph this one belongs to, or None.
        note: what else there is to know, such as the kind of a conditional.
    """

    index: int
    kind: str
    name: str
    symbol: str | None = None
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    shared_memory: int | None = None
    parameters: tuple[int, ...] = ()
    dependencies: tuple[Dependency, ...] = ()
    uses: tuple[Use, ...] = ()
    unresolved: int = 0
    parent: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class AddressEntry:
    """One entry of the address book.

    Attributes:
        address: in bytes; None for a packed weight.
        owner: name of the buffer in which it lies.
        kind: what the owner is, one of `mainspring.graphs.spans.KINDS`.
        offset: bytes from the owner's start, or None where the owner's extent is not known.
        operations: indices of the operations that use it, ascending.
        typed: some operation has it as a pointer parameter; False where it was only seen within structs.
        nbytes: largest extent used from this address, or None where that is not known.
    """

    address: int | None
    owner: str
    kind: str
    offset: int | None
    operations: tuple[int, ...]
    typed: bool = True
    nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class RungRecording:
    """One rung's recording.

    Attributes:
        size: rows; 0 for a graph that belongs to no ladder.
        operations: the operation list.
        addresses: the address book, ascending; packed weights come first.
        pool_bytes: bytes by which the shared pool grew for this rung.
        capture_seconds: wall time of warm-up, capture and instantiation.
        executable_bytes: device memory that the instantiated graph took; 0 on a CPU.
        name: of the runner.
    """

    size: int
    operations: tuple[RecordedOperation, ...]
    addresses: tuple[AddressEntry, ...]
    pool_bytes: int
    capture_seconds: float
    executable_bytes: int = 0
    name: str = ""

    @property
    def unresolved(self) -> int:
        """Words, of no known type, that look like device addresses but lie in nothing known."""
        return sum(operation.unresolved for operation in self.operations)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RungRecording:
        """From `as_dict`; keys that this version does not know are passed over."""
        operations = tuple(
            make(
                RecordedOperation,
                {
                    **entry,
                    "dependencies": tuple(make(Dependency, edge) for edge in entry.get("dependencies", ())),
                    "uses": tuple(make(Use, use) for use in entry.get("uses", ())),
                },
            )
            for entry in data["operations"]
        )
        addresses = tuple(make(AddressEntry, {"kind": "unknown", **entry}) for entry in data["addresses"])
        return make(cls, {**data, "operations": operations, "addresses": addresses})


@dataclass(frozen=True, slots=True)
class Recording:
    """Everything that was recorded for one or more runners, as plain data.

    Attributes:
        rungs: in the order of recording.
        device: such as "cpu" or "cuda:0".
        memory: the stretches of memory in which the addresses lie, by address.
        totals: bytes by what they are for: "pool", "buffers", and what the maker adds.
        name: what was recorded.
    """

    rungs: tuple[RungRecording, ...]
    device: str = "cpu"
    memory: tuple[Span, ...] = ()
    totals: Mapping[str, int] = field(default_factory=dict)
    name: str = ""

    @classmethod
    def of(cls, recorded: RecordedRunner | CpuGraph | CudaGraph, buffers: FixedBuffers | None = None) -> Recording:
        """What `recorded` holds: every rung of a `GraphRunner`, or one graph.

        Args:
            recorded: a runner or a graph.
            buffers: names for the memory that a single graph uses; a runner has its own.
        """
        # Imported here since they are made of what this module defines.
        from mainspring.graphs.cpu_graph import CpuGraph
        from mainspring.graphs.cuda_graph import CudaGraph
        from mainspring.graphs.reading import read_graph, read_runner

        return read_graph(recorded, buffers) if isinstance(recorded, (CpuGraph, CudaGraph)) else read_runner(recorded)

    def rung(self, size: int, name: str | None = None) -> RungRecording:
        """The recording of one rung.

        Args:
            size: its rows.
            name: of its runner, where there are several.

        Raises:
            GraphError: there is none.
        """
        for rung in self.rungs:
            if rung.size == size and name in (None, rung.name):
                return rung
        known = ", ".join(f"{rung.name}[{rung.size}]" for rung in self.rungs) or "none"
        raise GraphError(f"no recording of {name or 'a runner'} with {size} rows; there is {known}")

    def owners(self) -> Counter[str]:
        """How many address book entries there are of each kind of owner."""
        return Counter(entry.kind for rung in self.rungs for entry in rung.addresses)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, as documented in docs/graphs.md."""
        return {
            "schema": SCHEMA,
            "name": self.name,
            "device": self.device,
            "rungs": [rung.as_dict() for rung in self.rungs],
            "memory": [span.as_dict() for span in self.memory],
            "totals": dict(self.totals),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recording:
        """From `as_dict`.

        Raises:
            GraphError: `data` is of a newer schema, or is no recording.
        """
        if not isinstance(data, Mapping):
            raise GraphError(f'this is no recording: it is a {type(data).__name__}, not an object with "rungs"')
        schema = data.get("schema", SCHEMA)
        if type(schema) is not int or not 1 <= schema <= SCHEMA:
            raise GraphError(f"schema {schema!r} is not known here; this version reads recordings up to {SCHEMA}")
        try:
            rungs = tuple(RungRecording.from_dict(rung) for rung in data["rungs"])
            memory = tuple(make(Span, span) for span in data.get("memory", ()))
            return make(cls, {**data, "rungs": rungs, "memory": memory})
        except (KeyError, TypeError, AttributeError) as error:
            raise GraphError(f"this is no recording: {type(error).__name__}: {error}") from error

    def to_json(self, indent: int | None = None) -> str:
        """`as_dict` as JSON text."""
        return json.dumps(self.as_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Recording:
        """From `to_json`.

        Raises:
            GraphError: the text is no JSON, or no recording.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise GraphError(f"this is no recording: it is not JSON ({error})") from error
        return cls.from_dict(data)

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """Read what `save` wrote."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))

    @classmethod
    def merge(
        cls, recordings: Iterable[Recording], name: str = "", totals: Mapping[str, int] | None = None
    ) -> Recording:
        """Several runners' recordings on one device as one; `totals` says what theirs come to together."""
        parts = list(recordings)
        spans = {(span.address, span.nbytes, span.owner): span for part in parts for span in part.memory}
        largest: dict[str, int] = {}
        for part in parts:
            for key, value in part.totals.items():
                largest[key] = max(value, largest.get(key, 0))
        return cls(
            rungs=tuple(rung for part in parts for rung in part.rungs),
            device=parts[0].device if parts else "cpu",
            memory=tuple(spans[key] for key in sorted(spans)),
            totals=largest if totals is None else totals,
            name=name,
        )


def address_entries(
    operations: Sequence[RecordedOperation],
    places: Mapping[int, Span],
    shared: dict[Any, AddressEntry] | None = None,
) -> tuple[AddressEntry, ...]:
    """The address book of `operations`.

    Args:
        operations: the operation list.
        places: in which span each address lies; the same for every call with the same `shared`.
        shared: entries made so far, of which equal ones are used again: most are the same on every rung.
    """
    shared = {} if shared is None else shared
    users: dict[tuple[int | None, str], list[int]] = {}
    extents: dict[tuple[int | None, str], int] = {}
    typed: set[tuple[int | None, str]] = set()
    users_of: dict[int, list[int]] = {}  # by identity: a reader shares a use among the operations that have it
    for operation in operations:
        index = operation.index
        for use in operation.uses:
            indices = users_of.get(id(use))
            if indices is None:
                key = (use.address, use.owner)
                indices = users_of[id(use)] = users.setdefault(key, [])
                if use.nbytes is not None:
                    extents[key] = max(use.nbytes, extents.get(key, 0))
                if use.kind != "struct":
                    typed.add(key)
            if not indices or indices[-1] != index:
                indices.append(index)
    book = []
    for address, owner in sorted(users, key=lambda key: (-1 if key[0] is None else key[0], key[1])):
        key = (address, owner)
        used, is_typed, nbytes = tuple(users[key]), key in typed, extents.get(key)
        same = (address, owner, used, is_typed, nbytes)
        entry = shared.get(same)
        if entry is None:
            span = None if address is None else places.get(address)
            kind = "opaque" if address is None else "unknown" if span is None else span.kind
            offset = 0 if address is None else None if span is None else address - span.address
            entry = shared[same] = AddressEntry(address, owner, kind, offset, used, is_typed, nbytes)
        book.append(entry)
    return tuple(book)


def _plain(value: Any) -> Any:
    """Tuples as lists, so that what is written and what is read compare equal."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
