"""What only some requests ask of sampling: penalties, biases, masks and log-probabilities.

Plain torch, in place on the logits, with no data-dependent shape, so that a second variant of a recorded
step can hold them. Give fp32 logits: bf16 ones lose the smaller changes to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def apply_penalties(
    logits: Tensor,
    output_counts: Tensor,
    prompt_mask: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Make tokens that were seen before less (or more) likely, in place.

    Args:
        logits: ``[batch, vocab]``; written.
        output_counts: ``[batch, vocab]`` int, how often each id is in the answer so far.
        prompt_mask: ``[batch, vocab]`` bool, whether each id is in the prompt.
        repetition: ``[batch]`` fp32: a positive logit of an id seen in prompt or answer is divided by it, a
            negative one multiplied (Keskar et al. 2019, arXiv 1909.05858); 1 is off.
        presence: ``[batch]`` fp32, subtracted once from each id in the answer; 0 is off.
        frequency: ``[batch]`` fp32, subtracted for each time the id is in the answer; 0 is off.
    """
    written = output_counts > 0
    factor = torch.where(written | prompt_mask, repetition.unsqueeze(1), 1.0)
    wide = logits.float()
    wide = torch.where(wide > 0, wide / factor, wide * factor)
    wide = wide - frequency.unsqueeze(1) * output_counts
    wide = wide - torch.where(written, presence.unsqueeze(1), 0.0)
    logits.copy_(wide)


def add_logit_bias(logits: Tensor, ids: Tensor, values: Tensor) -> None:
    """Add a bias to some ids of each row, in place.

    Args:
        logits: ``[batch, vocab]``; written.
        ids: ``[batch, width]`` int32 or int64, each at most once in a row; entries outside the vocabulary
            (-1 for none) are skipped.
        values: ``[batch, width]`` fp32.
    """
    valid = (ids >= 0) & (ids < logits.shape[-1])
    added = torch.where(valid, values, 0.0).to(logits.dtype)
    logits.scatter_add_(1, torch.where(valid, ids, 0).long(), added)


def mask_not_allowed(logits: Tensor, allowed: Tensor, active: Tensor) -> None:
    """Set the logits of all but the allowed ids to minus infinity, in place, in the rows that ask for it.

    Args:
        logits: ``[batch, vocab]``; written.
        allowed: ``[batch, vocab]`` bool.
        active: ``[batch]`` bool; rows that are false are left as they are.
    """
    logits.masked_fill_(active.unsqueeze(1) & ~allowed, -torch.inf)


def bad_word_endings(words: Tensor, recent: Tensor) -> Tensor:
    """Find the ids that would complete a forbidden sequence of tokens.

    Args:
        words: ``[batch, width, length]`` int, forbidden sequences aligned to the right, filled with -1 on the
            left; all -1 for none.
        recent: ``[batch, length - 1]`` int, the last tokens of the answer, aligned to the right, filled with
            -2 on the left where the answer is shorter.

    Returns:
        ``[batch, width]`` int: the last token of each sequence whose beginning is what the answer ends with,
        -1 for the others. What ``mask_stop_ids`` takes.
    """
    beginning = words[:, :, :-1]
    matches = ((beginning == recent.unsqueeze(1)) | (beginning < 0)).all(dim=-1)
    return torch.where(matches, words[:, :, -1], -1)


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position of each row.

    Attributes:
        chosen: ``[batch]`` fp32, of the given token.
        rank: ``[batch]`` int64, 1 for the most likely token.
        top_values: ``[batch, k]`` fp32, the highest, from the highest down.
        top_ids: ``[batch, k]`` int64, their ids.
    """

    chosen: Tensor
    rank: Tensor
    top_values: Tensor
    top_ids: Tensor


def token_logprobs(logits: Tensor, tokens: Tensor, k: int) -> TokenLogprobs:
    """Return the log-probability of one token a row, its rank, and the ``k`` highest.

    Args:
        logits: ``[batch, vocab]``, before temperature.
        tokens: ``[batch]`` int, within the vocabulary.
        k: how many of the highest; 0 gives empty tensors.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, tokens.long().unsqueeze(1))
    rank = (logprobs > chosen).sum(dim=-1) + 1
    top_values, top_ids = logprobs.topk(k, dim=-1)
    return TokenLogprobs(chosen.squeeze(1), rank, top_values, top_ids)
