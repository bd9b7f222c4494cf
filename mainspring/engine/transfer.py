"""Moving small arrays between the CPU and the device without making either wait."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from mainspring.graphs import Staging

#: Bytes of one pinned staging slot; larger arrays are refused by the staging ring.
STAGING_SLOT_BYTES = 1 << 20
#: Copies that may be under way before an upload waits for the oldest.
STAGING_DEPTH = 32


class Uploader:
    """Takes host arrays to the device through a ring of pinned slots, on the current stream.

    ``calls`` counts the copies, for the engine's statistics.
    """

    def __init__(self, device: torch.device, slot_bytes: int = STAGING_SLOT_BYTES, depth: int = STAGING_DEPTH) -> None:
        self.device = device
        self.calls = 0
        self._slot_bytes = slot_bytes
        self._staging = Staging(device, slot_bytes, depth) if device.type == "cuda" else None

    def __call__(self, array: np.ndarray) -> torch.Tensor:
        """The array as a tensor on the device, same shape and dtype; on a GPU the copy may still be under way."""
        self.calls += 1
        if self._staging is None:
            return torch.from_numpy(np.array(array))
        source = torch.from_numpy(np.ascontiguousarray(array))
        destination = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        flat_source, flat_destination = source.view(-1), destination.view(-1)
        chunk = self._slot_bytes // source.element_size()
        for start in range(0, flat_source.numel(), chunk):
            self._staging.upload(flat_destination[start : start + chunk], flat_source[start : start + chunk])
        return destination

    def into(self, destination: torch.Tensor, array: np.ndarray) -> None:
        """Copy the array into a small contiguous tensor on the device that has its shape and dtype."""
        self.calls += 1
        source = torch.from_numpy(np.ascontiguousarray(array))
        if self._staging is None:
            destination.copy_(source)
        else:
            self._staging.upload(destination, source)


class Download:
    """A small device tensor on its way to the CPU.

    On a GPU the copy is queued behind the work that makes the tensor; ``wait`` blocks until it has arrived: spinning,
    or, with ``sleeps``, without taking processor time, which ends some tens of microseconds later.
    """

    def __init__(self, tensor: torch.Tensor, sleeps: bool = False) -> None:
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            event = torch.cuda.Event(blocking=sleeps)  # type: ignore[no-untyped-call]
            event.record()
            self._wait: Callable[[], None] = event.synchronize
        else:
            self._host = tensor.clone()
            self._wait = _arrived

    def wait(self) -> np.ndarray:
        """The tensor's contents as a host array of the same shape."""
        self._wait()
        result: np.ndarray = self._host.numpy()
        return result


def _arrived() -> None:
    """A copy within the CPU's memory is done when it is made."""
