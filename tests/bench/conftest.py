"""A tiny model for measuring: only its configuration, so that its weights are random."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mainspring.bench import bandwidth
from mainspring.cli.app import app

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}

Bench = Callable[..., Result]


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-qwen"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture
def run_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    """Runs ``mainspring bench`` in an empty folder, on the CPU, with a small buffer for the bandwidth."""
    monkeypatch.setattr(bandwidth, "CPU_BYTES", 1 << 20)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Result:
        environment = {"COLUMNS": "80", "NO_COLOR": "1"}
        return CliRunner().invoke(app, ["bench", *map(str, arguments)], env=environment)

    return run
