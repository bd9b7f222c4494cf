"""What the CPU recorder knows about operators: what cannot be recorded, what writes, what has out=."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from mainspring.graphs.cpu_program import tensors_in
from mainspring.graphs.errors import CaptureError

__all__ = [
    "is_allocation",
    "is_constant",
    "is_random",
    "literal",
    "matching_out",
    "refuse",
    "same_bits",
    "written_tensors",
]

_ALLOCATIONS = frozenset(
    f"aten::{name}"
    for name in (
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
    )
)
_CONSTANTS = frozenset(
    f"aten::{name}" for name in ("full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like")
)
_VALUE_READS = frozenset(("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::item"))
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_allocation(func: OpOverload) -> bool:
    """Whether `func` only makes memory, with contents that nobody may rely on."""
    return func._schema.name in _ALLOCATIONS


def is_constant(func: OpOverload, tensors: list[Tensor]) -> bool:
    """Whether what `func` makes depends on no tensor's contents, so that every run makes the same."""
    return func._schema.name in _CONSTANTS or (func.namespace == "aten" and not tensors)


def is_random(func: OpOverload) -> bool:
    """Whether `func` might draw from the default generator; the tag alone does not tell."""
    return torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in ("aten", "prims")


def refuse(func: OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse what cannot be replayed.

    Raises:
        CaptureError: the operation reads a value into Python, has a shape that depends on data, takes a
            generator, or uses a tensor that is not on the CPU.
    """
    if func._schema.name in _VALUE_READS or torch.Tag.data_dependent_output in func.tags:
        raise CaptureError(
            f"{name} reads a tensor's value into Python (item(), bool(), int(), print or an if on a "
            f"tensor), which a recording would freeze; keep the value in a tensor, for example with "
            f"torch.where"
        )
    for tensor in (*tensors_in(args), *tensors_in(kwargs)):
        if tensor.device.type != "cpu":
            raise CaptureError(f"{name} uses a tensor on {tensor.device}; a CPU recording holds CPU tensors only")
    if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
        raise CaptureError(
            f"{name} takes a generator, whose state would not be part of the recording; compute random "
            f"numbers from a seed and a counter that are tensors"
        )
    if func.namespace != "aten":
        return
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        masked = any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1]))
        if not masked or (name != "aten::index" and args[2].numel() == 1):
            return  # one value behind a mask is a masked fill, of fixed shape
    elif torch.Tag.dynamic_output_shape not in func.tags:
        return
    raise CaptureError(
        f"{name} has a result or work whose shape depends on data (boolean indexing, nonzero, unique, "
        f"...), which cannot be recorded; use torch.where or masked_fill on full shapes, or put it into a "
        f"custom operation"
    )


def written_tensors(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors among the arguments that the schema declares as written."""
    written: list[Tensor] = []
    for at, name in _written_arguments(func):
        written.extend(tensors_in(args[at] if at < len(args) else kwargs.get(name)))
    return written


@cache
def _written_arguments(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that the schema declares as written."""
    return tuple(
        (at, argument.name)
        for at, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@cache
def matching_out(func: OpOverload) -> tuple[OpOverload, tuple[str, ...]] | None:
    """The overload of `func` that takes the same arguments and writes its results into out= tensors.

    Returns:
        That overload and the names of its out= arguments in the order of the results, or None.
    """
    schema = func._schema
    wanted = [(argument.name, str(argument.type)) for argument in schema.arguments]
    if any(str(returned.type) != "Tensor" for returned in schema.returns):
        return None
    packet = func._overloadpacket
    for name in packet.overloads():  # type: ignore[no-untyped-call]
        overload = getattr(packet, name)
        outs = [argument.name for argument in overload._schema.arguments if argument.is_out]
        rest = [(a.name, str(a.type)) for a in overload._schema.arguments if not a.is_out]
        if outs and rest == wanted and len(outs) == len(schema.returns):
            return overload, tuple(outs)
    return None


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bytes; NaN equals the same NaN."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.is_complex():
        left, right = (torch.view_as_real(each.resolve_conj().resolve_neg()) for each in (left, right))
    elif left.is_neg() or right.is_neg():
        left, right = left.resolve_neg(), right.resolve_neg()
    integer = _INTEGERS[left.element_size()]
    return torch.equal(left.view(integer), right.view(integer))


def literal(value: Tensor) -> Tensor:
    """A copy of `value` to keep for replays; a single element where all are the same."""
    if value.numel() > 1:
        first = value[(0,) * value.dim()]
        if same_bits(first.expand_as(value), value):
            return first.clone()
    return value.clone()
