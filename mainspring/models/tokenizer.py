"""The tokenizer of a model, as a `transformers` tokenizer."""

from __future__ import annotations

import json
from typing import Any

from mainspring.models.errors import ModelError
from mainspring.models.gguf_tokenizer import gguf_tokenizer
from mainspring.models.source import ModelSource


def load_tokenizer(source: ModelSource) -> Any:
    """The tokenizer of a folder, or the one rebuilt from a GGUF file; its chat template comes with it.

    Raises `ModelError` when there is none, it is damaged, or it wants remote code.
    """
    if source.kind == "gguf":
        try:
            return gguf_tokenizer(source.gguf)
        except (TypeError, ValueError, KeyError, OverflowError, AttributeError) as error:
            if isinstance(error, ModelError):
                raise
            raise ModelError(
                f"the tokenizer in {source.path} holds something that cannot be understood "
                f"({type(error).__name__}: {error}); the file is damaged"
            ) from error
    from transformers import AutoTokenizer

    settings = source.path / "tokenizer_config.json"
    if settings.is_file():
        try:
            wants_code = json.loads(settings.read_text(encoding="utf-8")).get("auto_map")
        except (OSError, ValueError, AttributeError) as error:
            raise ModelError(f"{settings} is damaged ({error}); download it again") from error
        if wants_code:
            raise ModelError(
                f"the tokenizer of {source.name} wants its own Python code run (auto_map), which is refused"
            )
    try:
        return AutoTokenizer.from_pretrained(str(source.path), trust_remote_code=False, local_files_only=True)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ModelError(
            f"{source.path} has no usable tokenizer ({type(error).__name__}: {reason}); "
            "add its tokenizer.json and tokenizer_config.json"
        ) from error
