"""Numbers as callers give them: of Python, NumPy or torch, taken as plain ones. A boolean is none of them."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any


def whole_number(value: Any) -> int:
    """``value`` as an ``int``. Raises ``TypeError`` for what is no whole number, or is a boolean of any library."""
    if is_boolean(value):
        raise TypeError(f"{value!r} is a boolean")
    return operator.index(value)


def whole_numbers(values: Iterable[Any]) -> list[int]:
    """``values`` as plain integers. Raises ``TypeError`` for what is no list of whole numbers, such as bytes."""
    if isinstance(values, (bytes, bytearray, memoryview)):
        raise TypeError(f"{values!r} is {type(values).__name__}; give a list")
    plain = list(values.tolist() if hasattr(values, "tolist") else values)
    if set(map(type, plain)) <= {int}:
        return plain
    return [whole_number(value) for value in plain]


def real_number(value: Any) -> float:
    """``value`` as a ``float``. Raises ``TypeError`` for what is no number, ``OverflowError`` for one too large."""
    if is_boolean(value) or isinstance(value, (str, bytes, bytearray)):
        raise TypeError(f"{value!r} is no number")
    try:
        return float(value)
    except (RuntimeError, ValueError) as error:  # an array of several, or of texts
        raise TypeError(f"{value!r} is no number") from error


def is_boolean(value: Any) -> bool:
    """Whether ``value`` is a boolean, or an array of booleans."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
