"""A recorded run on the CPU: operations over storages that have no address yet, laid out and bound later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from mainspring.graphs.buffers import extent_bytes, is_opaque
from mainspring.graphs.errors import GraphError
from mainspring.graphs.report import Operation, TensorUse

__all__ = [
    "ALIGNMENT",
    "Program",
    "RecordedOp",
    "Storage",
    "TensorRef",
    "lay_out",
    "map_structure",
    "tensors_in",
]

ALIGNMENT = 64
"""Bytes to which every intermediate is aligned, as torch's own CPU allocator does."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A view of the program's storage number `storage`; `offset` and `stride` count elements."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugate: bool = False
    negative: bool = False


@dataclass(slots=True)
class Storage:
    """Memory that the recorded run made.

    Attributes:
        nbytes: size in bytes.
        first: index of the first operation that can write it.
        last: index of the last operation that uses it.
        pinned: the memory itself where it must outlive the replay (a result), else None: it lies in the
            arena.
    """

    nbytes: int
    first: int
    last: int
    pinned: torch.UntypedStorage | None = None


@dataclass(slots=True)
class RecordedOp:
    """One operation to replay.

    Attributes:
        name: as in "aten::addmm".
        kind: "out" writes its results through out=; "copy" copies its one argument; "in_place" runs again on
            the same tensors; "run_and_copy" runs again and copies what it made into the recorded storage;
            "prepared" is made ready once by the operation's own `prepare`, which writes where it is told.
        func: what is called.
        args: arguments with `TensorRef` where a tensor of this program stands.
        kwargs: the same by name.
        results: recorded tensors for what the operation makes, by position among its outputs; None where an
            output is an argument or no tensor.
        reads: tensors that it reads.
        writes: tensors that it writes.
        constant: it copies a literal that the recording holds.
    """

    name: str
    kind: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[TensorRef | None, ...] = ()
    reads: tuple[Tensor | TensorRef, ...] = ()
    writes: tuple[Tensor | TensorRef, ...] = ()
    constant: bool = False


