"""What the sampling tests share: a request traced step by step, with the model's own logits of each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mainspring import LLM, CompletionOutput, RequestOutput, SamplingParams

PROMPT_IDS = [11, 45, 200, 31, 8, 45]
PROMPT = {"prompt_token_ids": PROMPT_IDS}


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **options})


def ids(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def trace(
    llm: LLM, params: SamplingParams, prompt_ids: Sequence[int] = PROMPT_IDS
) -> tuple[CompletionOutput, list[torch.Tensor]]:
    """The finished answer of a request that runs alone, and ``[vocab]`` fp32 logits for each of its tokens."""
    answer = llm.core.add("traced", prompt_ids, params)
    logits: list[torch.Tensor] = []
    known = 0
    while not answer.finished:
        llm.core.step()
        count = len(answer.choices[0].request.output_token_ids)
        if count > known:
            known = count
            logits.append(llm.core.runner.logits[0].float().clone())
    return answer.output().outputs[0], logits
