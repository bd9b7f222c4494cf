"""Random weights: the same from the same seed, and fit to be run deep and in 16 bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from mainspring.models.decoder import Decoder
from mainspring.models.loader import load_model
from mainspring.models.source import resolve
from mainspring.models.weights.dummy import fill_dummy


def test_the_seed_decides_the_values(llama_folder: Path) -> None:
    (llama_folder / "model.safetensors").unlink()

    def weights(seed: int) -> torch.Tensor:
        model = load_model(
            resolve(llama_folder), dtype="float32", load_format="dummy", seed=seed, pack=False
        )
        return torch.cat([parameter.flatten() for parameter in model.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [False, True])
def test_deep_models_stay_finite_and_answers_differ(
    tied: bool, dtype: torch.dtype, hf_model: Any, tmp_path: Path, paged_run: Any
) -> None:
    hf_model("qwen2", tie_word_embeddings=tied).save_pretrained(tmp_path)
    shallow = load_model(resolve(tmp_path), load_format="dummy").config
    config = dataclasses.replace(shallow, num_layers=32, sliding_windows=())
    model = Decoder(config, dtype=dtype, device="cpu")
    fill_dummy(model, seed=0)
    logits = paged_run(model).push(list(range(40))).float()
    assert logits.isfinite().all()
    assert 0.2 < logits.std() < 5
    assert logits.argmax(-1).unique().numel() > 10
    assert (logits.std(dim=0) > 0.05).all()
