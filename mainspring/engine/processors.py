"""Python logits processors: functions of a request's own that see and change its logits before each token."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from mainspring.engine.errors import RequestError
from mainspring.engine.request import Request


def apply_processors(request: Request, logits: torch.Tensor) -> torch.Tensor:
    """The logits ``[vocab]`` after the request's processors, in their order; ``logits`` (fp32) may be changed in place.

    A processor is called as ``processor(token_ids, logits)`` with the ids of the answer so far, or, where it takes
    three arguments, as ``processor(prompt_token_ids, token_ids, logits)``, and returns logits of the same shape (as in
    vLLM's first engine). Raises ``RequestError`` when one raises or returns something else.
    """
    for processor in request.params.logits_processors or ():
        name = getattr(processor, "__name__", type(processor).__name__)
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
    return logits


def _takes_prompt(processor: Any) -> bool:
    try:
        parameters = inspect.signature(processor).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in positional and each.default is each.empty for each in parameters) == 3
