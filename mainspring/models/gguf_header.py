"""The header of a GGUF file: metadata and where each tensor lies.

Read here rather than with the `gguf` package's reader, which makes several arrays for every token of the vocabulary
and takes seconds for what takes a tenth of one. The types and their dequantization are the package's. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mainspring.models.errors import ModelError

# Value type -> struct code. 8 is a string, 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: `shape` as PyTorch has it (rows first), `kind` the ggml type's name, `data` its stored bytes.

    `data` is a uint8 view [rows..., bytes of a row] of the mapped file.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    data: NDArray[np.uint8]


class _Cursor:
    """Reads little-endian values one after the other; running past the end is a `struct.error`."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.at = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.buffer, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def raw(self, count: int) -> bytes:
        if count > len(self.buffer) - self.at:
            raise struct.error(f"{count} bytes wanted at byte {self.at} of {len(self.buffer)}")
        self.at += count
        return self.buffer[self.at - count : self.at]

    def string(self) -> str:
        return self.raw(self.scalar("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        inner, count = self.scalar("I"), self.scalar("Q")
        if inner in (_STRING, _ARRAY):
            return [self.value(inner) for _ in range(count)]
        dtype = np.dtype(f"<{_SCALARS[inner]}")
        return np.frombuffer(self.raw(count * dtype.itemsize), dtype).tolist()


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """(metadata by key, tensors by name) of one file, which stays mapped while its tensors are in use.

    Raises `ModelError` when the file is truncated or damaged, of another version, or has a type that is not known.
    """
    try:
        with path.open("rb") as file:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(buffer)
        magic, version = cursor.raw(4), cursor.scalar("I")
        if magic == b"GGUF" and version not in _VERSIONS:
            raise ModelError(
                f"{path} is GGUF version {version}, or big-endian; versions {_VERSIONS} in little-endian can be read, "
                "so convert the model again"
            )
        num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.scalar("I"))
        infos = []
        for _ in range(num_tensors):
            name = cursor.string()
            sizes = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
            infos.append((name, tuple(reversed(sizes)), cursor.scalar("I"), cursor.scalar("Q")))
    except (struct.error, ValueError, KeyError, OverflowError, MemoryError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(
            f"{path} cannot be read as GGUF, its header is truncated or damaged ({error}); download it again"
        ) from error
    alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT)) or _DEFAULT_ALIGNMENT
    start = -(-cursor.at // alignment) * alignment
    content = np.frombuffer(buffer, dtype=np.uint8)
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in infos:
        if name in tensors:
            raise ModelError(f"{path} has two tensors named {name}; it is damaged")
        tensors[name] = _tensor(path, content, name, shape, kind, start + offset)
    return metadata, tensors


def _tensor(
    path: Path, content: NDArray[np.uint8], name: str, shape: tuple[int, ...], kind: int, start: int
) -> GgufTensor:
    import gguf

    try:
        quantization = gguf.GGMLQuantizationType(kind)
        block, size = gguf.constants.GGML_QUANT_SIZES[quantization]
    except (ValueError, KeyError) as error:
        raise ModelError(
            f"tensor {name} in {path} has ggml type {kind}, which the installed gguf package does not know; "
            "a newer one may"
        ) from error
    if not shape or shape[-1] % block:
        raise ModelError(f"tensor {name} in {path} has shape {list(shape)}, which is no multiple of {block} columns")
    stored = (*shape[:-1], shape[-1] // block * size)
    end = start + int(np.prod(stored, dtype=np.uint64))
    if end > content.size:
        raise ModelError(
            f"{path} is truncated: tensor {name} ends at byte {end}, the file has {content.size}; download it again"
        )
    return GgufTensor(name, shape, quantization.name, content[start:end].reshape(stored))


def dequantize(tensor: GgufTensor) -> NDArray[np.float32]:
    """The tensor's values in fp32, in its shape; raises `ModelError` where the `gguf` package cannot."""
    import gguf

    plain = {"F64": np.float64, "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64}
    try:
        if tensor.kind in plain:
            values: NDArray[Any] = tensor.data.view(plain[tensor.kind])
        else:
            values = gguf.quants.dequantize(tensor.data, gguf.GGMLQuantizationType[tensor.kind])
    except NotImplementedError as error:
        raise ModelError(
            f"tensor {tensor.name} is quantized as {tensor.kind}, which the gguf package cannot dequantize; "
            "use another quantization of this model"
        ) from error
    return np.asarray(values, dtype=np.float32).reshape(tensor.shape)
