"""Finding, while a CPU run is recorded, what the recorder cannot see: access past the dispatcher."""

from __future__ import annotations

import ctypes
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mainspring.graphs.buffers import is_opaque
from mainspring.graphs.cpu_program import tensors_in
from mainspring.graphs.dispatch import DispatchMode
from mainspring.graphs.errors import CaptureError

__all__ = ["WATCH_LIMIT", "MemoryWatch", "Observer", "refuse_host_access"]

WATCH_LIMIT = 64 * 1024
"""Largest storage, in bytes, whose contents are followed during recording."""

_HOST_ACCESS = {
    "numpy": "numpy()",
    "tolist": "tolist()",
    "data_ptr": "data_ptr()",
    "__array__": "conversion to a numpy array",
    "__dlpack__": "DLPack export",
}


class Observer(DispatchMode):  # type: ignore[no-untyped-call]
    """Collects the small tensors that a run uses, so that a later recording can follow them from its
    start."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note the arguments and run the operation."""
        for tensor in tensors_in([args, kwargs]):
            if not is_opaque(tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage._cdata not in self.seen and 0 < storage.nbytes() <= WATCH_LIMIT:
                    self.seen[storage._cdata] = tensor.detach()
        return func(*args, **(kwargs or {}))


_REPLACING = threading.RLock()  # two recordings at once must not restore each other's methods


class MemoryWatch:
    """Checksums of small storages, by which a write that no operation declared is noticed."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[torch.UntypedStorage, int]] = {}

    def observe(self, tensors: Iterable[Tensor]) -> None:
        """Take the contents of `tensors` as known: they are new, or a declared write was just made."""
        for tensor in tensors:
            if not is_opaque(tensor):
                storage = tensor.untyped_storage()
                if 0 < storage.nbytes() <= WATCH_LIMIT:
                    self._sums[storage._cdata] = (storage, _checksum(storage))

    def verify(self, tensors: Iterable[Tensor], message: Callable[[], str]) -> None:
        """Compare `tensors` with what is known of them; unknown ones become known.

        Raises:
            CaptureError: with `message()`, contents changed without a declared write.
        """
        for tensor in tensors:
            if not is_opaque(tensor):
                known = self._sums.get(tensor.untyped_storage()._cdata)
                if known is None:
                    self.observe([tensor])
                elif _checksum(known[0]) != known[1]:
                    raise CaptureError(message())

    def verify_all(self, message: Callable[[], str]) -> None:
        """Compare everything that is known.

        Raises:
            CaptureError: with `message()`, contents changed without a declared write.
        """
        if any(_checksum(storage) != known for storage, known in self._sums.values()):
            raise CaptureError(message())


def _checksum(storage: torch.UntypedStorage) -> int:
    return zlib.crc32(ctypes.string_at(storage.data_ptr(), storage.nbytes()))


@contextmanager
def refuse_host_access(inside_operation: Callable[[], bool]) -> Iterator[None]:
    """Make `Tensor.numpy`, `tolist`, `data_ptr`, `__array__` and `__dlpack__` raise CaptureError in this
    thread.

    What is read or written through them never reaches the dispatcher, so a replay would miss it. The methods
    are replaced on the class while the context lasts (a torch function mode would not do: it turns off the
    fused fast paths of `torch.nn`, so that another kernel would be recorded than eager runs). Other threads,
    and operations for which `inside_operation()` is true, keep the originals.
    """
    thread = threading.get_ident()
    replaced: dict[str, Any] = {}

    def guarded(name: str, original: Any) -> Any:
        def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread and not inside_operation():
                raise CaptureError(
                    f"{_HOST_ACCESS[name]} on a tensor of shape {list(self.shape)} while recording: what "
                    f"is read or written that way is invisible to the recorder and would be frozen or "
                    f"lost on replay; use torch operations, or put the code into a custom operation that "
                    f"declares what it writes"
                )
            return original(self, *args, **kwargs)

        return method

    with _REPLACING:
        for name in _HOST_ACCESS:
            replaced[name] = Tensor.__dict__.get(name)
            setattr(Tensor, name, guarded(name, getattr(Tensor, name)))
        try:
            yield
        finally:
            for name, original in replaced.items():
                if original is None:
                    delattr(Tensor, name)
                else:
                    setattr(Tensor, name, original)
