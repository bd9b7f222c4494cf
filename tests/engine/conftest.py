"""Models that the engine's tests run: the embedded one, and tiny ones with random weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mainspring import LLM

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}

MakeLLM = Callable[..., LLM]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configuration of a tiny Llama; its weights are dummies."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture(scope="session")
def tiny_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama and its weights, which no engine's seed changes."""
    folder = tmp_path_factory.mktemp("tiny-llama-weights")
    fields = {name: value for name, value in TINY.items() if name not in ("architectures", "model_type", "torch_dtype")}
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields, initializer_range=0.2)).save_pretrained(folder)
    return folder


@pytest.fixture
def make_tiny(tiny_folder: Path) -> Iterator[MakeLLM]:
    """Makes engines over the tiny model, with options of the test's choice, and closes them after it."""
    made: list[LLM] = []

    def make(**options: Any) -> LLM:
        defaults: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "device": "cpu",
            "kv_cache_memory": 8 << 20,
        }
        made.append(LLM(**{"model": str(tiny_folder), **defaults, **options}))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


@pytest.fixture(scope="session")
def smollm2() -> Iterator[LLM]:
    """One engine over the embedded model in fp32 on the CPU, shared by the tests that do not change it."""
    with LLM("smollm2", device="cpu", dtype="float32", max_model_len=2048) as llm:
        yield llm
