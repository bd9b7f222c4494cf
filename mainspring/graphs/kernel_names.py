"""Kernel names as a person would say them, and what they tell of a kernel's parameters."""

from __future__ import annotations

import re
import sys
from functools import lru_cache

import torch

__all__ = ["demangle", "has_typed_pointers", "parameter_types", "readable"]

_CLOSING = {"<": ">", "(": ")", "[": "]", "{": "}"}
_NAMESPACES = re.compile(r"\b(?:\w+|\(anonymous namespace\))::")
_SPECIALISED = re.compile(r"_(?:\d+[cde]*)+$")
_LENGTH = re.compile(r"\d+")
_LIBRARIES = re.compile("cublas|cudnn|cusparse|cusolver|cufft|cutlass|gemm|gemv")
_OURS = "mainspring_"
_TELLING = re.compile(r"\b(\w+(?:Functor\w*|Ops?|_kernel_cuda|_kernel_impl))\b")


@lru_cache(maxsize=4096)
def demangle(symbol: str) -> str:
    """A C++ name with its parameters, from the driver's; other names as they are."""
    return str(torch._C._demangle(symbol)) if symbol.startswith("_Z") else symbol


@lru_cache(maxsize=4096)
def readable(symbol: str) -> str:
    """A short name: without return type, namespaces, parameters and what templates spell out at length.

    ATen's element-wise kernels keep the functor that tells them apart, `elementwise_kernel<MulFunctor>`; CUTLASS's
    wrappers give way to the kernel that they wrap; Triton's names are as they were written.
    """
    name = demangle(symbol)
    if name == symbol and symbol.startswith("_Z"):
        return _last_identifier(symbol)
    if name == symbol and "(" not in name and "<" not in name:
        return _SPECIALISED.sub("", name) or name
    name = _without_parameters(name).strip()
    name = name.removeprefix("void ").removeprefix("static ").removeprefix("__global__ ")
    base, _, rest = name.partition("<")
    base = _NAMESPACES.sub("", base).rsplit(" ", 1)[-1] or base
    arguments = _split(rest[: rest.rfind(">")]) if rest else []
    if base in ("Kernel", "Kernel2", "device_kernel", "kernel") and arguments:
        wrapped = _NAMESPACES.sub("", arguments[0].partition("<")[0]).strip()
        return wrapped or base
    telling = _TELLING.findall(rest)
    if telling:
        return f"{base}<{telling[-1]}>"
    plain = [argument for argument in arguments if re.fullmatch(r"[\w:\s]+", argument.strip())]
    kept = [_NAMESPACES.sub("", argument).strip() for argument in plain[:3]]
    return f"{base}<{', '.join(kept)}>" if kept else base


@lru_cache(maxsize=4096)
def parameter_types(symbol: str) -> tuple[str, ...] | None:
    """Types of a C++ kernel's parameters; None where the name does not tell them (Triton, C)."""
    name = demangle(symbol)
    if name == symbol or not name.endswith(")"):
        return None
    inside = name[len(_without_parameters(name)) + 1 : -1].strip()
    return tuple(part.strip() for part in _split(inside)) if inside not in ("", "void") else ()


def has_typed_pointers(symbol: str, told: bool) -> bool:
    """Whether a kernel follows every pointer among its parameters, so that one into nothing is a fault.

    True for Triton's kernels, for our own, and for C++ kernels whose name tells the parameters' types. False for
    others, where 8 bytes may be a number or left as they were, and for those of NVIDIA's libraries, which also take
    addresses of scalars on the host that they do not follow (`cublasLt::splitKreduce_kernel`, `sgemm_largek_lds64`).

    Args:
        symbol: the name as the driver has it.
        told: the name tells the type of each parameter.
    """
    if symbol.startswith("_Z"):
        return told and _LIBRARIES.search(symbol) is None
    return symbol.startswith(_OURS) or _is_triton(symbol)


def _is_triton(symbol: str) -> bool:
    """Whether Triton has a kernel of that name, in some module or in its own registry."""
    triton = sys.modules.get("triton.runtime.jit")
    if triton is None:
        return False
    names = {name.rpartition(".")[2] for name in (symbol, _SPECIALISED.sub("", symbol))}
    known = getattr(triton, "_triton_jit_function_registry", {}).values()
    if any(getattr(function, "__name__", None) in names for function in list(known)):
        return True
    spaces = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
    return any(isinstance(space.get(name), triton.KernelInterface) for space in spaces for name in names)


def _last_identifier(symbol: str) -> str:
    """The function's own name in a mangled name that the demangler does not know."""
    at, found = 3 if symbol.startswith("_ZN") else 2, symbol
    while (length := _LENGTH.match(symbol, at)) is not None:
        start, at = length.end(), length.end() + int(length.group())
        if not symbol[start:at].startswith("_GLOBAL__N_"):
            found = symbol[start:at]
    return found


def _without_parameters(name: str) -> str:
    """`name` up to the parenthesis that its last one closes."""
    if not name.endswith(")"):
        return name
    depth = 0
    for at in range(len(name) - 1, -1, -1):
        depth += (name[at] == ")") - (name[at] == "(")
        if depth == 0:
            return name[:at]
    return name


def _split(text: str) -> list[str]:
    """`text` at its commas, but for those within brackets."""
    parts, start, stack = [], 0, []
    for at, character in enumerate(text):
        if character in _CLOSING:
            stack.append(_CLOSING[character])
        elif stack and character == stack[-1] and text[at - 1 : at + 1] != "->":
            stack.pop()
        elif character == "," and not stack:
            parts.append(text[start:at])
            start = at + 1
    return [*parts, text[start:]]
