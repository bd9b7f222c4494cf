"""From a request's fields to the engine's sampling parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mainspring.engine.sampling_params import SamplingParams
from mainspring.engine.structured import StructuredOutputsParams
from mainspring.server.errors import ApiError, bad_request
from mainspring.server.protocol import (
    ChatRequest,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    Sampling,
)

#: Fields that have the same name and meaning in ``SamplingParams``.
SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "bad_words",
    "allowed_token_ids",
    "prompt_logprobs",
)
#: Tokens of a completion where nothing else is said.
COMPLETION_TOKENS = 16
MAX_CHOICES = 128


def completion_params(request: CompletionRequest, defaults: Mapping[str, Any], detokenize: bool) -> SamplingParams:
    """How a completion is sampled; raises ``ApiError`` where a field is wrong or two contradict each other.

    ``echo`` with ``max_tokens`` 0 is one token, which is left out of the answer.
    """
    given = _common(request)
    if request.logprobs is not None:
        given["logprobs"] = _count("logprobs", request.logprobs)
    if request.max_tokens == 0 and request.echo:
        given["max_tokens"] = 1
    else:
        given["max_tokens"] = request.max_tokens or defaults.get("max_tokens", COMPLETION_TOKENS)
        if request.max_tokens == 0:
            raise bad_request("max_tokens is 0, which only echo makes use of; ask for at least one token", "max_tokens")
    if request.echo and request.logprobs is not None:
        if request.prompt_logprobs is not None:
            raise bad_request("echo with logprobs tells those of the prompt; leave prompt_logprobs out", "echo")
        given["prompt_logprobs"] = given["logprobs"]
    if request.echo and request.stream and given.get("prompt_logprobs") is not None:
        raise bad_request("echo with logprobs is not streamed; leave out stream, echo or logprobs", "echo")
    return make_params({**defaults, "detokenize": detokenize, **given})


def chat_params(
    request: ChatRequest, defaults: Mapping[str, Any], forced: StructuredOutputsParams | None
) -> SamplingParams:
    """How a chat answer is sampled; ``forced`` is what the tool choice makes of its form."""
    given = _common(request)
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs; set logprobs to true", "top_logprobs")
    if request.logprobs:
        given["logprobs"] = _count("top_logprobs", request.top_logprobs or 0)
    limits = {
        name: value for name in ("max_tokens", "max_completion_tokens") if (value := getattr(request, name)) is not None
    }
    if len(set(limits.values())) > 1:
        raise bad_request(
            f"max_tokens {request.max_tokens} and max_completion_tokens {request.max_completion_tokens} differ; "
            f"give one of them",
            "max_completion_tokens",
        )
    given["max_tokens"] = next(iter(limits.values()), defaults.get("max_tokens"))
    if forced is not None:
        if "structured_outputs" in given:
            raise bad_request(
                "a tool that has to be called and another form of answer exclude each other", "tool_choice"
            )
        given["structured_outputs"] = forced
    return make_params({**defaults, **given})


def make_params(given: Mapping[str, Any]) -> SamplingParams:
    """``SamplingParams``; what it refuses becomes a 400 that names the field."""
    try:
        return SamplingParams(**given)
    except (TypeError, ValueError) as error:
        raise refused(error) from error


def refused(error: Exception) -> ApiError:
    """A 400 for what the engine refused, naming the field that its message begins with or mentions first."""
    names = re.findall(r"\b[a-z_]+\b", str(error))
    known = {*SAME, "max_tokens", "logprobs", "structured_outputs"}
    # A short name may be an ordinary word further on.
    param = next((name for place, name in enumerate(names) if name in known and (place == 0 or "_" in name)), None)
    return bad_request(str(error), param, "invalid_value")


def _common(request: Sampling) -> dict[str, Any]:
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise bad_request(
            f"best_of {request.best_of} is not supported: no answer is thrown away; use n and choose among the answers",
            "best_of",
            "unsupported_parameter",
        )
    if request.n is not None and request.n > MAX_CHOICES:
        raise bad_request(f"n {request.n} > {MAX_CHOICES}; ask for fewer answers", "n")
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options needs stream; set stream to true", "stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs is not streamed; leave out stream or prompt_logprobs", "prompt_logprobs")
    given = {name: value for name in SAME if (value := getattr(request, name)) is not None}
    structure = _structure(request)
    if structure is not None:
        given["structured_outputs"] = structure
    return given


def _structure(request: Sampling) -> StructuredOutputsParams | None:
    wanted: dict[str, Any] | None = None
    if request.structured_outputs is not None:
        wanted = request.structured_outputs.model_dump(by_alias=True, exclude_none=True)
    named = request.response_format
    if isinstance(named, (JsonObjectFormat, JsonSchemaFormat)):
        if wanted is not None:
            raise bad_request("response_format and structured_outputs exclude each other; give one", "response_format")
        wanted = {"json": named.json_schema.schema_} if isinstance(named, JsonSchemaFormat) else {"json_object": True}
    if wanted is None:
        return None
    field = "response_format" if request.structured_outputs is None else "structured_outputs"
    return structured(wanted, field)


def structured(wanted: Mapping[str, Any], field: str) -> StructuredOutputsParams:
    """``StructuredOutputsParams``, or a 400 that names ``field``."""
    try:
        return StructuredOutputsParams(**wanted)
    except (TypeError, ValueError) as error:
        raise bad_request(f"{field}: {error}", field, "invalid_value") from error


def _count(name: str, value: int) -> int:
    if value < 0:
        raise bad_request(f"{name} is {value}; it is a whole number of at least 0", name)
    return value
