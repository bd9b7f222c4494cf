"""The models that are measured: named shapes with random weights, the embedded model, or a folder."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

EMBEDDED_MODEL = "smollm2"


@dataclass(frozen=True)
class Shape:
    """A known model's name, as tables show it, and its ``config.json``."""

    title: str
    config: Mapping[str, Any]


@dataclass(frozen=True)
class BenchModel:
    """A model that can be measured.

    ``path`` is what ``LLM(model=...)`` takes, ``load_format`` is ``auto`` where there are weights and ``dummy`` where
    they are made up, ``title`` is the name in tables and records.
    """

    title: str
    path: str
    load_format: str


def _config(architecture: str, model_type: str, **sizes: Any) -> Mapping[str, Any]:
    common = {"architectures": [architecture], "model_type": model_type, "hidden_act": "silu", "attention_bias": False}
    return MappingProxyType({**common, **sizes, "torch_dtype": "bfloat16"})


#: What users type -> the shape. Sizes are those of the published checkpoints.
SHAPES: Mapping[str, Shape] = {
    "qwen3-0.6b": Shape(
        "Qwen3-0.6B",
        _config(
            "Qwen3ForCausalLM",
            "qwen3",
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151936,
            tie_word_embeddings=True,
            max_position_embeddings=40960,
            rms_norm_eps=1e-6,
            rope_theta=1000000.0,
            bos_token_id=151643,
            eos_token_id=151645,
        ),
    ),
    "tiny": Shape(
        "Tiny",
        _config(
            "LlamaForCausalLM",
            "llama",
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            vocab_size=32000,
            tie_word_embeddings=True,
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
    "llama-3.2-1b": Shape(
        "Llama-3.2-1B",
        _config(
            "LlamaForCausalLM",
            "llama",
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
            vocab_size=128256,
            tie_word_embeddings=True,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
            bos_token_id=128000,
            eos_token_id=128001,
        ),
    ),
    "llama-3.1-8b": Shape(
        "Llama-3.1-8B",
        _config(
            "LlamaForCausalLM",
            "llama",
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=128256,
            tie_word_embeddings=False,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
            bos_token_id=128000,
            eos_token_id=128001,
        ),
    ),
}


@contextmanager
def open_model(name: str) -> Iterator[BenchModel]:
    """Find a model by name or folder; a named shape's ``config.json`` lives in a temporary folder meanwhile.

    A folder without weights is measured with random ones. Raises ``ValueError`` for a name that is neither.
    """
    shape = SHAPES.get(name.lower())
    if shape is not None:
        with tempfile.TemporaryDirectory(prefix="mainspring-bench-") as folder:
            (Path(folder) / "config.json").write_text(json.dumps(dict(shape.config)), encoding="utf-8")
            yield BenchModel(shape.title, folder, "dummy")
    elif name.lower() == EMBEDDED_MODEL:
        yield BenchModel("SmolLM2-135M", EMBEDDED_MODEL, "auto")
    else:
        yield _from_path(name)


def _from_path(name: str) -> BenchModel:
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return BenchModel(path.stem, str(path), "auto")
    if path.is_dir() and (path / "config.json").is_file():
        has_weights = any(path.glob("*.safetensors"))
        return BenchModel(path.resolve().name, str(path), "auto" if has_weights else "dummy")
    if path.is_dir() and any(path.glob("*.gguf")):
        return BenchModel(path.resolve().name, str(path), "auto")
    known = ", ".join([*SHAPES, EMBEDDED_MODEL])
    raise ValueError(f"model {name!r} is not known here; give {known}, or a folder with a config.json")
