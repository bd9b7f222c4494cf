"""A checkpoint of random weights on disk, so that start-up reads files as it does for its users."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from mainspring.models.config import ModelConfig

SHARD_BYTES = 4 << 30
#: Numbers that are really drawn; larger tensors repeat them, since reading does not depend on what is read.
DRAWN = 1 << 22


def write_checkpoint(config: ModelConfig, config_file: Path, folder: Path, dtype: torch.dtype) -> int:
    """Write ``config_file`` and random weights of its shape into ``folder``; returns the weights' bytes."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(config_file, folder / "config.json")
    generator = torch.Generator().manual_seed(0)
    drawn = torch.empty(DRAWN, dtype=torch.float32).normal_(0.0, 0.02, generator=generator).to(dtype)
    index: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    total = held = 0

    def flush() -> None:
        nonlocal held
        name = f"model-{len(set(index.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name)
        index.update(dict.fromkeys(shard, name))
        shard.clear()
        held = 0

    for name, shape in tensor_shapes(config):
        count = 1
        for size in shape:
            count *= size
        tensor = drawn.repeat(-(-count // DRAWN))[:count].reshape(shape).contiguous().clone()
        shard[name] = tensor
        held += tensor.nbytes
        total += tensor.nbytes
        if held >= SHARD_BYTES:
            flush()
    if shard:
        flush()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index}), encoding="utf-8"
    )
    return total


def tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of such a checkpoint, as Hugging Face names them."""
    hidden, inner = config.hidden_size, config.intermediate_size
    projections = {
        "self_attn.q_proj": (config.q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (config.kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (config.kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, config.q_size, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        for name, (out, into, has_bias) in projections.items():
            yield f"{prefix}.{name}.weight", (out, into)
            if has_bias:
                yield f"{prefix}.{name}.bias", (out,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", (hidden,)
        if config.qk_norm:
            for norm in ("q_norm", "k_norm"):
                yield f"{prefix}.self_attn.{norm}.weight", (config.head_dim,)
    yield "model.norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)
