"""Folders of safetensors: what is read, what is left alone, what is refused and in which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mainspring.models.errors import ModelError
from mainspring.models.loader import load_model, update_weights
from mainspring.models.source import resolve

NAME = "model.layers.1.mlp.down_proj.weight"


def logits(folder: Path, paged_run: Any, **options: Any) -> torch.Tensor:
    model = load_model(resolve(folder), dtype="float32", **options)
    return paged_run(model).push([5, 9, 33, 2, 71])


def rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_many_shards_read_by_index_give_what_one_file_gives(
    tmp_path: Path, hf_model: Any, paged_run: Any
) -> None:
    model = hf_model("qwen2")
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="30KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert torch.equal(logits(tmp_path / "one", paged_run), logits(tmp_path / "many", paged_run))


def test_stray_files_beside_the_shards_are_left_alone(tmp_path: Path, hf_model: Any, paged_run: Any) -> None:
    hf_model("llama").save_pretrained(tmp_path, max_shard_size="30KB")
    before = logits(tmp_path, paged_run)
    save_file({NAME: torch.zeros(48, 80)}, tmp_path / "consolidated.safetensors")
    save_file({"nonsense": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "model-00009-of-00009.safetensors").write_bytes(b"left over")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickled")
    assert torch.equal(logits(tmp_path, paged_run), before)


@pytest.mark.parametrize("tied", [False, True])
def test_tied_heads_with_and_without_a_redundant_tensor(
    tied: bool, tmp_path: Path, hf_model: Any, paged_run: Any
) -> None:
    reference = hf_model("llama", tie_word_embeddings=tied)
    reference.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = reference(torch.tensor([[5, 9, 33, 2, 71]])).logits[0]
    torch.testing.assert_close(logits(tmp_path, paged_run), expected, atol=1e-4, rtol=0)
    if tied:
        rewrite(
            tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
        )
        torch.testing.assert_close(logits(tmp_path, paged_run), expected, atol=1e-4, rtol=0)


def test_a_tied_head_that_differs_is_kept_as_transformers_keeps_it(
    tmp_path: Path, hf_model: Any, paged_run: Any
) -> None:
    from transformers import AutoModelForCausalLM

    hf_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": torch.randn(97, 48)}))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor([[5, 9, 33, 2, 71]])).logits[0]
    torch.testing.assert_close(logits(tmp_path, paged_run), expected, atol=1e-4, rtol=0)


def test_names_of_a_bare_body_are_understood(llama_folder: Path, paged_run: Any) -> None:
    before = logits(llama_folder, paged_run)

    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    rewrite(llama_folder, strip)
    assert torch.equal(logits(llama_folder, paged_run), before)


def test_computed_rotary_frequencies_in_a_file_are_left_out(llama_folder: Path, paged_run: Any) -> None:
    before = logits(llama_folder, paged_run)
    rewrite(
        llama_folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    )
    assert torch.equal(logits(llama_folder, paged_run), before)


def test_a_missing_tensor_is_named(llama_folder: Path, paged_run: Any) -> None:
    rewrite(llama_folder, lambda t: t.pop(NAME))
    with pytest.raises(ModelError, match=f"lacks 1 of .* tensors: {NAME}"):
        logits(llama_folder, paged_run)


def test_a_wrong_shape_names_the_tensor_and_both_shapes(llama_folder: Path, paged_run: Any) -> None:
    rewrite(llama_folder, lambda t: t.update({NAME: torch.zeros(48, 81)}))
    with pytest.raises(ModelError, match=rf"{NAME} .* \[48, 81\].* \[48, 80\]"):
        logits(llama_folder, paged_run)


def test_a_tensor_without_a_place_is_refused(llama_folder: Path, paged_run: Any) -> None:
    rewrite(llama_folder, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}))
    with pytest.raises(ModelError, match=r"unexpected tensor model\.layers\.0\.self_attn\.q_proj\.bias"):
        logits(llama_folder, paged_run)


def test_integer_weights_are_refused(llama_folder: Path, paged_run: Any) -> None:
    rewrite(llama_folder, lambda t: t.update({NAME: torch.zeros(48, 80, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=f"{NAME}.*torch.int8"):
        logits(llama_folder, paged_run)


@pytest.mark.parametrize("kept", [0, 4, 200, 0.5, 0.999])
def test_a_truncated_file_is_named(kept: float, llama_folder: Path, paged_run: Any) -> None:
    path = llama_folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(kept if kept > 1 or not kept else len(content) * kept)])
    with pytest.raises(ModelError, match=r"model\.safetensors .*truncated or damaged"):
        logits(llama_folder, paged_run)


def test_a_damaged_header_is_named(llama_folder: Path, paged_run: Any) -> None:
    path = llama_folder / "model.safetensors"
    path.write_bytes(b"\xff" * 16 + path.read_bytes()[16:])
    with pytest.raises(ModelError, match=r"model\.safetensors .*truncated or damaged"):
        logits(llama_folder, paged_run)


def test_pickled_weights_are_refused(llama_folder: Path, paged_run: Any) -> None:
    torch.save(load_file(llama_folder / "model.safetensors"), llama_folder / "pytorch_model.bin")
    (llama_folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*refused.*save_pretrained"):
        logits(llama_folder, paged_run)


def test_a_folder_without_weights_says_so(llama_folder: Path, paged_run: Any) -> None:
    (llama_folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds no weights"):
        logits(llama_folder, paged_run)


def test_several_files_without_an_index_are_not_guessed_at(llama_folder: Path, paged_run: Any) -> None:
    (llama_folder / "model.safetensors").rename(llama_folder / "a.safetensors")
    assert logits(llama_folder, paged_run).isfinite().all()
    save_file({"x": torch.zeros(1)}, llama_folder / "b.safetensors")
    with pytest.raises(ModelError, match="2 safetensors files but neither"):
        logits(llama_folder, paged_run)


def test_a_missing_shard_is_named(tmp_path: Path, hf_model: Any, paged_run: Any) -> None:
    hf_model("llama").save_pretrained(tmp_path, max_shard_size="30KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=shard.name):
        logits(tmp_path, paged_run)


def test_an_index_that_points_outside_its_folder_is_refused(
    tmp_path: Path, hf_model: Any, paged_run: Any, change_json: Any
) -> None:
    hf_model("llama").save_pretrained(tmp_path, max_shard_size="30KB")
    index = tmp_path / "model.safetensors.index.json"
    change_json(index, lambda c: c["weight_map"].update({NAME: "../other.safetensors"}))
    with pytest.raises(ModelError, match="outside its folder"):
        logits(tmp_path, paged_run)


def test_an_index_that_disagrees_with_its_shards_is_named(
    tmp_path: Path, hf_model: Any, paged_run: Any, change_json: Any
) -> None:
    hf_model("llama").save_pretrained(tmp_path, max_shard_size="30KB")
    index = tmp_path / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"]
    elsewhere = next(file for file in files.values() if file != files[NAME])
    change_json(index, lambda c: c["weight_map"].update({NAME: elsewhere}))
    with pytest.raises(ModelError, match=f"lacks tensor {NAME}"):
        logits(tmp_path, paged_run)
    index.write_text("{not json")
    with pytest.raises(ModelError, match="index.json is damaged"):
        logits(tmp_path, paged_run)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_update_weights_gives_the_new_models_answers_at_the_old_addresses(
    tied: bool, pack: bool, tmp_path: Path, hf_model: Any, paged_run: Any
) -> None:
    old = hf_model("qwen2", tie_word_embeddings=tied)
    old.save_pretrained(tmp_path / "old")
    model = load_model(resolve(tmp_path / "old"), dtype="float32", pack=pack)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    places = {name: t if t.is_mkldnn else t.data_ptr() for name, t in held.items()}
    with torch.no_grad():
        for parameter in old.parameters():
            parameter.mul_(1.1).add_(0.01)
    new = [(name, value) for name, value in old.named_parameters()]
    written = update_weights(model, ((name, value.detach()) for name, value in reversed(new)))
    assert written == len(new)
    old.save_pretrained(tmp_path / "new")
    fresh = load_model(resolve(tmp_path / "new"), dtype="float32", pack=pack)
    assert torch.equal(paged_run(model).push([5, 9, 33]), paged_run(fresh).push([5, 9, 33]))
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, place in places.items():
        assert (after[name] is place) if isinstance(place, torch.Tensor) else after[name].data_ptr() == place


def test_update_weights_takes_a_part_and_refuses_what_does_not_fit(llama_folder: Path, paged_run: Any) -> None:
    model = load_model(resolve(llama_folder), dtype="float32")
    gate_up = model.model.layers[0].mlp.gate_up_proj
    before = gate_up.weight.to_dense().clone()
    assert update_weights(model, [("model.layers.0.mlp.up_proj.weight", torch.ones(80, 48))]) == 1
    assert torch.equal(gate_up.weight.to_dense()[:80], before[:80])
    assert torch.equal(gate_up.weight.to_dense()[80:], torch.ones(80, 48))
    with pytest.raises(ModelError, match="unexpected tensor model.layers.0.mlp.other.weight"):
        update_weights(model, [("model.layers.0.mlp.other.weight", torch.ones(1))])
    with pytest.raises(ModelError, match=r"\[81, 48\].*\[80, 48\]"):
        update_weights(model, [("model.layers.0.mlp.up_proj.weight", torch.ones(81, 48))])
