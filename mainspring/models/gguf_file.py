"""A GGUF file: its metadata, and the model configuration that follows from it.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from mainspring.models.config import ModelConfig, RopeSettings, eos_ids
from mainspring.models.errors import ModelError

# `general.architecture` -> the architecture that a config.json would name (Mistral models are written as
# llama).
GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_ROPE_FACTORS = "rope_freqs.weight"
_MISSING = object()


class GgufFile:
    """One opened GGUF model (memory-mapped), all its parts when it is split into several files.

    `tensors` maps names to the `gguf` package's reader tensors. Raises `ModelError` when a file is truncated,
    damaged, or one of its parts is missing.
    """

    def __init__(self, path: Path) -> None:
        """Open and parse `path`."""
        self.path = path
        self._reader = _open(path)
        self._check_extent(path, self._reader)
        self._values: dict[str, Any] = {}
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        for part in self._other_parts():
            reader = _open(part)
            self._check_extent(part, reader)
            self.tensors.update({tensor.name: tensor for tensor in reader.tensors})

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """The metadata value of `key`; without a default a missing key is a `ModelError`."""
        if key not in self._values:
            field = self._reader.fields.get(key)
            if field is None:
                if default is _MISSING:
                    raise ModelError(f"{self.path} lacks the metadata key {key}; the file is incomplete")
                return default
            self._values[key] = field.contents()
        return self._values[key]

    @property
    def architecture(self) -> str:
        """`general.architecture`, e.g. `llama`."""
        return str(self.get("general.architecture"))

    def _other_parts(self) -> list[Path]:
        count = int(self.get("split.count", 0) or 0)
        if count < 2:
            return []
        match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", self.path.name)
        if match is None or int(match[2]) != 1:
            raise ModelError(
                f"{self.path} is one of {count} parts; name the first, ...-00001-of-{count:05d}.gguf"
            )
        parts = [self.path.with_name(f"{match[1]}-{i:05d}-of-{match[3]}.gguf") for i in range(2, count + 1)]
        for part in parts:
            if not part.is_file():
                raise ModelError(f"{self.path} has {count} parts and {part.name} is missing beside it")
        return parts

    @staticmethod
    def _check_extent(path: Path, reader: Any) -> None:
        size = path.stat().st_size
        for tensor in reader.tensors:
            end = int(tensor.data_offset) + int(tensor.n_bytes)
            if end > size:
                raise ModelError(
                    f"{path} is truncated: tensor {tensor.name} ends at byte {end}, the file has {size}; "
                    "download it again"
                )


def _open(path: Path) -> Any:
    import gguf

    try:
        return gguf.GGUFReader(str(path), "r")
    except Exception as error:
        raise ModelError(
            f"{path} cannot be read as GGUF, it is truncated or damaged ({type(error).__name__}: {error}); "
            "download it again"
        ) from error


def gguf_config(file: GgufFile) -> ModelConfig:
    """The `ModelConfig` that the metadata of a GGUF file describes; raises `ModelError`."""
    kind = file.architecture
    if kind not in GGUF_ARCHITECTURES:
        known = ", ".join(f"{key} ({GGUF_ARCHITECTURES[key]})" for key in GGUF_ARCHITECTURES)
        raise ModelError(f"GGUF architecture {kind!r} is not supported; supported are {known}")
    if int(file.get(f"{kind}.expert_count", 0) or 0):
        raise ModelError(
            f"{file.path} is a mixture of experts, which is not supported; the decoder has dense layers"
        )
    hidden = int(file.get(f"{kind}.embedding_length"))
    heads = _per_layer(file, f"{kind}.attention.head_count")
    kv_heads = _per_layer(file, f"{kind}.attention.head_count_kv", heads)
    layers = int(file.get(f"{kind}.block_count"))
    vocab = file.tensors["token_embd.weight"].shape[-1] if "token_embd.weight" in file.tensors else 0
    key_length = file.get(f"{kind}.attention.key_length", None)
    rotated = file.get(f"{kind}.rope.dimension_count", None)
    head_dim = int(key_length or (rotated if kind == "llama" else None) or hidden // heads)
    if rotated is not None and int(rotated) != head_dim:
        raise ModelError(
            f"{file.path} rotates {rotated} of {head_dim} head elements; the decoder rotates whole heads"
        )
    window = int(file.get(f"{kind}.attention.sliding_window", 0) or 0)
    qkv_bias = "blk.0.attn_q.bias" in file.tensors
    pad = file.get("tokenizer.ggml.padding_token_id", None)
    bos = file.get("tokenizer.ggml.bos_token_id", None)
    ends = [file.get(f"tokenizer.ggml.{end}_token_id", None) for end in ("eos", "eot", "eom")]
    architecture = GGUF_ARCHITECTURES[kind]
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(vocab or file.get(f"{kind}.vocab_size")),
        hidden_size=hidden,
        intermediate_size=_per_layer(file, f"{kind}.feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(file.get(f"{kind}.attention.layer_norm_rms_epsilon")),
        max_position_embeddings=int(file.get(f"{kind}.context_length")),
        rope=_rope(file, kind),
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias=qkv_bias,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm=kind == "qwen3",
        sliding_windows=(window,) * layers,
        checkpoint_dtype=None,
        bos_token_id=None if bos is None else int(bos),
        eos_token_ids=eos_ids([int(end) for end in ends if end is not None]),
        pad_token_id=None if pad is None else int(pad),
    )


def _per_layer(file: GgufFile, key: str, default: int | None = None) -> int:
    """A size that GGUF allows to differ from layer to layer; here it must not."""
    value = file.get(key, _MISSING if default is None else default)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise ModelError(f"{file.path} has another {key} in each layer, which is not supported")
        value = value[0]
    return int(value)


def _rope(file: GgufFile, kind: str) -> RopeSettings:
    prefix = f"{kind}.rope.scaling"
    theta = float(file.get(f"{kind}.rope.freq_base", 10000.0))
    scaling = str(file.get(f"{prefix}.type", "none"))
    factor = float(file.get(f"{prefix}.factor", 0.0) or file.get(f"{kind}.rope.scale_linear", 0.0) or 0.0)
    divisors: tuple[float, ...] = ()
    if _ROPE_FACTORS in file.tensors:
        data = np.asarray(file.tensors[_ROPE_FACTORS].data, dtype=np.float32)
        divisors = tuple(float(value) for value in data.reshape(-1))
    if scaling == "none" and factor > 1.0 and f"{kind}.rope.scale_linear" in file._reader.fields:
        scaling = "linear"
    if scaling == "linear" and factor > 0.0:
        return RopeSettings(theta, "linear", {"factor": factor}, divisors)
    if scaling == "yarn" and factor > 0.0:
        parameters: dict[str, Any] = {"factor": factor}
        original = file.get(f"{prefix}.original_context_length", None)
        if original is not None:
            parameters["original_max_position_embeddings"] = int(original)
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            value = file.get(f"{prefix}.{theirs}", None)
            if value is not None:
                parameters[ours] = float(value)
        return RopeSettings(theta, "yarn", parameters, divisors)
    if scaling not in ("none", "linear"):
        raise ModelError(
            f"{file.path} scales RoPE by {scaling!r}; supported in GGUF are none, linear and yarn"
        )
    return RopeSettings(theta, "default", {}, divisors)