def map_structure(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """`value` with `leaf` applied to everything that is not a list, tuple or dict."""
    if isinstance(value, (list, tuple)):
        items = [map_structure(item, leaf) for item in value]
        if isinstance(value, tuple):
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        return items
    if isinstance(value, dict):
        return {key: map_structure(item, leaf) for key, item in value.items()}
    return leaf(value)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def lay_out(storages: Sequence[Storage]) -> tuple[list[int], int]:
    """Place storages by lifetime, best fit first, so that two that live at the same time never overlap.

    Returns:
        Byte offset of each storage (0 for pinned ones), and the bytes needed in all; both multiples of
        `ALIGNMENT`.
    """
    offsets = [0] * len(storages)
    ending: dict[int, list[int]] = {}
    free: list[tuple[int, int]] = []  # (start, size), ascending, never adjacent
    top = 0
    order = sorted((s.first, -s.nbytes, i) for i, s in enumerate(storages) if s.pinned is None and s.nbytes)
    for first, _, index in order:
        for done in sorted(step for step in ending if step < first):
            for freed in ending.pop(done):
                free = _give_back(free, offsets[freed], _aligned(storages[freed].nbytes))
        size = _aligned(storages[index].nbytes)
        fits = [(room, at) for at, (_, room) in enumerate(free) if room >= size]
        if fits:
            _, at = min(fits)
            start, room = free[at]
            free[at : at + 1] = [(start + size, room - size)] if room > size else []
        elif free and sum(free[-1]) == top:  # grow the last hole
            start = free.pop()[0]
            top = start + size
        else:
            start, top = top, top + size
        offsets[index] = start
        ending.setdefault(storages[index].last, []).append(index)
    return offsets, top


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _give_back(free: list[tuple[int, int]], start: int, size: int) -> list[tuple[int, int]]:
    """`free` with the block [start, start + size) merged in."""
    merged: list[tuple[int, int]] = []
    for hole in sorted([*free, (start, size)]):
        if merged and sum(merged[-1]) == hole[0]:
            merged[-1] = (merged[-1][0], merged[-1][1] + hole[1])
        else:
            merged.append(hole)
    return merged


@dataclass(slots=True)
class Program:
    """A recorded run: what to do, over which storages, with what result.

    Attributes:
        operations: in order.
        storages: memory that the run made.
        results: what the callable returned, with `TensorRef` for tensors made by the run.
        offsets: arena offset of each storage, in bytes.
        nbytes: arena bytes needed.
        escaped: what the run made and did not return, but somebody held when it had ended.
    """

    operations: list[RecordedOp]
    storages: list[Storage]
    results: Any = None
    offsets: list[int] = field(default_factory=list)
    nbytes: int = 0
    escaped: list[str] = field(default_factory=list)

    def plan(self) -> None:
        """Lay the storages out by lifetime."""
        self.offsets, self.nbytes = lay_out(self.storages)

    def bind(self, arena: torch.UntypedStorage) -> tuple[list[Callable[[], object]], Callable[[Any], Any]]:
        """Calls that run the program in `arena`, and a function from `TensorRef` to its tensor."""
        made: dict[int, torch.UntypedStorage] = {}
        tensors: dict[TensorRef, Tensor] = {}

        def memory(index: int) -> torch.UntypedStorage:
            if index not in made:
                storage, start = self.storages[index], self.offsets[index]
                made[index] = storage.pinned if storage.pinned is not None else arena[start : start + storage.nbytes]
            return made[index]

        def resolve(value: Any) -> Any:
            if not isinstance(value, TensorRef):
                return value
            if value not in tensors:
                tensor = torch.empty(0, dtype=value.dtype, device="cpu")
                tensor.set_(memory(value.storage), value.offset, value.shape, value.stride)
                tensor = tensor.conj() if value.conjugate else tensor
                tensors[value] = torch._neg_view(tensor) if value.negative else tensor
            return tensors[value]

        with torch.inference_mode(False), torch.no_grad():
            calls = [_bind_operation(operation, resolve) for operation in self.operations]
        return calls, resolve

    def describe(self, resolve: Callable[[Any], Any]) -> tuple[Operation, ...]:
        """The operation list with the addresses that `resolve` gives."""
        described = []
        writers: dict[int, int] = {}
        for index, operation in enumerate(self.operations):
            uses: dict[tuple[int | None, tuple[int, ...], tuple[int, ...], torch.dtype], TensorUse] = {}
            for role, values in (("read", operation.reads), ("write", operation.writes)):
                for value in values:
                    use = self._use(role, value, resolve(value), operation.constant)
                    key = (use.address, use.shape, use.stride, resolve(value).dtype)
                    if key in uses and uses[key].role != role:
                        use = replace(use, role="read_write")
                    uses[key] = use
            touched = [_memory_key(value) for value in (*operation.reads, *operation.writes)]
            after = tuple(sorted({writers[key] for key in touched if key in writers}))
            writers.update((_memory_key(value), index) for value in operation.writes)
            described.append(Operation(index, operation.name, operation.kind, tuple(uses.values()), after=after))
        return tuple(described)

    def _use(self, role: str, value: Tensor | TensorRef, tensor: Tensor, constant: bool) -> TensorUse:
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if is_opaque(tensor):
            return TensorUse(role, None, 0, shape, (), dtype, "opaque", identity=id(value))
        owner = "constant" if constant else None
        storage = tensor.untyped_storage()
        if isinstance(value, TensorRef):
            owner = "pool" if self.storages[value.storage].pinned is None else "output"
        base = (storage.data_ptr(), storage.nbytes())
        return TensorUse(role, tensor.data_ptr(), extent_bytes(tensor), shape, tensor.stride(), dtype, owner, base)


def _memory_key(value: Tensor | TensorRef) -> int:
    """What tells memory that the run made (below 0) and memory from outside apart."""
    if isinstance(value, TensorRef):
        return -1 - value.storage
    return id(value) if is_opaque(value) else value.untyped_storage()._cdata


def _bind_operation(operation: RecordedOp, resolve: Callable[[Any], Any]) -> Callable[[], object]:
    """One call with every argument in place."""
    args = tuple(map_structure(arg, resolve) for arg in operation.args)
    kwargs = {name: map_structure(arg, resolve) for name, arg in operation.kwargs.items()}
    if operation.kind == "copy":
        target, source = args
        return partial(target.copy_, source)
    if operation.kind == "prepared":
        out = tuple(resolve(result) for result in operation.results)
        run: Callable[[], object] = operation.func.prepare(*args, **kwargs, out=out or None)[0]  # type: ignore[attr-defined]
        return run
    # The packet-free builtin behind an OpOverload saves a Python frame per operation.
    func = operation.func._op if isinstance(operation.func, OpOverload) else operation.func
    call = partial(func, *args, **kwargs)
    targets = [(at, resolve(result)) for at, result in enumerate(operation.results) if result is not None]
    if operation.kind == "out" or not targets:
        return call
    if len(operation.results) == 1:
        return _one_result_copied(func, args, kwargs, targets[0][1], operation.name)
    return partial(_run_and_copy, call, targets, operation.name)


def _run_and_copy(call: Callable[[], Any], targets: list[tuple[int, Tensor]], name: str) -> None:
    """Run an operation that has no matching out=, and put what it made into the recorded storage."""
    made = call()
    outputs = (made,) if isinstance(made, Tensor) else list(_flat(made))
    for at, target in targets:
        if outputs[at].shape != target.shape:
            raise _changed_shape(name, outputs[at], target)
        target.copy_(outputs[at])


def _one_result_copied(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], target: Tensor, name: str
) -> Callable[[], None]:
    """The same for an operation that makes one tensor, as matrix products do: a call with nothing to look up."""
    shape, put = target.shape, target.copy_

    def run() -> None:
        made = func(*args, **kwargs)
        if made.shape != shape:
            raise _changed_shape(name, made, target)
        put(made)

    return run


def _changed_shape(name: str, made: Tensor, target: Tensor) -> GraphError:
    return GraphError(
        f"{name} made shape {list(made.shape)} on replay but {list(target.shape)} when recorded; a recorded "
        f"operation must give the same shape every time: pad its result to a fixed size"
    )


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    else:
        yield value
