"""The floor of a decode step: the bytes that it must read, over the rate at which the device can read.

Every weight is read once a step, except an embedding table that is not also the head: of that only the rows of the
step's tokens. Of the KV cache, each sequence's keys and values are read once. Activations, logits and what the step
writes are left out: a perfect step would keep them on chip.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mainspring.models.config import ModelConfig

#: The matrix products of a layer, in the order in which a step runs them; then comes the head.
LAYER_PRODUCTS = ("qkv", "o", "gate_up", "down")
HEAD = "head"


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one decode step must read: weights, and keys and values."""

    weights: int
    kv: int

    @property
    def total(self) -> int:
        """Both together."""
        return self.weights + self.kv

    def floor_ms(self, bytes_per_second: float) -> float:
        """The least time of the step, in milliseconds."""
        return 1e3 * self.total / bytes_per_second


def product_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """``(out_features, in_features)`` of each product of one layer, and of the head."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "qkv": (config.q_size + 2 * config.kv_size, hidden),
        "o": (hidden, config.q_size),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        HEAD: (config.vocab_size, hidden),
    }


def weight_bytes(config: ModelConfig, itemsize: int, batch: int = 1) -> int:
    """Bytes of weights that a step of ``batch`` rows reads, at ``itemsize`` bytes an element."""
    shapes = product_shapes(config)
    has_bias = {"qkv": config.qkv_bias, "o": config.o_bias, "gate_up": config.mlp_bias, "down": config.mlp_bias}
    layer = sum(shapes[name][0] * (shapes[name][1] + has_bias[name]) for name in LAYER_PRODUCTS)
    layer += 2 * config.hidden_size + (2 * config.head_dim if config.qk_norm else 0)
    head = config.vocab_size * config.hidden_size
    embedding = 0 if config.tie_word_embeddings else batch * config.hidden_size
    return itemsize * (config.num_layers * layer + config.hidden_size + head + embedding)


def kv_bytes(config: ModelConfig, itemsize: int, context: int, batch: int = 1) -> int:
    """Bytes of keys and values that ``batch`` sequences of ``context`` tokens read in one step."""
    tokens = sum(min(window, context) if window else context for window in config.sliding_windows)
    return 2 * itemsize * config.kv_size * tokens * batch


def step_bytes(config: ModelConfig, itemsize: int, context: int, batch: int) -> StepBytes:
    """What one decode step of ``batch`` sequences, each with ``context`` tokens before it, must read."""
    return StepBytes(weight_bytes(config, itemsize, batch), kv_bytes(config, itemsize, context, batch))
