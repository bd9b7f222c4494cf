"""Dataclasses from the plain data of JSON, each field checked against its annotation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

__all__ = ["make"]

T = TypeVar("T")


def make(kind: type[T], data: Mapping[str, Any]) -> T:
    """A `kind` from what it knows of `data`; other keys are passed over, lists become tuples.

    Raises:
        TypeError: `data` is no mapping, a field is missing, or its value is not what the field holds.
    """
    if not isinstance(data, Mapping):
        raise TypeError(f"{data!r:.40} stands where a {kind.__name__} must")
    checks = _checks(kind)  # type: ignore[arg-type]  # mypy does not know that a class is hashable
    values = {}
    for key, value in data.items():
        check = checks.get(key)
        if check is None:
            continue
        value = _tuples(value)
        if not check(value):
            raise TypeError(f"{kind.__name__}.{key} is {value!r:.40}")
        values[key] = value
    return kind(**values)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


@cache
def _checks(kind: type[Any]) -> dict[str, Callable[[Any], bool]]:
    hints = get_type_hints(kind)
    return {each.name: _check(hints[each.name]) for each in fields(kind)}


def _check(hint: Any) -> Callable[[Any], bool]:
    """Whether a value is of an annotated type; a whole number is a float too, a bool is no number."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        options = [_check(arg) for arg in args]
        return lambda value: any(option(value) for option in options)
    if origin is tuple:
        parts = [_check(arg) for arg in args if arg is not Ellipsis]
        if Ellipsis in args:
            return lambda value: type(value) is tuple and all(map(parts[0], value))
        return lambda value: (
            type(value) is tuple
            and len(value) == len(parts)
            and all(part(item) for part, item in zip(parts, value, strict=True))
        )
    if origin is not None and issubclass(origin, Mapping):
        of_key, of_value = map(_check, args)
        return lambda value: isinstance(value, Mapping) and all(of_key(k) and of_value(v) for k, v in value.items())
    if hint is float:
        return lambda value: type(value) in (int, float)
    if hint in (int, str, bool, NoneType):
        return lambda value: type(value) is hint
    return lambda value: isinstance(value, hint)
