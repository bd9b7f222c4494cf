"""From a found model to one that can run: configuration, generation defaults, weights."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mainspring.models.config import ModelConfig, config_from_raw, eos_ids
from mainspring.models.decoder import Decoder
from mainspring.models.errors import ModelError
from mainspring.models.gguf_file import gguf_config
from mainspring.models.source import ModelSource
from mainspring.models.weights.dummy import fill_dummy
from mainspring.models.weights.gguf import read_gguf
from mainspring.models.weights.mapping import fill
from mainspring.models.weights.safetensors import heads_differ, read_folder

logger = logging.getLogger(__name__)

SUPPORTED_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_config(source: ModelSource) -> ModelConfig:
    """The model's configuration; where `generation_config.json` names ids that end an answer, those count.

    Raises `ModelError` for a model that is damaged, not supported, or wants remote code.
    """
    try:
        return _read_config(source)
    except (TypeError, ValueError, KeyError, OverflowError, AttributeError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(
            f"the configuration of {source.name} holds something that cannot be understood "
            f"({type(error).__name__}: {error}); download it again"
        ) from error


def _read_config(source: ModelSource) -> ModelConfig:
    if source.kind == "gguf":
        return gguf_config(source.gguf)
    path = source.path / "config.json"
    config = config_from_raw(_read_json(path), str(path))
    ends = eos_ids(load_generation_config(source).get("eos_token_id"))
    return replace(config, eos_token_ids=ends) if ends else config


def load_generation_config(source: ModelSource) -> dict[str, Any]:
    """The authors' defaults for sampling (`generation_config.json`); empty where there are none."""
    path = source.path / "generation_config.json"
    return _read_json(path) if source.kind == "folder" and path.is_file() else {}


def resolve_dtype(dtype: str | torch.dtype, config: ModelConfig, device: torch.device | str) -> torch.dtype:
    """`"auto"` -> float32 on a CPU, else the checkpoint's own dtype (bfloat16 for none or float32).

    A name or dtype that models do not run in raises `ModelError`.
    """
    if dtype == "auto":
        if torch.device(device).type == "cpu":
            return torch.float32
        stated = config.checkpoint_dtype
        return stated if stated in (torch.bfloat16, torch.float16) else torch.bfloat16
    chosen = SUPPORTED_DTYPES.get(str(dtype).removeprefix("torch."))
    if chosen is None:
        raise ModelError(f"dtype {dtype!r} is not supported; choose auto, {', '.join(SUPPORTED_DTYPES)}")
    return chosen


def load_model(
    source: ModelSource,
    *,
    dtype: str | torch.dtype = "auto",
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    seed: int = 0,
    max_model_len: int | None = None,
    pack: bool = True,
) -> Decoder:
    """Build the decoder on `device` and load its weights tensor by tensor, so that no second copy exists.

    `load_format` "auto" reads the source's weights, "dummy" fills in random ones from `seed`. `max_model_len`
    is the longest sequence in tokens that will be run (default: what the configuration states). `pack` lets a
    CPU store its projections in the layout that it multiplies fastest. Raises `ModelError`.
    """
    if load_format not in ("auto", "dummy"):
        raise ModelError(f"load_format {load_format!r} is not known; choose auto or dummy")
    if max_model_len is not None and max_model_len < 1:
        raise ModelError(f"max_model_len {max_model_len} must be at least 1 token")
    config = load_config(source)
    if load_format == "auto" and source.kind == "folder" and config.tie_word_embeddings and heads_differ(source.path):
        logger.warning(
            "%s calls its embeddings tied, but its lm_head.weight differs from them; both are used. "
            "Set tie_word_embeddings to false in config.json.",
            source.name,
        )
        config = replace(config, tie_word_embeddings=False)
    model = Decoder(config, dtype=resolve_dtype(dtype, config, device), device=device, max_positions=max_model_len)
    if load_format == "dummy":
        fill_dummy(model, seed)
    elif source.kind == "gguf":
        fill(model, read_gguf(source.gguf, config), origin=str(source.path))
    else:
        fill(model, read_folder(source.path), origin=str(source.path))
    if pack:
        model.pack()
    return model.eval()


def update_weights(model: Decoder, tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Replace weights in place, by their Hugging Face names; any subset, in any order, from any device.

    Addresses do not change, so recordings that read the weights stay valid. Returns how many tensors were
    written. Raises `ModelError` for a name without a place or another shape; tensors before the faulty one
    are then written.
    """
    return fill(model, tensors, origin="update_weights", partial=True)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds {type(content).__name__}, not an object; download it again")
    return content
