"""Small models saved as `transformers` saves them, and a paged harness that runs a decoder like an engine would."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mainspring.models.decoder import Decoder
from mainspring.models.inputs import ModelInputs
from mainspring.models.loader import load_model
from mainspring.models.source import ModelSource, resolve
from mainspring.models.tokenizer import load_tokenizer

BLOCK_SIZE = 4
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class PagedRun:
    """One sequence in a paged cache whose blocks lie out of order, prefilled and then decoded token by token."""

    def __init__(self, model: Decoder, capacity: int = 64) -> None:
        """Allocate a cache for `capacity` tokens, filled with NaN so that reading an unwritten slot shows."""
        config = model.config
        blocks = -(-capacity // BLOCK_SIZE) + 1
        shape = (blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        self.model = model
        self.cache = [
            (torch.full(shape, torch.nan, dtype=model.dtype), torch.full(shape, torch.nan, dtype=model.dtype))
            for _ in range(config.num_layers)
        ]
        self.table = torch.arange(blocks - 1, 0, -1, dtype=torch.int32)[None]
        self.length = 0

    @torch.no_grad()
    def push(self, ids: Sequence[int], *, decode: bool = False) -> Tensor:
        """Logits [len(ids), vocab] after each of `ids`, which continue the sequence; one id at a time if `decode`."""
        if decode and len(ids) > 1:
            return torch.cat([self.push([i], decode=True) for i in ids])
        count = len(ids)
        positions = torch.arange(self.length, self.length + count)
        blocks = self.table[0, positions // BLOCK_SIZE].long()
        self.length += count
        starts = None if decode else torch.tensor([0, count], dtype=torch.int32)
        inputs = ModelInputs(
            token_ids=torch.tensor(list(ids)),
            positions=positions,
            slots=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
            block_tables=self.table,
            seq_lens=torch.tensor([self.length], dtype=torch.int32),
            query_starts=starts,
        )
        return self.model.compute_logits(self.model(inputs, self.cache))

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The `count` ids of highest logit after `prompt`."""
        ids = [int(self.push(prompt)[-1].argmax())]
        while len(ids) < count:
            ids.append(int(self.push(ids[-1:], decode=True)[-1].argmax()))
        return ids


def make_hf_model(kind: str, **overrides: Any) -> Any:
    """A small randomly initialised `transformers` model in fp32; biases and norms are random too."""
    import transformers

    prefix = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind]
    settings = {**SIZES, **({"head_dim": 12} if kind == "qwen3" else {}), **overrides}
    config = getattr(transformers, f"{prefix}Config")(**settings)
    torch.manual_seed(7)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 1.2 / parameter.shape[-1] ** 0.5)
    return model


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite a JSON file."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.fixture(scope="session")
def hf_model() -> Callable[..., Any]:
    """`make_hf_model`."""
    return make_hf_model


@pytest.fixture(scope="session")
def paged_run() -> type[PagedRun]:
    """The harness class."""
    return PagedRun


@pytest.fixture(scope="session")
def change_json() -> Callable[..., None]:
    """`edit_json`."""
    return edit_json


@pytest.fixture
def llama_folder(tmp_path: Path) -> Path:
    """A saved small Llama, for tests that then damage it."""
    folder = tmp_path / "llama"
    make_hf_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2_source() -> ModelSource:
    """The embedded model, parsed once."""
    return resolve("smollm2")


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_source: ModelSource) -> Any:
    """Its tokenizer."""
    return load_tokenizer(smollm2_source)


@pytest.fixture(scope="session")
def smollm2(smollm2_source: ModelSource) -> Decoder:
    """Its decoder in fp32, packed as the CPU likes it."""
    return load_model(smollm2_source, dtype="float32", max_model_len=512)
