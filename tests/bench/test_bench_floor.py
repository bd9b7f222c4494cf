"""The floor counts what a step must read, no more and no less."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mainspring.bench.floor import StepBytes, kv_bytes, step_bytes, weight_bytes
from mainspring.bench.shapes import SHAPES, open_model
from mainspring.models.config import ModelConfig, config_from_raw
from mainspring.models.loader import load_config, load_model
from mainspring.models.source import resolve


def config_of(name: str) -> ModelConfig:
    return config_from_raw(dict(SHAPES[name].config), name)


@pytest.mark.parametrize(("name", "gigabytes"), [("qwen3-0.6b", 1.19), ("llama-3.2-1b", 2.47), ("llama-3.1-8b", 15.0)])
def test_known_shapes_read_their_known_weights_in_bf16(name: str, gigabytes: float) -> None:
    assert weight_bytes(config_of(name), itemsize=2) / 1e9 == pytest.approx(gigabytes, rel=0.005)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_read_are_the_models_own_parameters_less_an_untied_embedding(tiny_folder: Path, tied: bool) -> None:
    source = resolve(tiny_folder)
    path = tiny_folder / "config.json"
    path.write_text(
        path.read_text().replace('"tie_word_embeddings": true', f'"tie_word_embeddings": {str(tied).lower()}')
    )
    config = load_config(source)
    model = load_model(source, dtype="bfloat16", load_format="dummy", pack=False)
    held = sum({parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}.values())
    rows = 3
    embedding = 0 if tied else model.model.embed_tokens.weight.nbytes - 2 * rows * config.hidden_size
    assert weight_bytes(config, itemsize=2, batch=rows) == held - embedding


def test_biases_are_weights_too(tiny_folder: Path) -> None:
    config = load_config(resolve(tiny_folder))
    biased = replace(config, qkv_bias=True, o_bias=True, mlp_bias=True)
    each = config.q_size + 2 * config.kv_size + 2 * config.hidden_size + 2 * config.intermediate_size
    assert weight_bytes(biased, 2) - weight_bytes(config, 2) == 2 * config.num_layers * each


def test_llama_8b_reads_a_gigabyte_of_kv_at_8192_tokens() -> None:
    assert kv_bytes(config_of("llama-3.1-8b"), 2, context=8192) == 1 << 30


@given(context=st.integers(1, 5000), batch=st.integers(1, 300), window=st.integers(1, 5000))
def test_a_sliding_window_bounds_what_its_layers_read(context: int, batch: int, window: int) -> None:
    full = config_of("qwen3-0.6b")
    half = replace(full, sliding_windows=(window, 0) * (full.num_layers // 2))
    whole = kv_bytes(full, 2, context, batch)
    assert 2 * kv_bytes(half, 2, context, batch) == whole + whole * min(window, context) // context


def test_floor_is_bytes_over_bandwidth() -> None:
    assert StepBytes(weights=3_000_000_000, kv=1_000_000_000).floor_ms(4e12) == pytest.approx(1.0)


def test_a_step_is_weights_and_kv() -> None:
    config = config_of("qwen3-0.6b")
    needed = step_bytes(config, 2, context=256, batch=256)
    assert (needed.weights, needed.kv) == (weight_bytes(config, 2, 256), kv_bytes(config, 2, 256, 256))
    assert needed.total / 1e9 == pytest.approx(1.19 + 7.5, rel=0.01)


@pytest.mark.parametrize("name", SHAPES)
def test_a_named_shape_is_a_model_folder_while_it_is_open(name: str) -> None:
    with open_model(name.upper()) as model:
        assert load_config(resolve(model.path)) == config_of(name)
        assert load_config(resolve(model.path)).checkpoint_dtype == torch.bfloat16
        assert (model.title, model.load_format) == (SHAPES[name].title, "dummy")
    assert not Path(model.path).exists()


def test_an_unknown_model_is_told_what_there_is(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"'gpt-5' is not known here; give qwen3-0\.6b, .*smollm2, or a folder"),
        open_model("gpt-5"),
    ):
        pass
    with pytest.raises(ValueError, match="is not known here"), open_model(str(tmp_path)):
        pass
