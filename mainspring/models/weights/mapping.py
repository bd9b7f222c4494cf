"""Checkpoint names -> places in the decoder's parameters, some of which hold several checkpoint tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mainspring.models.config import ModelConfig
from mainspring.models.decoder import Decoder
from mainspring.models.errors import ModelError
from mainspring.models.linear import Linear


@dataclass(frozen=True)
class Destination:
    """Rows `start : start + shape[0]` of the parameter `parameter`; `shape` is the checkpoint tensor's."""

    parameter: str
    start: int
    shape: tuple[int, ...]


def destinations(config: ModelConfig) -> dict[str, Destination]:
    """Every tensor that a checkpoint of this model must have, by its Hugging Face name."""
    hidden, inner, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    places: dict[str, Destination] = {}

    def plain(name: str, *shape: int) -> None:
        places[name] = Destination(name, 0, shape)

    def fused(prefix: str, into: str, parts: Iterable[tuple[str, int]], columns: int, bias: bool) -> None:
        start = 0
        for part, rows in parts:
            places[f"{prefix}.{part}.weight"] = Destination(f"{prefix}.{into}.weight", start, (rows, columns))
            if bias:
                places[f"{prefix}.{part}.bias"] = Destination(f"{prefix}.{into}.bias", start, (rows,))
            start += rows

    plain("model.embed_tokens.weight", config.vocab_size, hidden)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        plain(f"{layer}.input_layernorm.weight", hidden)
        plain(f"{layer}.post_attention_layernorm.weight", hidden)
        qkv = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
        fused(attention, "qkv_proj", qkv, hidden, config.qkv_bias)
        fused(attention, "o_proj", (("o_proj", hidden),), q, config.o_bias)
        fused(mlp, "gate_up_proj", (("gate_proj", inner), ("up_proj", inner)), hidden, config.mlp_bias)
        fused(mlp, "down_proj", (("down_proj", hidden),), inner, config.mlp_bias)
        if config.qk_norm:
            plain(f"{attention}.q_norm.weight", config.head_dim)
            plain(f"{attention}.k_norm.weight", config.head_dim)
    plain("model.norm.weight", hidden)
    if not config.tie_word_embeddings:
        plain("lm_head.weight", config.vocab_size, hidden)
    return places


def canonical_name(name: str, places: Mapping[str, Destination]) -> str | None:
    """The name under which `places` knows a checkpoint's tensor; None for a tensor that is safely left out.

    Checkpoints of the bare body lack the `model.` prefix. Left out are rotary frequencies, which are
    computed, and the copy of tied embeddings that some files carry. Raises `ModelError` for a tensor that has
    no place: to drop it in silence could mean wrong answers.
    """
    if name in places:
        return name
    if f"model.{name}" in places:
        return f"model.{name}"
    if name.endswith(("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")):
        return None
    if name == "lm_head.weight":
        return None
    raise ModelError(
        f"unexpected tensor {name}: the model that config.json describes has no place for it; check that the "
        "configuration belongs to these weights"
    )


def fill(model: Decoder, tensors: Iterable[tuple[str, Tensor]], *, origin: str, partial: bool = False) -> int:
    """Copy checkpoint tensors straight into the model's memory, converting dtype and device on the way.

    Addresses do not change. Returns the number of tensors that were written. Unless `partial`, every tensor
    of the model must come. Raises `ModelError`, naming the tensor: missing, without a place, or of another
    shape.
    """
    places = destinations(model.config)
    missing = dict.fromkeys(places)
    written = 0
    for given, tensor in tensors:
        name = canonical_name(given, places)
        if name is None:
            continue
        place = places[name]
        if tuple(tensor.shape) != place.shape:
            raise ModelError(
                f"tensor {given} in {origin} has shape {list(tensor.shape)}, the model needs "
                f"{list(place.shape)}; check that the configuration belongs to these weights"
            )
        if not tensor.is_floating_point():
            raise ModelError(
                f"tensor {given} in {origin} has dtype {tensor.dtype}; only floating-point weights can be "
                "loaded"
            )
        write_rows(model, place, tensor)
        missing.pop(name, None)
        written += 1
    if missing and not partial:
        names = list(missing)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise ModelError(
            f"{origin} lacks {len(names)} of {len(places)} tensors: {', '.join(names[:3])}{more}; "
            "the download may be incomplete, or the configuration belongs to another model"
        )
    return written


def write_rows(model: Decoder, place: Destination, tensor: Tensor) -> None:
    """Write `tensor` into its rows of a parameter, in place, whether that is plain or packed."""
    path, _, leaf = place.parameter.rpartition(".")
    owner = model.get_submodule(path)
    if isinstance(owner, Linear) and leaf == "weight":
        owner.write(place.start, tensor)
        return
    with torch.no_grad():
        getattr(owner, leaf).narrow(0, place.start, tensor.shape[0]).copy_(tensor)
    if (
        owner is model.model.embed_tokens
        and model.config.tie_word_embeddings
        and model.lm_head.kind != "dense"
    ):
        model.lm_head.write(place.start, tensor)
