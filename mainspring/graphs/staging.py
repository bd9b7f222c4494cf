"""CPU to device: a ring of pinned memory whose slots are not rewritten while a copy still reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mainspring.graphs.errors import GraphError

__all__ = ["CopyBackend", "CopyEvent", "CpuCopies", "CudaCopies", "Staging"]


class CopyEvent(Protocol):
    """Marks the end of one copy."""

    def query(self) -> bool:
        """Whether the copy is done."""
        ...

    def synchronize(self) -> None:
        """Wait until the copy is done."""
        ...


class CopyBackend(Protocol):
    """How a slot's memory is made and copied from; replaceable so that the ring's rule can be tested."""

    def allocate(self, nbytes: int) -> Tensor:
        """Memory of one slot, uint8 [nbytes], readable by the device."""
        ...

    def copy(self, destination: Tensor, source: Tensor) -> CopyEvent | None:
        """Start copying `source` to `destination`; None means that it is done already."""
        ...


class CpuCopies:
    """Copies within CPU memory, which are done when the call returns."""

    def allocate(self, nbytes: int) -> Tensor:
        """Ordinary memory, uint8 [nbytes]."""
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")

    def copy(self, destination: Tensor, source: Tensor) -> CopyEvent | None:
        """Copy at once."""
        destination.copy_(source)
        return None


class CudaCopies:
    """Asynchronous copies from pinned memory on the current stream of `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate(self, nbytes: int) -> Tensor:
        """Pinned memory, uint8 [nbytes]."""
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, destination: Tensor, source: Tensor) -> CopyEvent | None:
        """Enqueue the copy and an event behind it."""
        stream = torch.cuda.current_stream(self._device)
        destination.copy_(source, non_blocking=True)
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


class Staging:
    """A ring of `depth` slots of `slot_bytes` bytes through which values reach the device.

    Args:
        device: where destinations lie.
        slot_bytes: largest upload, in bytes.
        depth: uploads that may be under way before one has to wait.
        backend: how to allocate and copy; default by `device`.

    Attributes:
        waits: uploads that found their slot still being read and waited for it.

    Raises:
        GraphError: `slot_bytes` or `depth` is below 1.
    """

    def __init__(
        self, device: torch.device | str, slot_bytes: int, depth: int = 4, backend: CopyBackend | None = None
    ) -> None:
        if slot_bytes < 1 or depth < 1:
            raise GraphError(f"staging of depth {depth} with slots of {slot_bytes} bytes; both must be >= 1")
        self.device = torch.device(device)
        self.slot_bytes = slot_bytes
        self.waits = 0
        if backend is None:
            backend = CudaCopies(self.device) if self.device.type == "cuda" else CpuCopies()
        self._backend: CopyBackend = backend
        with torch.inference_mode(False):
            self._slots = [backend.allocate(slot_bytes) for _ in range(depth)]
        self._events: list[CopyEvent | None] = [None] * depth
        self._next = 0

    @property
    def depth(self) -> int:
        """Number of slots."""
        return len(self._slots)

    def upload(self, destination: Tensor, values: Tensor | Sequence[Any], fill: float | bool | None = None) -> None:
        """Copy `values` into `destination` on the current stream, without waiting for the copy.

        Args:
            destination: contiguous tensor [rows, ...] on the device.
            values: CPU tensor or nested sequence [n, ...] with n <= rows; may be changed once this returns.
            fill: value of the rows from n on; without it n must be rows.

        Raises:
            GraphError: shapes do not fit, `destination` is not contiguous, or it is larger than a slot.
        """
        source = values if isinstance(values, Tensor) else _as_tensor(values, destination.dtype)
        rows = source.shape[0] if source.dim() else 0
        fits = source.dim() == destination.dim() > 0 and source.shape[1:] == destination.shape[1:]
        if not fits or rows > destination.shape[0] or (fill is None and rows != destination.shape[0]):
            raise GraphError(
                f"values of shape {list(source.shape)} do not fill a destination of shape {list(destination.shape)}"
            )
        if not destination.is_contiguous():
            raise GraphError(f"upload to a destination of stride {destination.stride()}; it must be contiguous")
        nbytes = destination.nbytes
        if nbytes > self.slot_bytes:
            raise GraphError(f"upload of {nbytes} bytes > slot of {self.slot_bytes} bytes; raise slot_bytes")
        if nbytes == 0:
            return
        at = self._next
        self._next = (at + 1) % len(self._slots)
        self._wait_for(at)
        host = self._slots[at][:nbytes].view(destination.dtype).view(destination.shape)
        host[:rows].copy_(source)
        if fill is not None and rows < destination.shape[0]:
            host[rows:].fill_(fill)
        self._events[at] = self._backend.copy(destination, host)

    def synchronize(self) -> None:
        """Wait until every upload has been read out of the ring."""
        for at in range(len(self._slots)):
            self._wait_for(at)

    def _wait_for(self, at: int) -> None:
        """Block until slot `at` may be rewritten."""
        event = self._events[at]
        if event is not None:
            if not event.query():
                self.waits += 1
                event.synchronize()
            self._events[at] = None


def _as_tensor(values: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """`values` as a CPU tensor that can become `dtype` without dropping fractions or high bits."""
    try:
        if dtype.is_floating_point or dtype.is_complex:
            return torch.as_tensor(values, dtype=dtype, device="cpu")
        source = torch.as_tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise GraphError(f"{type(values).__name__} cannot become a tensor of {dtype}: {error}") from error
    if source.numel() and not torch.can_cast(source.dtype, dtype):
        raise GraphError(f"values of {source.dtype} cannot become {dtype}; give whole numbers")
    if source.numel() and dtype is not torch.bool and source.dtype is not torch.bool:
        limits = torch.iinfo(dtype)
        low, high = (int(edge) for edge in source.to(torch.int64).aminmax())
        if low < limits.min or high > limits.max:
            raise GraphError(f"values from {low} to {high} do not fit {dtype}, {limits.min} to {limits.max}")
    return source
