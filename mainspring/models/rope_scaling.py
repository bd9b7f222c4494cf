"""Rotation frequencies for every kind of RoPE scaling that `transformers` has for these families."""

from __future__ import annotations

import torch
from torch import Tensor

from mainspring.models.config import ModelConfig
from mainspring.models.errors import ModelError

# Kinds whose frequencies depend on how long a sequence gets.
_LENGTH_DEPENDENT = ("dynamic", "longrope")
_UNSUPPORTED = ("proportional", "axial")


def inverse_frequencies(config: ModelConfig, max_positions: int | None = None) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] in fp32 on the CPU, and the factor on cos and sin.

    The table made from them is fixed, since cached keys keep the rotation they were written with. So the two
    kinds that depend on the length of a sequence (`dynamic`, `longrope`) are set once, for `max_positions`,
    the longest sequence in tokens that will be served: up to the length the model was trained on they equal
    the unscaled (short) frequencies, above it those that `transformers` uses for a sequence of that length.
    `max_positions` defaults to the length that the configuration states. Raises `ModelError` for a kind or a
    setting that is unknown.
    """
    rope = config.rope
    length = max_positions or config.max_position_embeddings
    if rope.kind == "default":
        exponents = (
            torch.arange(0, config.head_dim, 2, dtype=torch.int64, device="cpu").float() / config.head_dim
        )
        inv_freq, scaling = 1.0 / (rope.theta**exponents), 1.0
    else:
        inv_freq, scaling = _from_transformers(config, length)
    if rope.divisors:
        if len(rope.divisors) != config.head_dim // 2:
            raise ModelError(
                f"{len(rope.divisors)} RoPE frequency factors for head_dim {config.head_dim}; "
                f"{config.head_dim // 2} are needed"
            )
        inv_freq = inv_freq / torch.tensor(rope.divisors, dtype=torch.float32, device="cpu")
    return inv_freq.to(torch.float32), float(scaling)


def _from_transformers(config: ModelConfig, length: int) -> tuple[Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.rope
    if rope.kind not in ROPE_INIT_FUNCTIONS or rope.kind in _UNSUPPORTED:
        known = sorted({"default", *ROPE_INIT_FUNCTIONS} - set(_UNSUPPORTED))
        raise ModelError(f"RoPE scaling {rope.kind!r} is not supported; supported are {', '.join(known)}")
    settings = dict(rope.parameters)
    for name in ("short_factor", "long_factor"):
        if name in settings and len(settings[name]) != config.head_dim // 2:
            raise ModelError(
                f"RoPE scaling {rope.kind!r} has {len(settings[name])} numbers in {name}; head_dim "
                f"{config.head_dim} needs {config.head_dim // 2}"
            )
    try:
        # A plain carrier of the numbers: the functions read nothing else, whatever the family.
        carrier = LlamaConfig(
            hidden_size=config.num_heads * config.head_dim,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters={"rope_type": rope.kind, "rope_theta": rope.theta, **settings},
        )
        seq_len = length if rope.kind in _LENGTH_DEPENDENT else None
        return ROPE_INIT_FUNCTIONS[rope.kind](carrier, torch.device("cpu"), seq_len=seq_len)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"RoPE scaling {rope.kind!r} with {dict(rope.parameters)} is not valid: {error!r}"
        ) from error
