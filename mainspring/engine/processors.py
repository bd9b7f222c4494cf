"""Python logits processors: functions of a request's own that see and change its logits before each token."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from typing import Any

import torch

from mainspring.engine.errors import RequestError
from mainspring.engine.request import Request


def apply_processors(request: Request, logits: torch.Tensor) -> torch.Tensor:
    """The logits ``[vocab]`` after the request's processors, in their order; ``logits`` (fp32) may be changed in place.

    A processor is called as ``processor(token_ids, logits)`` with the ids of the answer so far, or, where it takes
    three arguments, as ``processor(prompt_token_ids, token_ids, logits)``, and returns logits of the same shape (as in
    vLLM's first engine). Raises ``RequestError`` when one raises, returns something else, or leaves no token to choose.
    """
    for processor in request.params.logits_processors or ():
        name = _name(processor)
        arguments: list[Any] = [list(request.output_token_ids), logits]
        try:
            if _takes_prompt(processor):
                arguments.insert(0, list(request.prompt_token_ids))
            changed = processor(*arguments)
        except Exception as error:
            raise RequestError(
                f"logits processor {name} of request {request.request_id} raised {type(error).__name__}: {error}"
            ) from error
        if not isinstance(changed, torch.Tensor) or changed.shape != logits.shape:
            shape = list(changed.shape) if isinstance(changed, torch.Tensor) else type(changed).__name__
            raise RequestError(
                f"logits processor {name} of request {request.request_id} returned {shape}; it must return the logits, "
                f"a tensor of shape {list(logits.shape)}"
            )
        logits = changed.to(device=logits.device, dtype=torch.float32)
        highest = float(logits.max())
        if math.isnan(highest) or highest == -math.inf:
            what = "NaN among the logits" if math.isnan(highest) else "no logit above minus infinity"
            raise RequestError(
                f"logits processor {name} of request {request.request_id} returned {what} at step {_step(request)}, so "
                f"no token can be chosen; return numbers, minus infinity for some tokens at the most"
            )
    return logits


def refuse_nothing_left(
    requests: Iterable[Request], adjusted: torch.Tensor, failures: dict[Request, RequestError]
) -> torch.Tensor:
    """``[n]`` bool: which of these requests have a token left in ``adjusted`` ``[n, vocab]``, their processors' logits
    after biases, penalties and masks. The others get an error in ``failures``."""
    possible = adjusted.amax(dim=-1) > -torch.inf
    for request, has_one in zip(requests, possible.tolist(), strict=True):
        if not has_one:
            names = ", ".join(map(_name, request.params.logits_processors or ()))
            failures[request] = RequestError(
                f"no token is left at step {_step(request)} of request {request.request_id}: allowed_token_ids, "
                f"bad_words, min_tokens or structured_outputs rule out all that its logits processors ({names}) allow; "
                f"allow another"
            )
    return possible


def _name(processor: Any) -> str:
    return str(getattr(processor, "__name__", type(processor).__name__))


def _step(request: Request) -> int:
    """Which token of its answer the request is at, from 1."""
    return len(request.output_token_ids) + 1


def _takes_prompt(processor: Any) -> bool:
    try:
        parameters = inspect.signature(processor).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in positional and each.default is each.empty for each in parameters) == 3
