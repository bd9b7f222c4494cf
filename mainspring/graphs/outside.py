"""Memory that a recording uses but does not own: is it still what it was, and does anyone still hold it?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mainspring.graphs.buffers import holders, is_opaque
from mainspring.graphs.cpu_program import Program, tensors_in
from mainspring.graphs.cpu_rules import written_tensors
from mainspring.graphs.dispatch import DispatchMode
from mainspring.graphs.spans import Span

__all__ = ["OutsideObserver", "OutsideTensor", "holders_by_storage", "outside_of", "outside_spans"]


_GIVEN_BACK = "given back: nobody holds it, and its memory may be another tensor's by now"
_LET_GO = "let go: only the recording holds it, and on a GPU its memory may be another tensor's by now"


@dataclass(slots=True)
class OutsideTensor:
    """One storage from outside, known by a reference that does not keep it.

    Attributes:
        address: where it began when it was recorded.
        nbytes: its size then.
        text: the tensor through which it was first used, such as "float32[4, 64]".
        operation: the operation that used it first.
        reference: to the storage; does not hold it.
        held: how many tensors of the recording hold it; 0 on a GPU, where a recording holds nothing from outside.
        written: an operation declares that it writes it.
    """

    address: int
    nbytes: int
    text: str
    operation: str
    reference: Any
    held: int = 0
    written: bool = False

    @classmethod
    def of(cls, tensor: Tensor, operation: str, held: int = 0, written: bool = False) -> OutsideTensor:
        """The storage of `tensor` as it is now."""
        storage = tensor.untyped_storage()
        text = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        return cls(storage.data_ptr(), storage.nbytes(), text, operation, _weakly(storage), held, written)

    @property
    def owner(self) -> str:
        """What it is called in the address book."""
        return f"unnamed tensor {self.text}"

    @property
    def key(self) -> tuple[int, int, int, int]:
        """The same for what `change` answers alike: the storage, where it was, its size, and how many hold it."""
        return self.reference.cdata, self.address, self.nbytes, self.held

    @property
    def recorded(self) -> str:
        """Where it was, as text."""
        return f"address {self.address:#x}, {self.nbytes} bytes"

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, or None where nobody holds it."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.reference.cdata)
        return found

    def change(self, held: int | None = None) -> tuple[str, str] | None:
        """What became of it: "freed" or "moved", and where it is now; None while all is well.

        Args:
            held: how many tensors of recordings hold it, where that is more than this one's.
        """
        identity: int = self.reference.cdata
        if self.reference.expired():
            return "freed", _GIVEN_BACK
        if self.held and holders(identity) <= (self.held if held is None else held):
            return (
                "freed",
                _LET_GO,
            )
        storage = self.storage()
        if storage is None:
            return "freed", _GIVEN_BACK
        if (storage.data_ptr(), storage.nbytes()) != (self.address, self.nbytes):
            return "moved", f"address {storage.data_ptr():#x}, {storage.nbytes()} bytes"
        return None


def _weakly(storage: torch.UntypedStorage) -> Any:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _identity(tensor: Tensor) -> int | None:
    """Of the storage of `tensor`; None for one that has none, such as a packed weight."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def _flat(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among `values` and within them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple, dict)):
            found.extend(tensors_in(value))
    return found


@cache
def _name(func: Any) -> str:
    return str(func)


@cache
def _may_draw(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


class OutsideObserver(DispatchMode):  # type: ignore[no-untyped-call]
    """Notes the storages that a run takes from outside, by references that do not hold them.

    What is handed to a kernel behind the dispatcher, within a custom operation, is not seen.

    Attributes:
        seen: what it noted, by the storage's identity.
        draws: the first operation that may draw from a random generator, or "".
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, OutsideTensor] = {}
        self.draws = ""
        self._made: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note the arguments that are from outside, run the operation, and note what it made."""
        kwargs = kwargs or {}
        if not self.draws and _may_draw(func):
            self.draws = str(func)
        seen, made = self.seen, self._made
        for tensor in _flat((*args, *kwargs.values()) if kwargs else args):
            identity = _identity(tensor)
            if identity in seen or identity is None:
                continue
            earlier = made.get(identity)
            if earlier is not None and not earlier.expired():
                continue
            if tensor.device.type != "meta" and tensor.untyped_storage().nbytes():
                seen[identity] = OutsideTensor.of(tensor, _name(func))
        for tensor in written_tensors(func, args, kwargs):
            outside = seen.get(_identity(tensor) or 0)
            if outside is not None:
                outside.written = True
        result = func(*args, **kwargs)
        for tensor in (result,) if isinstance(result, Tensor) else _flat((result,)):
            identity = _identity(tensor)
            if identity is not None and identity not in seen and identity not in made:
                made[identity] = _weakly(tensor.untyped_storage())
        return result

    def found(self) -> list[OutsideTensor]:
        """What the run took from outside and somebody still holds."""
        return [outside for outside in self.seen.values() if not outside.reference.expired()]


def outside_of(program: Program) -> list[OutsideTensor]:
    """The storages that a CPU recording uses and did not make, in the order of their first use."""
    holders: dict[int, dict[int, tuple[Tensor, str]]] = {}
    for operation in program.operations:
        if operation.constant:
            continue  # what it reads is a literal of the recording's own
        for tensor in tensors_in([operation.args, operation.kwargs, list(operation.reads), list(operation.writes)]):
            if not is_opaque(tensor) and tensor.untyped_storage().nbytes():
                by_tensor = holders.setdefault(tensor.untyped_storage()._cdata, {})
                by_tensor.setdefault(id(tensor), (tensor, operation.name))
    for tensor in tensors_in(program.results):
        if not is_opaque(tensor) and tensor.untyped_storage()._cdata in holders:
            holders[tensor.untyped_storage()._cdata][id(tensor)] = (tensor, "the result")
    written = {
        tensor.untyped_storage()._cdata
        for operation in program.operations
        for tensor in tensors_in(list(operation.writes))
        if not is_opaque(tensor)
    }
    return [
        OutsideTensor.of(*next(iter(by_tensor.values())), len(by_tensor), identity in written)
        for identity, by_tensor in holders.items()
    ]


def outside_spans(tensors: Iterable[OutsideTensor]) -> list[Span]:
    """Spans of the storages, each once."""
    counts: dict[str, int] = {}
    spans: dict[tuple[int, int], Span] = {}
    for outside in tensors:
        key = (outside.address, outside.nbytes)
        if key not in spans and outside.nbytes:
            counts[outside.owner] = counts.get(outside.owner, 0) + 1
            number = counts[outside.owner]
            owner = outside.owner if number == 1 else f"{outside.owner} #{number}"
            spans[key] = Span(owner, "tensor", *key)
    return list(spans.values())


def holders_by_storage(graphs: Iterable[Sequence[OutsideTensor]]) -> dict[int, int]:
    """How many tensors of these recordings hold each storage, by its identity."""
    held: dict[int, int] = {}
    for graph in graphs:
        for outside in graph:
            held[outside.reference.cdata] = held.get(outside.reference.cdata, 0) + outside.held
    return held
