"""Choosing the next token from logits: arg-max, or a stateless draw with temperature, min-p, top-k and top-p.

What a row may draw is defined in :mod:`mainspring.kernels.filters`, where its random numbers come from in
:mod:`mainspring.kernels.noise`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mainspring.kernels.filters import drawable_ids, filter_cut_reference, may_draw, scaled_logits
from mainspring.kernels.library import register
from mainspring.kernels.noise import gumbel_from_bits, gumbel_noise, random_bits, row_keys


def greedy_reference(logits: Tensor) -> Tensor:
    """What :func:`greedy` computes, in plain torch: the first of the highest."""
    return logits.argmax(dim=-1)


def greedy_on_cpu(logits: Tensor) -> Tensor:
    """:func:`greedy_reference` by numpy where it has the type: eight times faster, for torch looks at one at a time."""
    if logits.dtype != torch.float32:
        return greedy_reference(logits)
    return torch.from_numpy(np.argmax(logits.numpy(), axis=-1))


def sample_reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    choices: Tensor,
    positions: Tensor,
    filters: bool = True,
) -> Tensor:
    """What :func:`sample` computes, in plain torch and with no data-dependent shape."""
    ids = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    scores = scaled_logits(logits, temperature) + gumbel_noise(seeds, choices, positions, ids)
    if filters:
        cut_logit, cut_id = filter_cut_reference(logits, temperature, top_k, top_p, min_p)
        scores = scores.masked_fill(~may_draw(logits, cut_logit, cut_id), -torch.inf)
    return torch.where(temperature > 0, scores.argmax(dim=-1), greedy_reference(logits))


def sample_by_need(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    choices: Tensor,
    positions: Tensor,
    filters: bool = True,
) -> Tensor:
    """The tokens of :func:`sample_reference`, doing for each row only what its settings ask for."""
    if not bool((temperature > 0).any()):
        return greedy_on_cpu(logits)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    key_1, key_2 = row_keys(seeds, choices, positions)
    everything = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    for row, value in enumerate(temperature.tolist()):
        one = slice(row, row + 1)
        if value <= 0:
            tokens[row] = logits[row].argmax()
            continue
        kept = None
        if filters:
            kept = drawable_ids(logits[one], temperature[one], top_k[one], top_p[one], min_p[one])
        ids = everything if kept is None else kept.to(torch.int32)
        # The row's highest is always among those kept, so that what is left scales as the whole does.
        scores = scaled_logits(logits[one] if kept is None else logits[one, kept], temperature[one])
        scores += gumbel_from_bits(random_bits(key_1[one], key_2[one], ids))
        best = scores[0].argmax()
        tokens[row] = best if kept is None else kept[best]
    return tokens


def mask_stop_ids_reference(logits: Tensor, stop_ids: Tensor, active: Tensor) -> None:
    """What :func:`mask_stop_ids` does, in plain torch and with no data-dependent shape."""
    valid = (stop_ids >= 0) & (stop_ids < logits.shape[-1]) & active.unsqueeze(1)
    values = torch.where(valid, -torch.inf, torch.inf).to(logits.dtype)
    logits.scatter_reduce_(1, torch.where(valid, stop_ids, 0).long(), values, "amin")


_greedy = register(
    "greedy(Tensor logits) -> Tensor",
    cpu=greedy_on_cpu,
    cuda="mainspring.kernels.triton.sampling:greedy",
)
_sample = register(
    "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, "
    "Tensor choices, Tensor positions, bool filters=True) -> Tensor",
    cpu=sample_by_need,
    cuda="mainspring.kernels.triton.sampling:sample",
)
_mask_stop_ids = register(
    "mask_stop_ids(Tensor(a!) logits, Tensor stop_ids, Tensor active) -> ()",
    cpu=mask_stop_ids_reference,
    cuda="mainspring.kernels.triton.sampling:mask_stop_ids",
)


def greedy(logits: Tensor) -> Tensor:
    """Return the id of each row's highest logit, the lowest of equal ones.

    Args:
        logits: ``[batch, vocab]`` in fp32, bf16 or fp16.

    Returns:
        ``[batch]`` int64, new.
    """
    out: Tensor = _greedy(logits)
    return out


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    choices: Tensor,
    positions: Tensor,
    filters: bool = True,
) -> Tensor:
    """Draw one token a row. The same (seed, choice, position) and logits give the same token in any row.

    Args:
        logits: ``[batch, vocab]`` in fp32, bf16 or fp16; not written.
        temperature: ``[batch]`` fp32; 0 (or less) takes the arg-max, and the rest is ignored.
        top_k: ``[batch]`` int32; 0 or less is off.
        top_p: ``[batch]`` fp32; 1 or more is off, 0 keeps one id.
        min_p: ``[batch]`` fp32; 0 is off.
        seeds: ``[batch]`` int64.
        choices: ``[batch]`` int32, which of a request's parallel answers.
        positions: ``[batch]`` int32 or int64, the absolute position that the token will have.
        filters: False promises that no row uses ``top_k``, ``top_p`` or ``min_p``, which are then not looked
            at, so that a recording without them is shorter; the tokens are the same.

    Returns:
        ``[batch]`` int64, new; always an id of the vocabulary, whatever a padded row holds.
    """
    out: Tensor = _sample(logits, temperature, top_k, top_p, min_p, seeds, choices, positions, filters)
    return out


def mask_stop_ids(logits: Tensor, stop_ids: Tensor, active: Tensor) -> None:
    """Set the logits of each active row's stop ids to minus infinity, in place.

    Args:
        logits: ``[batch, vocab]``; written.
        stop_ids: ``[batch, width]`` int32; entries outside the vocabulary (-1 for none) are skipped.
        active: ``[batch]`` bool; rows that are false are left as they are.
    """
    _mask_stop_ids(logits, stop_ids, active)
