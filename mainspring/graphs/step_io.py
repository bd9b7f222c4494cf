"""The fixed buffers through which rows enter and leave a recorded step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mainspring.graphs.buffers import FixedBuffers, Signature
from mainspring.graphs.cpu_rules import same_bits
from mainspring.graphs.errors import CaptureError, GraphError, StaleAddressError
from mainspring.graphs.staging import Staging

__all__ = ["Input", "InputBuffer", "OutputBuffers"]


@dataclass(frozen=True, slots=True)
class Input:
    """One argument of a step.

    Attributes:
        shape: of one row, without the batch dimension.
        dtype: element type.
        pad: value of every element of a padded row; it must make the row harmless.
        sample: gives so many valid random rows, drawing from a generator, for `GraphRunner.verify`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pad: float | bool = 0
    sample: Callable[[int, torch.Generator], Tensor] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if any(size < 0 for size in self.shape):
            raise GraphError(f"input of shape {self.shape}; sizes must be >= 0")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize


class InputBuffer:
    """The fixed buffer [top, ...] of one input, and what it was last filled with.

    Attributes:
        name: of the buffer.
        spec: shape, dtype and padding of a row.
        tensor: the buffer.
        always_upload: the step itself writes the buffer, so that it never holds what was uploaded.
    """

    def __init__(self, name: str, spec: Input, top: int, buffers: FixedBuffers) -> None:
        self.name = name
        self.spec = spec
        self.tensor = buffers.allocate(name, (top, *spec.shape), spec.dtype, fill=spec.pad)
        self.always_upload = False
        self._buffers = buffers
        self._signature = buffers.recorded(name)
        self._last: Any = None
        self._version = self.tensor._version

    def check(self) -> None:
        """See that the buffer is where it was recorded.

        Raises:
            StaleAddressError: it is not.
        """
        tensor = self._buffers[self.name]
        if not self._signature.matches(tensor):
            raise StaleAddressError(self.name, str(self._signature), str(Signature.of(tensor)))

    def adopt_present(self) -> None:
        """Use the tensor that the buffers hold under this name now, at its present address."""
        self.tensor = self._buffers[self.name]
        self._signature = self._buffers.recorded(self.name)
        self._last = None

    def view(self, rung: int) -> Tensor:
        """The first `rung` rows."""
        return self.tensor[:rung]

    def fill_with_padding(self) -> None:
        """Set every row to the pad value."""
        self.tensor.fill_(self.spec.pad)
        self._last = None
        self._version = self.tensor._version

    def was_written(self, ran: bool = True) -> bool:
        """After a recording on padding only: whether the step wrote into this buffer. Where it never ``ran``, there is
        nothing to see of what a kernel wrote that declares no write."""
        if self.tensor._version != self._version:
            return True
        return ran and not _is_nan(self.spec.pad) and not bool((self.tensor == self.spec.pad).all())

    def rows_of(self, values: Tensor | Sequence[Any]) -> int:
        """Number of rows in `values`.

        Raises:
            GraphError: rows have another shape, or a tensor's dtype cannot become the input's.
        """
        if isinstance(values, Tensor):
            unusual = why_not_plain(values)
            if unusual is not None:
                raise GraphError(f"input {self.name!r} is {unusual}; give a dense tensor with data")
            if values.dim() == 0 or tuple(values.shape[1:]) != self.spec.shape:
                raise GraphError(
                    f"input {self.name!r} has shape {list(values.shape)}; expected [rows, {list(self.spec.shape)}]"
                )
            if not torch.can_cast(values.dtype, self.spec.dtype):
                raise GraphError(f"input {self.name!r} is {values.dtype}; it cannot become {self.spec.dtype}")
            return values.shape[0]
        if not hasattr(values, "__len__") or isinstance(values, (str, bytes, Mapping, Set)):
            raise GraphError(f"input {self.name!r} is a {type(values).__name__}; give a tensor or a sequence of rows")
        return len(values)

    def load(self, values: Tensor | Sequence[Any], rows: int, rung: int, staging: Staging) -> bool:
        """Put `values` into the first `rows` rows and the pad value into the others up to `rung`.

        Returns:
            Whether anything had to be copied: not when the same values were loaded last and nobody wrote
            since.
        """
        if isinstance(values, Tensor) and values.device.type != "cpu":
            self._last = None
            target = self.tensor[:rung]
            target[:rows].copy_(values)
            target[rows:].fill_(self.spec.pad)
            return True
        known = self.tensor._version == self._version and not self.always_upload
        if known and _equal(self._last, values):
            return False
        staging.upload(self.tensor[:rung], values, fill=self.spec.pad)
        self._last = _snapshot(values)
        self._version = self.tensor._version
        return True


def why_not_plain(tensor: Tensor) -> str | None:
    """What keeps rows of `tensor` from being copied, such as its layout; None for a plain dense tensor."""
    if tensor.is_meta:
        return "a meta tensor"
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return f"of layout {tensor.layout}"
    return f"quantized ({tensor.dtype})" if tensor.is_quantized else None


def _snapshot(values: Any) -> Tensor | list[int] | None:
    """A copy that later changes do not reach; None for what is not worth comparing.

    Kept are tensors and flat sequences of whole numbers, such as row numbers. Elements that can be changed in place
    (arrays, 0-d tensors) would be compared with themselves.
    """
    if isinstance(values, Tensor):
        return values.detach().clone()
    if isinstance(values, (list, tuple)) and all(type(value) is int for value in values):
        return list(values)
    return None


