"""What the decoder needs to know of a model, read from a `transformers` configuration."""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from mainspring.models.errors import ModelError

# Architecture (as `config.json` names it) -> the model type that `transformers` gives it.
SUPPORTED_ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class RopeSettings:
    """How positions become rotation angles.

    `kind` is the name that `transformers` uses (`default`, `linear`, `dynamic`, `yarn`, `longrope`,
    `llama3`), and `parameters` its further settings (`factor`, `low_freq_factor`, ...). `divisors` is what
    some GGUF files carry instead: one number for each of the `head_dim / 2` frequencies, by which it is
    divided; empty when absent.
    """

    theta: float = 10000.0
    kind: str = "default"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """The shape and the switches of one decoder-only model; sizes in elements, lengths in tokens.

    `sliding_windows` has one entry a layer: 0 is full attention, otherwise a query sees the last that many
    keys, itself among them. `checkpoint_dtype` is the dtype that the configuration states for the stored
    weights, None where it states none. `eos_token_ids` holds every id that ends an answer.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeSettings = field(default_factory=RopeSettings)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int, ...] = ()
    checkpoint_dtype: torch.dtype | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        """Check the sizes against each other; raises `ModelError`."""
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 < value < 1 << 31:
                raise ModelError(
                    f"the configuration gives {name} = {value!r}; it must be a whole number above 0 and below 2**31"
                )
        if not 0.0 <= self.rms_norm_eps < 1.0:
            raise ModelError(f"the configuration gives rms_norm_eps = {self.rms_norm_eps!r}; it must be in [0, 1)")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; "
                "every KV head must serve the same number of query heads"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim {self.head_dim} is odd; rotary embeddings need an even one")
        if not self.sliding_windows:
            object.__setattr__(self, "sliding_windows", (0,) * self.num_layers)
        if len(self.sliding_windows) != self.num_layers:
            raise ModelError(
                f"{len(self.sliding_windows)} sliding windows for {self.num_layers} layers; give one a layer"
            )

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key (and of the value) projection."""
        return self.num_kv_heads * self.head_dim


def unsupported_architecture(name: str) -> ModelError:
    """The error for a model that the decoder does not cover: its name, and the names that it does cover."""
    return ModelError(f"architecture {name} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}")


def as_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """`"bfloat16"`, `"torch.bfloat16"` or a dtype -> the dtype; None for one that no model runs in."""
    if name is None or isinstance(name, torch.dtype):
        return name if name in _DTYPES.values() else None
    return _DTYPES.get(str(name).removeprefix("torch."))


def eos_ids(value: int | list[int] | tuple[int, ...] | None) -> tuple[int, ...]:
    """`eos_token_id` in any of its spellings -> the ids, in order and without repeats.

    Raises `TypeError` for what is no whole number, a boolean among them.
    """
    if value is None:
        return ()
    ids = [value] if isinstance(value, int) else list(value)
    if any(isinstance(each, bool) for each in ids):
        raise TypeError(f"eos_token_id is {value!r}; it is a token id or a list of them")
    return tuple(dict.fromkeys(operator.index(each) for each in ids))


def check_raw_config(raw: Mapping[str, Any], origin: str) -> str:
    """Refuse what must be refused before anything is built from `config.json`; returns the architecture.

    Raises `ModelError` for remote code, for an architecture that is not supported and for quantized weights.
    """
    if raw.get("auto_map"):
        raise ModelError(
            f"{origin} wants its own Python code run (auto_map: {', '.join(sorted(raw['auto_map']))}), and "
            "remote code is never run; if the model is one of the supported architectures, remove auto_map "
            "from its config.json"
        )
    named = raw.get("architectures") or []
    if not named:
        by_type = {kind: name for name, kind in SUPPORTED_ARCHITECTURES.items()}
        model_type = raw.get("model_type")
        if model_type is None:
            raise ModelError(f"{origin} has neither architectures nor model_type; it is no model's configuration")
        if model_type not in by_type:
            raise unsupported_architecture(str(model_type))
        named = [by_type[model_type]]
    architecture = str(named[0])
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise unsupported_architecture(architecture)
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, Mapping) else quantization
        raise ModelError(
            f"{origin} has weights quantized with {method} (quantization_config), which is not supported; "
            "use the model's unquantized safetensors, or a GGUF file"
        )
    return architecture


