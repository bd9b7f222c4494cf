"""GGUF files written here, read back: every quantization, row order, metadata, damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mainspring.models.errors import ModelError
from mainspring.models.gguf_file import GgufFile
from mainspring.models.gguf_header import dequantize
from mainspring.models.loader import load_config, load_model
from mainspring.models.source import resolve
from mainspring.models.tokenizer import load_tokenizer

gguf = pytest.importorskip("gguf")

from gguf import GGMLQuantizationType as Type  # noqa: E402

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
QUANTIZABLE = [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1]


def gguf_name(name: str) -> str:
    stem, _, leaf = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{leaf}"
    return f"{NAMES[stem]}.{leaf}"


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """The row order of llama files: the two halves of each head side by side."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write(
    path: Path,
    model: Any,
    kind: str,
    quantization: Type = Type.F32,
    edit: Callable[[gguf.GGUFWriter], None] | None = None,
    **writer_options: Any,
) -> None:
    """Save `model` as GGUF, and set its own weights to what the file then holds."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), kind, **writer_options)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if kind == "qwen3":
        writer.add_key_length(config.head_dim)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if edit is not None:
        edit(writer)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = parameter.numpy()
            chosen = quantization if values.ndim == 2 else Type.F32
            stored = gguf.quants.quantize(values, chosen)
            parameter.copy_(torch.from_numpy(gguf.quants.dequantize(stored, chosen).copy()))
            # Rows are quantized one by one, so their order may change afterwards.
            if kind == "llama" and ".q_proj." in name:
                stored = interleave(stored, config.num_attention_heads)
            elif kind == "llama" and ".k_proj." in name:
                stored = interleave(stored, config.num_key_value_heads)
            writer.add_tensor(gguf_name(name), stored, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check_logits(path: Path, reference: Any, paged_run: Any) -> Any:
    ids = list(range(5, 29))
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    model = load_model(resolve(path), dtype="float32")
    torch.testing.assert_close(paged_run(model).push(ids), expected, atol=1e-4, rtol=0)
    return model


@pytest.mark.parametrize("quantization", QUANTIZABLE, ids=lambda q: q.name)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_logits_match_for_every_type_that_can_be_written(
    kind: str, quantization: Type, tmp_path: Path, hf_model: Any, paged_run: Any
) -> None:
    reference = hf_model(kind, **SIZES)
    write(tmp_path / "m.gguf", reference, kind, quantization)
    check_logits(tmp_path / "m.gguf", reference, paged_run)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    ],
)
def test_logits_match_for_other_shapes(
    kind: str, settings: dict[str, Any], tmp_path: Path, hf_model: Any, paged_run: Any
) -> None:
    reference = hf_model(kind, **{**SIZES, **settings})
    write(tmp_path / "m.gguf", reference, kind)
    model = check_logits(tmp_path / "m.gguf", reference, paged_run)
    assert model.config.tie_word_embeddings == settings.get("tie_word_embeddings", False)
    assert model.config.eos_token_ids == (2,)
    assert model.config.max_position_embeddings == 128


def test_rope_divisors_of_llama3_files_give_the_llama3_answer(tmp_path: Path, hf_model: Any, paged_run: Any) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    reference = hf_model("llama", **SIZES, rope_parameters=scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](reference.config, torch.device("cpu"))
    plain = 1.0 / 5e5 ** (torch.arange(0, 16, 2).float() / 16)
    divisors = (plain / scaled).numpy()
    assert divisors.max() > 7

    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", divisors)

    write(tmp_path / "m.gguf", reference, "llama", edit=edit)
    check_logits(tmp_path / "m.gguf", reference, paged_run)


@pytest.mark.parametrize(("kind", "factor"), [(gguf.RopeScalingType.LINEAR, 4.0), (gguf.RopeScalingType.YARN, 4.0)])
def test_rope_scaling_in_the_metadata_is_honoured(
    kind: gguf.RopeScalingType, factor: float, tmp_path: Path, hf_model: Any, paged_run: Any
) -> None:
    parameters: dict[str, Any] = {"rope_type": kind.value, "rope_theta": 1e4, "factor": factor}
    if kind is gguf.RopeScalingType.YARN:
        parameters["original_max_position_embeddings"] = 32
    reference = hf_model("qwen2", **SIZES, rope_parameters=parameters)

    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(factor)
        if kind is gguf.RopeScalingType.YARN:
            writer.add_rope_scaling_orig_ctx_len(32)

    write(tmp_path / "m.gguf", reference, "qwen2", edit=edit)
    check_logits(tmp_path / "m.gguf", reference, paged_run)


def test_a_split_model_is_read_whole(tmp_path: Path, hf_model: Any, paged_run: Any) -> None:
    reference = hf_model("qwen2", **SIZES)
    write(tmp_path / "m.gguf", reference, "qwen2", split_max_tensors=15)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    check_logits(parts[0], reference, paged_run)
    with pytest.raises(ModelError, match="name the first"):
        load_config(resolve(parts[1]))
    parts[2].unlink()
    with pytest.raises(ModelError, match=f"{parts[2].name} is missing"):
        load_config(resolve(parts[0]))


DEQUANTIZABLE = [kind for kind in Type if kind in gguf.quants._type_traits]


def test_the_package_dequantizes_many_types() -> None:
    assert len(DEQUANTIZABLE) >= 20


@pytest.mark.parametrize("kind", DEQUANTIZABLE, ids=lambda kind: kind.name)
def test_every_type_that_the_package_dequantizes_can_be_read(kind: Type, tmp_path: Path) -> None:
    block, size = gguf.constants.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (6, 512 // block * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(str(tmp_path / "t.gguf"), "llama")
    writer.add_tensor("blk.0.ffn_down.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "t.gguf")
    with np.errstate(all="ignore"):
        got = dequantize(file.tensors["blk.0.ffn_down.weight"])
        expected = gguf.quants.dequantize(raw, kind)
    assert got.shape == (6, 512)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, expected.reshape(6, 512))


@pytest.fixture
def qwen2_file(tmp_path: Path, hf_model: Any) -> Path:
    write(tmp_path / "m.gguf", hf_model("qwen2", **SIZES), "qwen2")
    return tmp_path / "m.gguf"


@pytest.mark.parametrize("kept", [6, 100, 3000, 0.5, 0.999])
def test_a_truncated_file_is_named(kept: float, qwen2_file: Path) -> None:
    content = qwen2_file.read_bytes()
    qwen2_file.write_bytes(content[: int(kept if kept > 1 else len(content) * kept)])
    with pytest.raises(ModelError, match=r"m\.gguf.*truncated"):
        load_model(resolve(qwen2_file))


def test_an_unsupported_architecture_is_named(tmp_path: Path, hf_model: Any) -> None:
    write(tmp_path / "m.gguf", hf_model("qwen2", **SIZES), "mamba")
    with pytest.raises(ModelError, match=r"'mamba' is not supported; supported are llama .*qwen2 .*qwen3"):
        load_config(resolve(tmp_path / "m.gguf"))


def test_a_mixture_of_experts_is_refused(tmp_path: Path, hf_model: Any) -> None:
    write(tmp_path / "m.gguf", hf_model("llama", **SIZES), "llama", edit=lambda w: w.add_expert_count(8))
    with pytest.raises(ModelError, match="mixture of experts"):
        load_config(resolve(tmp_path / "m.gguf"))


def test_a_tensor_without_a_place_is_refused(tmp_path: Path, hf_model: Any) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, dtype=np.float32))

    write(tmp_path / "m.gguf", hf_model("qwen2", **SIZES), "qwen2", edit=edit)
    with pytest.raises(ModelError, match=r"unexpected tensor blk\.0\.attn_sinks\.weight"):
        load_model(resolve(tmp_path / "m.gguf"))


def test_a_wrong_shape_names_the_tensor_and_both_shapes(tmp_path: Path, hf_model: Any) -> None:
    reference = hf_model("qwen2", **SIZES)
    reference.model.layers[1].mlp.down_proj = torch.nn.Linear(96, 32, bias=False)
    write(tmp_path / "m.gguf", reference, "qwen2")
    words = r"model\.layers\.1\.mlp\.down_proj\.weight .* \[32, 96\].* \[64, 96\]"
    with pytest.raises(ModelError, match=words):
        load_model(resolve(tmp_path / "m.gguf"))


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"lacks the metadata key llama\."):
        load_config(resolve(tmp_path / "m.gguf"))


def test_a_file_without_a_tokenizer_says_so(qwen2_file: Path) -> None:
    with pytest.raises(ModelError, match=r"lacks the metadata key tokenizer\.ggml\.model"):
        load_tokenizer(resolve(qwen2_file))
