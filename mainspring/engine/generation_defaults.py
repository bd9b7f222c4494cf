"""What a request without parameters runs with: the model authors' ``generation_config.json``, unless turned off."""

from __future__ import annotations

from typing import Any

from mainspring.engine.errors import SettingsError
from mainspring.engine.sampling_params import SamplingParams
from mainspring.models.loader import load_generation_config
from mainspring.models.source import ModelSource

#: Names in ``generation_config.json`` that are honoured (those that vLLM honours) -> names in ``SamplingParams``.
HONOURED = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def sampling_defaults(source: ModelSource, generation_config: str) -> dict[str, Any]:
    """Keyword arguments for ``SamplingParams``; empty for ``"vllm"``, which leaves the defaults of that class.

    Raises ``SettingsError`` where the file holds a value that cannot be.
    """
    if generation_config == "vllm":
        return {}
    stated = load_generation_config(source)
    defaults = {ours: stated[theirs] for theirs, ours in HONOURED.items() if stated.get(theirs) is not None}
    try:
        SamplingParams(**defaults)
    except (TypeError, ValueError) as error:
        raise SettingsError(
            f"generation_config.json of {source.name}: {error}; correct it, or turn it off: generation_config='vllm'"
        ) from error
    return defaults
