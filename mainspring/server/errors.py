"""Errors as clients of the OpenAI API expect them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

#: HTTP status -> the ``type`` that OpenAI gives it.
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


#: Characters of a message, and of a field's name in it, that repeat what a client sent.
MAX_MESSAGE, MAX_PARAM = 2000, 200


def _clipped(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"


class ApiError(Exception):
    """What a client is told instead of an answer.

    Args:
        status: the HTTP status.
        message: value, limit and way out.
        param: the field of the request that is at fault.
        code: OpenAI's short name of the fault, where it has one.
        headers: further headers, such as ``Retry-After``.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _clipped(message, MAX_MESSAGE)
        self.param = None if param is None else _clipped(param, MAX_PARAM)
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The error as it goes over the wire."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 that names the field at fault."""
    return ApiError(400, message, param=param, code=code)


def from_validation(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """The most telling of pydantic's ``errors`` about ``body``, as a 400 that names the field."""
    error = _most_telling(errors)
    kind = error.get("type")
    param = ".".join(_fields(error.get("loc", ())[1:], body, kind in ("missing", "extra_forbidden"))) or None
    if kind == "extra_forbidden":
        return bad_request(
            f"{param} is not a field that this server supports; leave it out", param, "unknown_parameter"
        )
    if kind == "missing":
        return bad_request(f"{param or 'the body'} is missing", param, "missing_required_parameter")
    if kind in ("json_invalid", "model_attributes_type", "dict_type") and param is None or kind == "json_invalid":
        return bad_request("the body is not a JSON object", None, "invalid_json")
    message = str(error.get("msg", "it is not valid")).removeprefix("Value error, ")
    told = f"{param}: {message}" if param and not message.startswith(param.split(".")[0]) else message
    return bad_request(told, param, "invalid_value")


def _fields(place: Sequence[str | int], value: Any, ends_with_field: bool) -> list[str]:
    """The fields on the way to ``place``, without the branches of unions, which pydantic names too."""
    names = []
    for number, part in enumerate(place, start=1):
        if part in (value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()):
            value = value[part]
        elif not (ends_with_field and number == len(place)):
            continue
        names.append(str(part))
    return names


def _most_telling(errors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """An unknown field or a list that is too long before all else, and of a union's branches the one that came
    furthest."""
    for error in errors:
        if error.get("type") in ("extra_forbidden", "too_long"):
            return error
    return max(errors, key=lambda error: len(error.get("loc", ()))) if len(errors) > 1 else errors[0]


def dumps(value: Any) -> bytes:
    """JSON in UTF-8. Half surrogate pairs, which are no text, become question marks."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
