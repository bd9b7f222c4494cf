"""Every family's logits equal those of `transformers` in fp32, prefilled whole, in chunks, and decoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mainspring.models.loader import load_model
from mainspring.models.source import resolve

TOLERANCE = 1e-4
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2: as many KV heads as heads": ("llama", {"num_key_value_heads": 6}),
    "llama3: grouped heads, scaled rope, tied": (
        "llama",
        {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    ),
    "llama: biases everywhere, own head_dim": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
    ),
    "mistral: no window": ("mistral", {"sliding_window": None}),
    "mistral: window of 5": ("mistral", {"sliding_window": 5}),
    "qwen2: qkv bias": ("qwen2", {}),
    "qwen2: tied, window turned off": ("qwen2", {"tie_word_embeddings": True, "sliding_window": 5}),
    "qwen2: window from layer 1 on": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3: qk norm, tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3: attention bias, window": (
        "qwen3",
        {"attention_bias": True, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    ),
}


def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    """[len(ids), vocab] from `transformers`."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("case", CASES)
def test_logits_match_at_every_position(case: str, tmp_path: Path, hf_model: Any, paged_run: Any) -> None:
    kind, settings = CASES[case]
    reference = hf_model(kind, **settings)
    reference.save_pretrained(tmp_path)
    ids = torch.randint(0, 97, (30,), generator=torch.Generator().manual_seed(3)).tolist()
    expected = logits_of(reference, ids)
    model = load_model(resolve(tmp_path), dtype="float32")
    prefilled = paged_run(model).push(ids)
    torch.testing.assert_close(prefilled, expected, atol=TOLERANCE, rtol=0)
    run = paged_run(model)
    pieces = [run.push(ids[:9]), run.push(ids[9:14]), run.push(ids[14:], decode=True)]
    torch.testing.assert_close(torch.cat(pieces), expected, atol=TOLERANCE, rtol=0)


def test_the_window_cases_would_notice_a_missing_window(hf_model: Any) -> None:
    ids = torch.randint(0, 97, (30,), generator=torch.Generator().manual_seed(3)).tolist()
    full = logits_of(hf_model("mistral", sliding_window=None), ids)
    windowed = logits_of(hf_model("mistral", sliding_window=5), ids)
    assert (full - windowed).abs().max() > 100 * TOLERANCE


def test_packed_and_plain_weights_give_the_same_answers(
    tmp_path: Path, hf_model: Any, paged_run: Any
) -> None:
    hf_model("qwen2", tie_word_embeddings=True).save_pretrained(tmp_path)
    ids = list(range(5, 25))
    plain = load_model(resolve(tmp_path), dtype="float32", pack=False)
    packed = load_model(resolve(tmp_path), dtype="float32")
    assert {plain.model.layers[0].mlp.down_proj.kind, packed.model.layers[0].mlp.down_proj.kind} == {
        "dense",
        "packed",
    }
    torch.testing.assert_close(
        paged_run(packed).push(ids), paged_run(plain).push(ids), atol=TOLERANCE, rtol=0
    )


def test_a_packed_product_does_not_depend_on_the_number_of_rows(
    tmp_path: Path, hf_model: Any, paged_run: Any
) -> None:
    hf_model("llama").save_pretrained(tmp_path)
    model = load_model(resolve(tmp_path), dtype="float32")
    hidden = torch.randn(33, 48, generator=torch.Generator().manual_seed(0))
    together = model.compute_logits(hidden)
    for rows in (1, 2, 3, 5, 8, 32):
        assert torch.equal(model.compute_logits(hidden[:rows]), together[:rows])


def test_logits_are_written_where_asked(tmp_path: Path, hf_model: Any) -> None:
    hf_model("llama").save_pretrained(tmp_path)
    hidden = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
    for pack in (False, True):
        model = load_model(resolve(tmp_path), dtype="float32", pack=pack)
        out = torch.empty(3, 97)
        returned = model.compute_logits(hidden, out)
        assert returned.data_ptr() == out.data_ptr()
        torch.testing.assert_close(out, model.compute_logits(hidden), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_weights_stay_near_the_fp32_answer(
    dtype: torch.dtype, tmp_path: Path, hf_model: Any, paged_run: Any
) -> None:
    reference = hf_model("qwen3")
    reference.save_pretrained(tmp_path)
    ids = list(range(3, 23))
    expected = logits_of(reference, ids)
    model = load_model(resolve(tmp_path), dtype=dtype)
    got = paged_run(model).push(ids)
    assert got.dtype == dtype
    assert (got.float() - expected).abs().max() < 0.05 * expected.abs().max()


def test_parameters_are_named_after_the_checkpoint(tmp_path: Path, hf_model: Any) -> None:
    hf_model("qwen3").save_pretrained(tmp_path)
    model = load_model(resolve(tmp_path), dtype="float32")
    names = {*dict(model.named_parameters()), *dict(model.named_buffers())}
    assert {
        "model.embed_tokens.weight",
        "model.layers.2.self_attn.qkv_proj.weight",
        "model.layers.2.self_attn.q_norm.weight",
        "model.layers.2.mlp.gate_up_proj.weight",
        "model.layers.2.mlp.down_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    } <= names
