"""Configurations: both spellings, what is switched on, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mainspring.models.config import ModelConfig, RopeSettings, config_from_raw
from mainspring.models.errors import ModelError
from mainspring.models.loader import load_config, load_generation_config, load_model, resolve_dtype
from mainspring.models.rope_scaling import inverse_frequencies
from mainspring.models.source import resolve

RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 512,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
}


def parse(**changes: Any) -> ModelConfig:
    return config_from_raw({**RAW, **changes}, "config.json")


def test_rope_theta_and_rope_parameters_mean_the_same() -> None:
    old = parse(rope_theta=1e5)
    new = parse(rope_parameters={"rope_type": "default", "rope_theta": 1e5})
    assert old.rope == new.rope == RopeSettings(theta=1e5)


def test_rope_scaling_and_rope_parameters_mean_the_same() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = parse(rope_theta=1e5, rope_scaling={"rope_type": "llama3", **scaling})
    older = parse(rope_theta=1e5, rope_scaling={"type": "llama3", **scaling})
    new = parse(rope_parameters={"rope_type": "llama3", "rope_theta": 1e5, **scaling})
    assert old.rope == older.rope == new.rope
    assert new.rope.kind == "llama3"


def test_known_frequencies_of_llama3_and_linear_scaling() -> None:
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    inv_freq, scaling = inverse_frequencies(parse(rope_theta=1e5, rope_scaling=llama3))
    assert inv_freq[31].item() == pytest.approx(1.79127e-6, rel=1e-5)
    assert scaling == 1.0
    inv_freq, _ = inverse_frequencies(parse(rope_theta=1e5, rope_scaling={"type": "linear", "factor": 4.0}))
    assert inv_freq[0].item() == 0.25


@pytest.mark.parametrize("length", [100, 600])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "longrope",
            "short_factor": [1.0 + i / 50 for i in range(32)],
            "long_factor": [2.0 + i for i in range(32)],
            "original_max_position_embeddings": 256,
        },
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_every_kind_of_scaling_equals_transformers_at_that_length(scaling: dict[str, Any], length: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    fields = {key: value for key, value in RAW.items() if key not in ("architectures", "model_type")}
    fields["max_position_embeddings"] = 512
    reference = LlamaRotaryEmbedding(LlamaConfig(**fields, rope_parameters={"rope_theta": 1e4, **scaling}))
    cos, _ = reference(torch.zeros(1), torch.arange(length)[None])
    config = parse(max_position_embeddings=512, rope_theta=1e4, rope_scaling=scaling)
    inv_freq, factor = inverse_frequencies(config, length)
    ours = torch.outer(torch.arange(length).float(), inv_freq).cos() * factor
    torch.testing.assert_close(ours, cos[0, :, :32], atol=1e-5, rtol=0)


def test_an_unknown_scaling_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"'spiral'.*supported are default, dynamic, linear, llama3"):
        inverse_frequencies(parse(rope_scaling={"rope_type": "spiral", "factor": 2.0}))


def test_a_scaling_without_its_settings_is_refused() -> None:
    with pytest.raises(ModelError, match="'linear'.*factor"):
        inverse_frequencies(parse(rope_scaling={"rope_type": "linear"}))
    with pytest.raises(ModelError, match="1 numbers in short_factor; head_dim 64 needs 32"):
        short = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0], "factor": 2.0}
        inverse_frequencies(parse(rope_scaling=short))


def test_windows_only_where_they_are_turned_on() -> None:
    assert parse(sliding_window=8).sliding_windows == (0, 0)
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    assert parse(**mistral, sliding_window=8).sliding_windows == (8, 8)
    assert parse(**mistral, sliding_window=None).sliding_windows == (0, 0)
    qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 8}
    assert parse(**qwen, max_window_layers=1).sliding_windows == (0, 0)
    assert parse(**qwen, max_window_layers=1, use_sliding_window=True).sliding_windows == (0, 8)


def test_an_unsupported_architecture_is_named_with_the_supported_ones() -> None:
    with pytest.raises(ModelError, match="GPT2LMHeadModel is not supported; supported are LlamaForCausalLM"):
        parse(architectures=["GPT2LMHeadModel"])
    with pytest.raises(ModelError, match="mamba is not supported"):
        parse(architectures=None, model_type="mamba")
    assert parse(architectures=None).architecture == "LlamaForCausalLM"


def test_remote_code_is_refused() -> None:
    with pytest.raises(ModelError, match="remote code is never run"):
        parse(auto_map={"AutoModelForCausalLM": "modeling_x.X"})


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "bitsandbytes"])
def test_quantized_checkpoints_are_refused_by_name(method: str) -> None:
    with pytest.raises(ModelError, match=f"quantized with {method}"):
        parse(quantization_config={"quant_method": method})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_key_value_heads": 3}, "num_heads 8 is not a multiple of num_kv_heads 3"),
        ({"vocab_size": 0}, "vocab_size = 0"),
        ({"head_dim": 15}, "head_dim|even"),
        ({"num_hidden_layers": "many"}, "not a valid configuration"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        parse(**changes)


def test_the_generation_config_says_what_ends_an_answer(llama_folder: Path) -> None:
    assert load_config(resolve(llama_folder)).eos_token_ids == (2,)
    (llama_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9, 7], "temperature": 0.6}))
    assert load_config(resolve(llama_folder)).eos_token_ids == (7, 9)
    assert load_generation_config(resolve(llama_folder))["temperature"] == 0.6
    (llama_folder / "generation_config.json").unlink()
    assert load_generation_config(resolve(llama_folder)) == {}
    assert load_config(resolve(llama_folder)).eos_token_ids == (2,)


def test_a_damaged_config_is_named(llama_folder: Path) -> None:
    (llama_folder / "config.json").write_text('{"architectures": [')
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        load_config(resolve(llama_folder))
    (llama_folder / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="holds list"):
        load_config(resolve(llama_folder))
    (llama_folder / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="neither architectures nor model_type"):
        load_config(resolve(llama_folder))


def test_auto_dtype_follows_the_checkpoint_except_on_a_cpu() -> None:
    stated = parse(torch_dtype="float16")
    assert stated.checkpoint_dtype == torch.float16
    assert resolve_dtype("auto", stated, "cpu") == torch.float32
    assert resolve_dtype("auto", stated, "cuda") == torch.float16
    assert resolve_dtype("auto", parse(torch_dtype="float32"), "cuda") == torch.bfloat16
    assert resolve_dtype(torch.float16, stated, "cpu") == torch.float16
    with pytest.raises(ModelError, match="'float8' is not supported; choose auto, float32"):
        resolve_dtype("float8", stated, "cpu")


def test_unknown_load_format_and_length_are_refused(llama_folder: Path) -> None:
    with pytest.raises(ModelError, match="'pickle' is not known"):
        load_model(resolve(llama_folder), load_format="pickle")
    with pytest.raises(ModelError, match="max_model_len 0"):
        load_model(resolve(llama_folder), max_model_len=0)


JUNK = [-1, 0, 1.5, "x", [], {}, True, 2**70, float("nan"), [1, 2], {"a": 1}]


@pytest.mark.parametrize(
    "key",
    ["architectures", "auto_map", "head_dim", "hidden_size", "num_hidden_layers", "max_position_embeddings"]
    + ["rms_norm_eps", "vocab_size", "sliding_window", "eos_token_id", "rope_parameters", "rope_scaling"],
)
@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "MistralForCausalLM"])
def test_junk_in_a_configuration_is_a_model_error_or_harmless(tmp_path: Path, key: str, kind: str) -> None:
    for junk in JUNK:
        (tmp_path / "config.json").write_text(json.dumps({**RAW, "architectures": [kind], key: junk}))
        try:
            config = load_config(resolve(tmp_path))
        except ModelError:
            continue
        assert isinstance(config, ModelConfig)


@pytest.mark.parametrize("ids", ["x", "12", [1, "a"], {"a": 1}, 1.5, True, [2, True], [2.5]])
def test_junk_in_a_generation_configuration_is_a_model_error(tmp_path: Path, ids: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(ModelError, match="cannot be understood"):
        load_config(resolve(tmp_path))


def test_a_name_too_long_for_a_path_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="cannot be looked up"):
        resolve("x" * 5000)


def test_a_configuration_is_read_without_the_modeling_code_of_transformers() -> None:
    program = (
        "import sys\n"
        "from mainspring.models.config import config_from_raw\n"
        "config_from_raw({'architectures': ['Qwen3ForCausalLM'], 'hidden_size': 64}, 'here')\n"
        "assert 'transformers.models.auto.modeling_auto' not in sys.modules\n"
        "assert all(getattr(finder, '__name__', '') != 'Refusal' for finder in sys.meta_path)\n"
        "from transformers import AutoModelForCausalLM\n"
        "assert 'transformers.models.auto.modeling_auto' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
