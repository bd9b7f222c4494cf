"""What a recording holds, as plain data: its operation list, its address book, and what it cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Address", "CaptureReport", "Operation", "TensorUse", "address_book"]


@dataclass(frozen=True, slots=True)
class TensorUse:
    """One tensor that an operation reads or writes.

    Attributes:
        role: "read", "write" or "read_write".
        address: of its first element, in bytes; None for an opaque tensor (packed weights), which has none.
        nbytes: bytes from its first to its last element.
        shape: sizes.
        stride: in elements.
        dtype: such as "float32".
        owner: "pool" for an intermediate in the shared arena, "output" for a result held by the graph,
            "constant" for a literal that the recording holds, "opaque", or None for memory from outside, which
            `FixedBuffers.owner_of` may name.
        base: address and bytes of the whole storage in which the tensor lies; None for an opaque tensor.
        identity: `id` of an opaque tensor, by which `FixedBuffers.recorded` knows it; else None.
    """

    role: str
    address: int | None
    nbytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    owner: str | None
    base: tuple[int, int] | None = None
    identity: int | None = None

    @property
    def text(self) -> str:
        """Such as "float32[4, 64]"."""
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Operation:
    """One entry of the operation list.

    Attributes:
        index: position in the list.
        name: such as "aten::addmm", or the kind of node of a CUDA graph.
        kind: how it is replayed: "out", "in_place", "copy", "run_and_copy", "prepared" (CPU); "kernel", "memcpy", ...
            (CUDA).
        tensors: what it reads and writes; empty for a CUDA node, whose parameters are not read here.
        handle: CUDA node handle as an integer, or None.
        after: indices of the operations that last wrote what it reads or writes (CPU).
    """

    index: int
    name: str
    kind: str
    tensors: tuple[TensorUse, ...] = ()
    handle: int | None = None
    after: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Address:
    """One entry of the address book.

    Attributes:
        address: in bytes, or None for all opaque tensors together.
        nbytes: largest extent used from this address.
        owner: as in `TensorUse`.
        operations: indices of the operations that use it, ascending.
    """

    address: int | None
    nbytes: int
    owner: str | None
    operations: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def address_book(operations: Iterable[Operation]) -> tuple[Address, ...]:
    """Every address in `operations`, ascending, with who uses it; opaque tensors come first."""
    extents: dict[tuple[int | None, str | None], int] = {}
    users: dict[tuple[int | None, str | None], list[int]] = {}
    for operation in operations:
        for use in operation.tensors:
            key = (use.address, use.owner)
            extents[key] = max(extents.get(key, 0), use.nbytes)
            indices = users.setdefault(key, [])
            if not indices or indices[-1] != operation.index:
                indices.append(operation.index)
    ordered = sorted(extents, key=lambda key: (-1 if key[0] is None else key[0], key[1] or ""))
    return tuple(Address(key[0], extents[key], key[1], tuple(users[key])) for key in ordered)


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What recording one rung took.

    Attributes:
        size: rows of the rung.
        seconds: wall time of warm-up, recording and instantiation.
        operations: length of the operation list.
        pool_bytes_added: bytes by which the shared pool grew.
        nbytes: bytes of intermediates that this graph by itself needs (CPU), or `pool_bytes_added` (CUDA).
        executable_bytes: device memory that instantiating the graph took; 0 on a CPU.
        runs: of the callable before the recorded one.
    """

    size: int
    seconds: float
    operations: int
    pool_bytes_added: int
    nbytes: int
    executable_bytes: int = 0
    runs: int = 1

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)
