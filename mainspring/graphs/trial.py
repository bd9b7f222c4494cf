"""Trying a step out: random valid inputs, and the state that it may write, to be put back afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from mainspring.graphs.buffers import FixedBuffers
from mainspring.graphs.outside import OutsideTensor
from mainspring.graphs.step_io import Input

__all__ = ["RandomTrial", "Saved", "Trial", "random_rows"]


class Trial(Protocol):
    """What verification needs to know of a step whose inputs are not all there is to it.

    `RandomTrial` is what a runner uses by itself: random inputs, and all memory that the recording writes.
    """

    def state(self, rows: int) -> Mapping[str, Tensor]:
        """Every tensor that `prepare` or a step of so many rows may write, by name; they are put back afterwards."""
        ...

    def prepare(self, rows: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        """Put random valid contents into the state, and give `rows` rows of every input. The CPU is torch's default
        device meanwhile.

        Args:
            rows: how many.
            generator: on the CPU; to draw from, so that a trial can be repeated.
        """
        ...


def random_rows(spec: Input, rows: int, generator: torch.Generator) -> Tensor:
    """`rows` valid rows of an input, on the CPU: `spec.sample` if there is one; else normal numbers for floating and
    complex types, and for all others the pad value, since nothing else is known to be valid."""
    if spec.sample is not None:
        return spec.sample(rows, generator)
    shape = (rows, *spec.shape)
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        wide = torch.complex64 if spec.dtype.is_complex else torch.float32
        return torch.randn(shape, generator=generator, dtype=wide, device="cpu").to(spec.dtype)
    return torch.full(shape, spec.pad, dtype=spec.dtype, device="cpu")


class RandomTrial:
    """Random inputs; the state is all memory from outside that the recording, or its warm-up run, writes.

    Args:
        inputs: the inputs by name.
        outside: what the recording uses.
        buffers: for names.
    """

    def __init__(self, inputs: Mapping[str, Input], outside: tuple[OutsideTensor, ...], buffers: FixedBuffers) -> None:
        self._inputs = inputs
        self._outside = outside
        self._buffers = buffers

    def state(self, rows: int) -> Mapping[str, Tensor]:
        """See `Trial`: the named buffers that lie in written memory, and as bytes what has no name."""
        found: dict[str, Tensor] = {}
        for outside in self._outside:
            storage = outside.storage() if outside.written else None
            if storage is None:
                continue
            within = {
                name: tensor
                for name, tensor in self._buffers.items()
                if isinstance(tensor, Tensor)
                and tensor.layout == torch.strided
                and tensor.untyped_storage()._cdata == outside.reference.cdata
            }
            covered = any(tensor.nbytes == storage.nbytes() for tensor in within.values())
            found.update(within)
            if not covered:
                whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                found[f"{outside.owner} #{len(found)}"] = whole
        return found

    def prepare(self, rows: int, generator: torch.Generator) -> Mapping[str, Tensor]:
        """See `Trial`; the state is left as it is."""
        return {name: random_rows(spec, rows, generator) for name, spec in self._inputs.items()}


class Saved:
    """Copies of tensors, to put back or to compare with."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.copies = {name: tensor.clone() for name, tensor in tensors.items()}

    def restore(self) -> None:
        """Put the contents back."""
        for name, tensor in self.tensors.items():
            tensor.copy_(self.copies[name])
