"""Named tensors whose addresses a recording may hold, and the check that they have not moved."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from mainspring.graphs.errors import GraphError, StaleAddressError

__all__ = ["FixedBuffers", "Signature", "extent_bytes", "holders", "is_opaque"]


def is_opaque(tensor: Tensor) -> bool:
    """Whether `tensor` has no address of its own, such as a weight in oneDNN's packed layout."""
    return tensor.layout != torch.strided


def extent_bytes(tensor: Tensor) -> int:
    """Bytes from the first to the last element of a strided tensor, gaps included."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def holders(identity: int) -> int:
    """How many tensors hold the storage with this identity."""
    return int(torch._C._storage_Use_Count(identity)) - _wrapper_count()


@cache
def _wrapper_count() -> int:
    """What Python's own wrapper of a storage adds to its count; it differs between versions of torch."""
    tensor = torch.empty(1, device="cpu")
    identity = tensor.untyped_storage()._cdata
    return int(torch._C._storage_Use_Count(identity)) - 1


@dataclass(frozen=True, slots=True)
class Signature:
    """What a recording relies on in a tensor.

    Attributes:
        address: of the first element, in bytes; for an opaque tensor its object identity.
        shape: sizes.
        stride: in elements; empty for an opaque tensor.
        dtype: element type.
    """

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Signature:
        """The signature of `tensor` now."""
        if is_opaque(tensor):
            return cls(id(tensor), tuple(tensor.shape), (), tensor.dtype)
        return cls(tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last element, gaps included; 0 for an opaque tensor, which has no address."""
        if self.is_opaque or 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    @property
    def is_opaque(self) -> bool:
        """Whether the tensor has no address of its own."""
        return len(self.stride) != len(self.shape)

    def matches(self, tensor: Tensor) -> bool:
        """Whether `tensor` still has this signature; cheap enough for every call."""
        if is_opaque(tensor):
            return self == Signature.of(tensor)
        return (
            tensor.data_ptr() == self.address
            and tensor.shape == self.shape
            and tensor.stride() == self.stride
            and tensor.dtype == self.dtype
        )

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"address {self.address:#x}, shape {list(self.shape)}, stride {list(self.stride)}, {dtype}"


class FixedBuffers(Mapping[str, Tensor]):
    """Tensors by name, each with the address, shape, stride and dtype it had when it was put here.

    `buffers[name]` is the tensor as it is now. Memory made by `allocate` is owned and held here; memory that
    is `adopt`ed belongs to someone else (weights, a KV cache) and is only watched.

    Args:
        device: where `allocate` puts memory.

    Attributes:
        device: where `allocate` puts memory.
        generation: goes up whenever `accept` takes a changed address; graphs of an earlier one are stale.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._getters: dict[str, Callable[[], Tensor]] = {}
        self._recorded: dict[str, Signature] = {}
        self._owned: dict[str, Tensor] = {}
        self.generation = 0
        self._index: tuple[list[int], list[int], list[int], list[str]] | None = None

    def allocate(self, name: str, shape: Sequence[int], dtype: torch.dtype, fill: float | bool = 0) -> Tensor:
        """Make a contiguous tensor filled with `fill`, held here for as long as these buffers live.

        Raises:
            GraphError: `name` is taken.
        """
        self._refuse_taken(name)
        with torch.inference_mode(False), torch.no_grad():
            tensor = torch.full(tuple(shape), fill, dtype=dtype, device=self.device)
        self._owned[name] = tensor
        self._enter(name, lambda: tensor)
        return tensor

    def adopt(self, name: str, tensor: Tensor | Callable[[], Tensor]) -> Tensor:
        """Watch someone else's memory under `name`, and return it.

        Args:
            name: a name that is not taken.
            tensor: the tensor, or a callable that returns it as it is now (`lambda: layer.weight`), so that a
                tensor put in its place is noticed as well.

        Raises:
            GraphError: `name` is taken.
        """
        self._refuse_taken(name)
        if isinstance(tensor, Tensor):
            held = tensor
            self._enter(name, lambda: held)
        else:
            self._enter(name, tensor)
        return self[name]

    def remove(self, name: str) -> None:
        """Forget the buffer `name`; graphs that recorded it must be gone by then."""
        self._getters.pop(name)
        self._recorded.pop(name)
        self._owned.pop(name, None)
        self._index = None

    def accept(self, names: Iterable[str] | None = None) -> list[str]:
        """Take the present addresses of `names` (default: all) as recorded; graphs must be made again.

        Returns:
            The names whose signature changed by this.

        Raises:
            StaleAddressError: a buffer is gone.
        """
        changed = []
        for name in self._getters if names is None else names:
            change = self.change(name)
            if change is None:
                continue
            if not isinstance(self._getters[name](), Tensor):
                raise StaleAddressError(name, *change)
            signature = Signature.of(self[name])
            if signature != self._recorded[name]:
                self._recorded[name] = signature
                changed.append(name)
        self.generation += bool(changed)
        self._index = None
        return changed

    def recorded(self, name: str) -> Signature:
        """The signature under which `name` was put here or last accepted."""
        return self._recorded[name]

    def is_owned(self, name: str) -> bool:
        """Whether `name` was made by `allocate`."""
        return name in self._owned

    def check(self, names: Iterable[str] | None = None) -> None:
        """Compare every buffer (or those in `names`) with what was recorded.

        Raises:
            StaleAddressError: the first buffer whose address, shape, stride or dtype differs, or that is gone.
        """
        for name in self._getters if names is None else names:
            change = self.change(name)
            if change is not None:
                raise StaleAddressError(name, *change)

    def change(self, name: str) -> tuple[str, str] | None:
        """How buffer `name` was recorded and what it is now, as text; None where that is the same."""
        recorded = self._recorded[name]
        try:
            tensor: object = self._getters[name]()
        except (AttributeError, KeyError, IndexError, ReferenceError):
            tensor = None
        if not isinstance(tensor, Tensor):
            return str(recorded), "gone: nobody holds it, and its memory may be another tensor's by now"
        return None if recorded.matches(tensor) else (str(recorded), str(Signature.of(tensor)))

    def owner_of(self, address: int) -> tuple[str, int] | None:
        """Name and byte offset of the innermost recorded buffer that holds `address`, or None.

        Opaque tensors have no address and are never found.
        """
        if self._index is None:
            self._index = self._build_index()
        starts, ends, reach, names = self._index
        at = bisect_right(starts, address) - 1
        while at >= 0 and reach[at] > address:
            if ends[at] > address:
                return names[at], address - starts[at]
            at -= 1
        return None

    def extents(self) -> list[tuple[int, int, str]]:
        """Where each buffer that has an address was recorded: start, end and name, in the order of entry."""
        return [
            (signature.address, signature.address + signature.nbytes, name)
            for name, signature in self._recorded.items()
            if signature.nbytes
        ]

    def packed(self) -> dict[int, str]:
        """Names of the opaque tensors, by their identity."""
        return {signature.address: name for name, signature in self._recorded.items() if signature.is_opaque}

    @property
    def nbytes(self) -> int:
        """Bytes of the memory made by `allocate`; adopted memory is not counted."""
        return sum(tensor.nbytes for tensor in self._owned.values())

    def __getitem__(self, name: str) -> Tensor:
        return self._getters[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._getters)

    def __len__(self) -> int:
        return len(self._getters)

    def _refuse_taken(self, name: str) -> None:
        if name in self._getters:
            raise GraphError(f"a buffer named {name!r} exists already; choose another name or remove it first")

    def _enter(self, name: str, getter: Callable[[], Tensor]) -> None:
        self._recorded[name] = Signature.of(getter())
        self._getters[name] = getter
        self._index = None

    def _build_index(self) -> tuple[list[int], list[int], list[int], list[str]]:
        """Starts, ends, furthest end so far, and names, by ascending start and descending length."""
        spans = [(start, -end, name) for start, end, name in self.extents()]
        spans.sort(key=lambda span: span[:2])
        reach: list[int] = []
        for _, end, _ in spans:
            reach.append(max(-end, reach[-1] if reach else 0))
        return [span[0] for span in spans], [-span[1] for span in spans], reach, [span[2] for span in spans]
