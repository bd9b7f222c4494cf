"""Weights of a GGUF file, dequantized by the `gguf` package, under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mainspring.models.config import ModelConfig
from mainspring.models.errors import ModelError
from mainspring.models.gguf_file import GgufFile

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Frequency divisors are part of the configuration (RopeSettings), not of the weights.
_NOT_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def hugging_face_name(name: str) -> str | None:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None for what is no weight."""
    if name in _NOT_WEIGHTS:
        return None
    stem, _, leaf = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{leaf}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{leaf}"
    if stem.endswith("attn_rot_embd"):
        return None
    raise ModelError(f"unexpected tensor {name} in the GGUF file: the decoder has no place for it")


def read_gguf(file: GgufFile, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, fp32 CPU tensor) of every weight, dequantized one at a time.

    Files of the llama architecture store query and key rows with the two halves of each head interleaved;
    they are put back. Raises `ModelError` for a quantization type that the `gguf` package cannot dequantize.
    """
    interleaved = file.architecture == "llama"
    for tensor in file.tensors.values():
        name = hugging_face_name(tensor.name)
        if name is None:
            continue
        values = dequantize(file, tensor)
        if interleaved and ".self_attn.q_proj." in name:
            values = deinterleave(values, config.num_heads)
        elif interleaved and ".self_attn.k_proj." in name:
            values = deinterleave(values, config.num_kv_heads)
        yield name, torch.from_numpy(np.require(values, requirements=["C", "W"]))


def dequantize(file: GgufFile, tensor: object) -> NDArray[np.float32]:
    """One reader tensor -> fp32, its shape as PyTorch has it (rows first)."""
    import gguf

    kind = tensor.tensor_type  # type: ignore[attr-defined]
    name = tensor.name  # type: ignore[attr-defined]
    data = tensor.data  # type: ignore[attr-defined]
    try:
        if kind.name in ("F64", "I8", "I16", "I32", "I64"):
            values = np.asarray(data)
        else:
            values = gguf.quants.dequantize(data, kind)
    except NotImplementedError as error:
        raise ModelError(
            f"tensor {name} in {file.path} is quantized as {kind.name}, which the gguf package cannot "
            "dequantize; use another quantization of this model"
        ) from error
    shape = tuple(int(size) for size in reversed(tensor.shape.tolist()))  # type: ignore[attr-defined]
    return np.asarray(values, dtype=np.float32).reshape(shape)


def deinterleave(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo the row order of llama GGUF files: pairs (i, i + half) of each head lie side by side there."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
