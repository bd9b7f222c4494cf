"""Log-probabilities of prompt tokens, which only a prefill step that runs as it is can tell."""

from __future__ import annotations

import numpy as np
import torch

from mainspring.engine.launched import PromptRead
from mainspring.engine.logits_state import pack_logprobs
from mainspring.engine.plan import PrefillPlan
from mainspring.engine.seats import Upload
from mainspring.engine.transfer import Download
from mainspring.models.decoder import Decoder


def read_prompts(
    model: Decoder, plan: PrefillPlan, hidden: torch.Tensor, logits: torch.Tensor, upload: Upload
) -> tuple[PromptRead, ...]:
    """Log-probabilities of the prompt tokens that each chunk predicts: of position ``start`` + 1 on, as far as the
    prompt goes.

    ``hidden`` ``[T, hidden]`` are the hidden states of the plan's tokens. Logits are made in ``logits``
    ``[max rows, vocab]``, in pieces of at most as many tokens as that has rows.
    """
    reads = []
    offset, max_rows = 0, logits.shape[0]
    for chunk in plan.chunks:
        first, offset = offset, offset + chunk.length
        request = chunk.request
        if not request.prompt_logprobs_due:
            continue
        end = min(chunk.start + chunk.length, len(request.prompt_token_ids) - 1)
        for start in range(chunk.start, end, max_rows):
            count = min(max_rows, end - start)
            row = first + start - chunk.start
            made = model.compute_logits(hidden[row : row + count], out=logits[:count])
            targets = np.asarray(request.token_span(start + 1, start + 1 + count), dtype=np.int64)
            wanted = request.params.prompt_logprobs
            k = made.shape[1] if wanted is None or wanted < 0 else wanted
            reads.append(PromptRead(request, start + 1, Download(pack_logprobs(made, upload(targets), k))))
    return tuple(reads)