def _equal(last: Tensor | list[int] | None, values: Any) -> bool:
    """Whether `values` would write the same bits as `last` did."""
    if isinstance(last, Tensor):
        return isinstance(values, Tensor) and same_bits(last, values)
    return last is not None and isinstance(values, (list, tuple)) and last == list(values)


def _is_nan(value: float | bool) -> bool:
    return isinstance(value, float) and math.isnan(value)


class OutputBuffers:
    """Fixed buffers [top, ...] for what a step returns, made when its first result is seen.

    Args:
        prefix: of the buffers' names: "prefix", "prefix.0" for a tuple, "prefix.key" for a dict.
        top: rows of each buffer.
        buffers: where they are allocated.
    """

    def __init__(self, prefix: str, top: int, buffers: FixedBuffers) -> None:
        self._prefix = prefix
        self._top = top
        self._buffers = buffers
        self._kind: type | None = None
        self._keys: tuple[Any, ...] = ()
        self._tensors: list[Tensor] = []
        self._names: list[str] = []

    @property
    def names(self) -> list[str]:
        """Names of the buffers; empty before the first result."""
        return list(self._names)

    def check(self) -> None:
        """See that every buffer is where it was recorded.

        Raises:
            StaleAddressError: one is not.
        """
        self._buffers.check(self._names)

    def adopt_present(self) -> None:
        """Use the tensors that the buffers hold under these names now."""
        self._tensors = [self._buffers[name] for name in self._names]

    def store(self, result: Any, rung: int) -> None:
        """Copy the result of a step of `rung` rows into the buffers.

        Raises:
            CaptureError: the result is not a tensor, tuple or dict of dense tensors [rung, ...] or None, or it
                differs in structure, shape or dtype from the first one.
        """
        kind, keys, tensors = self._take_apart(result)
        for label, tensor in zip(self._labels(kind, keys), tensors, strict=True):
            unusual = why_not_plain(tensor)
            if unusual is not None:
                raise CaptureError(
                    f"output {label!r} is {unusual}, which is not copied into rows; return a plain dense tensor, for "
                    f"instance its to_dense() or dequantize()"
                )
            if tensor.dim() == 0 or tensor.shape[0] != rung:
                raise CaptureError(
                    f"output {label!r} has shape {list(tensor.shape)}; its first dimension must be the {rung} rows"
                )
        if self._kind is None:
            self._kind, self._keys = kind, keys
            self._names = self._labels(kind, keys)
            self._tensors = [
                self._buffers.allocate(name, (self._top, *tensor.shape[1:]), tensor.dtype)
                for name, tensor in zip(self._names, tensors, strict=True)
            ]
        if kind is not self._kind or keys != self._keys:
            raise CaptureError(
                f"the step returned {kind.__name__} {keys}, but {self._kind.__name__} {self._keys} first"
            )
        for name, buffer, tensor in zip(self._names, self._tensors, tensors, strict=True):
            if buffer.shape[1:] != tensor.shape[1:] or buffer.dtype != tensor.dtype:
                raise CaptureError(
                    f"output {name!r} has rows of {list(tensor.shape[1:])} {tensor.dtype} on rung {rung}, "
                    f"but {list(buffer.shape[1:])} {buffer.dtype} first; only the batch may differ "
                    f"between rungs"
                )
            buffer[:rung].copy_(tensor)

    def named(self, rung: int) -> dict[str, Tensor]:
        """The first `rung` rows of each buffer, by its name."""
        return {name: tensor[:rung] for name, tensor in zip(self._names, self._tensors, strict=True)}

    def first(self, rows: int) -> Any:
        """The result's structure over the first `rows` rows of the buffers."""
        return self._put_together([tensor[:rows] for tensor in self._tensors])

    def concatenate(self, pieces: list[Any]) -> Any:
        """One result from several of `first`, copied."""
        taken = [self._take_apart(piece)[2] for piece in pieces]
        return self._put_together([torch.cat(parts) for parts in zip(*taken, strict=True)])

    def clone(self, piece: Any) -> Any:
        """A copy that later steps do not overwrite."""
        return self._put_together([tensor.clone() for tensor in self._take_apart(piece)[2]])

    def _take_apart(self, result: Any) -> tuple[type, tuple[Any, ...], list[Tensor]]:
        kind: type
        items: Mapping[Any, Any]
        if result is None:
            return type(None), (), []
        if isinstance(result, Tensor):
            return Tensor, (), [result]
        if isinstance(result, dict):
            kind, items = dict, result
        elif isinstance(result, (tuple, list)):
            kind, items = tuple, dict(enumerate(result))
        else:
            raise CaptureError(f"a step must return a tensor, tuple, dict or None, not {type(result).__name__}")
        wrong = [key for key, value in items.items() if not isinstance(value, Tensor)]
        if wrong:
            raise CaptureError(
                f"output {wrong[0]!r} is {type(items[wrong[0]]).__name__}, not a tensor; return a tensor, or a tuple "
                f"or dict of tensors without further nesting"
            )
        return kind, tuple(items), list(items.values())

    def _labels(self, kind: type, keys: tuple[Any, ...]) -> list[str]:
        return [self._prefix] if kind is Tensor else [f"{self._prefix}.{key}" for key in keys]

    def _put_together(self, tensors: list[Tensor]) -> Any:
        if self._kind is Tensor:
            return tensors[0]
        if self._kind is dict:
            return dict(zip(self._keys, tensors, strict=True))
        return tuple(tensors) if self._kind is tuple else None

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._tensors)
