"""Weights of a Hugging Face folder: safetensors files, one or many, by their index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mainspring.models.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def weight_files(folder: Path) -> dict[Path, list[str] | None]:
    """The files to read, each with the tensors to take from it (None: all of them).

    As `transformers` chooses: `model.safetensors`, else what the index lists, else the only safetensors file
    there is. Other files in the folder are strays and are left alone. Raises `ModelError` when there is
    nothing to load, a shard is missing, or the only weights are pickled.
    """
    if (folder / SINGLE_FILE).is_file():
        return {folder / SINGLE_FILE: None}
    if (folder / INDEX_FILE).is_file():
        return _from_index(folder)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return {files[0]: None}
    if files:
        raise ModelError(
            f"{folder} holds {len(files)} safetensors files but neither {SINGLE_FILE} nor {INDEX_FILE}, so "
            "it is not known which belong to the model; add the index"
        )
    pickled = [file.name for pattern in _PICKLED for file in sorted(folder.glob(pattern))]
    if pickled:
        raise ModelError(
            f"{folder} holds pickled weights only ({', '.join(pickled[:3])}), and unpickling can run any "
            "code, so they are refused; load the model in transformers and save it with save_pretrained to "
            "get safetensors"
        )
    raise ModelError(
        f"{folder} holds no weights: no {SINGLE_FILE}, no {INDEX_FILE}; the download may be incomplete"
    )


def _from_index(folder: Path) -> dict[Path, list[str] | None]:
    path = folder / INDEX_FILE
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        pairs = [(str(tensor), str(file)) for tensor, file in weight_map.items()]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{path} is damaged ({error!r}); download it again") from error
    files: dict[Path, list[str] | None] = {}
    for tensor, file in pairs:
        if Path(file).name != file:
            raise ModelError(f"{path} points outside its folder: {file!r} for {tensor}")
        names = files.setdefault(folder / file, [])
        if names is not None:
            names.append(tensor)
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ModelError(
            f"{path} lists {', '.join(absent)}, which is not in the folder; download the missing shards"
        )
    return files


def read_folder(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, CPU tensor) of every weight, one at a time, mapped from the file rather than read ahead."""
    for path, names in weight_files(folder).items():
        with _open(path) as file:
            present = set(file.keys())
            for name in names if names is not None else sorted(present):
                if name not in present:
                    raise ModelError(
                        f"{path} lacks tensor {name}, which the index places there; download it again"
                    )
                yield name, _tensor(path, file, name)


def _open(path: Path) -> Any:
    from safetensors import safe_open

    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except Exception as error:
        size = path.stat().st_size if path.exists() else 0
        raise ModelError(
            f"{path} ({size} bytes) cannot be read as safetensors, it is truncated or damaged ({error}); "
            "download it again"
        ) from error


def _tensor(path: Path, file: Any, name: str) -> Tensor:
    try:
        tensor: Tensor = file.get_tensor(name)
    except Exception as error:
        raise ModelError(f"tensor {name} in {path} cannot be read ({error}); download it again") from error
    return tensor


def heads_differ(folder: Path) -> bool:
    """Whether the files hold an `lm_head.weight` of other values than their token embeddings.

    Then a configuration that calls the two tied is wrong, and `transformers` keeps both.
    """
    found: dict[str, Tensor] = {}
    wanted = ("lm_head.weight", "model.embed_tokens.weight")
    for path, names in weight_files(folder).items():
        if names is not None and not any(name in names for name in wanted):
            continue
        with _open(path) as file:
            for name in set(file.keys()).intersection(wanted):
                found[name] = _tensor(path, file, name)
    return len(found) == 2 and not torch.equal(*found.values())