@contextmanager
def _without_modeling_code() -> Iterator[None]:
    """Keep `transformers` from importing its models, generation and all that they need, for a docstring.

    The decorator of a configuration class looks for the name of the model's class (seen in 5.17, where that takes 4 to
    8 seconds), and goes without where it cannot be imported. Other threads import what they like.
    """
    thread, unwanted = threading.get_ident(), "transformers.models.auto.modeling_auto"

    class Refusal:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> None:
            if name == unwanted and threading.get_ident() == thread:
                raise ImportError(f"{name} is not needed to read a configuration")

    sys.meta_path.insert(0, Refusal)
    try:
        yield
    finally:
        sys.meta_path.remove(Refusal)


def config_from_raw(raw: Mapping[str, Any], origin: str) -> ModelConfig:
    """The content of a `config.json` -> `ModelConfig`.

    `origin` names the file in error messages. Raises `ModelError` (see `check_raw_config`), also for settings
    that `transformers` itself refuses.
    """
    architecture = check_raw_config(raw, origin)
    from transformers import AutoConfig

    fields = {key: value for key, value in raw.items() if key not in ("model_type", "transformers_version")}
    try:
        with _without_modeling_code():
            config = AutoConfig.for_model(SUPPORTED_ARCHITECTURES[architecture], **fields)
    except Exception as error:
        raise ModelError(f"{origin} is not a valid configuration of {architecture}: {error}") from error
    return config_from_transformers(config, architecture)


def config_from_transformers(config: Any, architecture: str | None = None) -> ModelConfig:
    """A configuration object of `transformers` (4 or 5: `rope_theta` or `rope_parameters`) -> `ModelConfig`.

    Raises `ModelError` when the architecture is not supported, or uses something that the decoder lacks.
    """
    if architecture is None:
        architecture = check_raw_config(config.to_dict(), type(config).__name__)
    kind = SUPPORTED_ARCHITECTURES[architecture]
    if config.hidden_act not in ("silu", "swish"):
        raise ModelError(f"hidden_act {config.hidden_act!r} is not supported; the decoder has silu only")
    num_heads = int(config.num_attention_heads)
    attention_bias = bool(getattr(config, "attention_bias", False)) and kind in ("llama", "qwen3")
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        intermediate_size=int(config.intermediate_size),
        num_layers=int(config.num_hidden_layers),
        num_heads=num_heads,
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or num_heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // num_heads),
        rms_norm_eps=float(config.rms_norm_eps),
        max_position_embeddings=int(config.max_position_embeddings),
        rope=_rope_settings(config),
        tie_word_embeddings=bool(config.tie_word_embeddings),
        qkv_bias=attention_bias or kind == "qwen2",
        o_bias=attention_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)) and kind == "llama",
        qk_norm=kind == "qwen3",
        sliding_windows=_sliding_windows(config, kind),
        checkpoint_dtype=as_dtype(getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)),
        bos_token_id=config.bos_token_id,
        eos_token_ids=eos_ids(config.eos_token_id),
        pad_token_id=config.pad_token_id,
    )


def _sliding_windows(config: Any, kind: str) -> tuple[int, ...]:
    """One window a layer: what the configuration turns on, not a `sliding_window` that is merely present."""
    layers = int(config.num_hidden_layers)
    window = int(getattr(config, "sliding_window", None) or 0)
    if kind == "mistral":
        return (window,) * layers
    if kind in ("qwen2", "qwen3") and getattr(config, "use_sliding_window", False):
        return tuple(window if name == "sliding_attention" else 0 for name in config.layer_types)
    return (0,) * layers


def _rope_settings(config: Any) -> RopeSettings:
    """Both spellings: `rope_theta` beside `rope_scaling` (transformers 4), and one `rope_parameters` (5)."""
    settings = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    nested = [value for value in settings.values() if isinstance(value, Mapping)]
    if nested:
        if any(dict(value) != dict(nested[0]) for value in nested):
            raise ModelError("rope_parameters differ between layer types; the decoder has one rotation for all layers")
        settings = dict(nested[0])
    theta = settings.pop("rope_theta", None) or getattr(config, "rope_theta", None) or 10000.0
    kind = settings.pop("rope_type", None) or settings.get("type") or "default"
    settings.pop("type", None)
    if settings.pop("partial_rotary_factor", None) not in (None, 1.0):
        raise ModelError("partial_rotary_factor below 1 is not supported; the decoder rotates whole heads")
    return RopeSettings(theta=float(theta), kind=str(kind), parameters=settings)
