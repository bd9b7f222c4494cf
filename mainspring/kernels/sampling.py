"""Choosing the next token from logits: arg-max, or a stateless draw with temperature, min-p, top-k and top-p.

What a row may draw is defined by order: sort its logits from the highest down, equal ones by id. ``min_p``
keeps the ids whose probability is at least ``min_p`` times the highest, ``top_k`` the first k of those, and
``top_p`` the shortest beginning of what is left whose probability mass reaches ``top_p`` of it (at least one
id). So what is kept is always a beginning of that order, given by its last entry, the *cut*: a logit and an
id. Masses are summed in fixed point, so that they do not depend on the order of summation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mainspring.kernels.library import register
from mainspring.kernels.noise import gumbel_noise

#: Probabilities relative to the highest are summed as integers of this many fraction bits.
MASS_BITS = 40


def greedy_reference(logits: Tensor) -> Tensor:
    """What :func:`greedy` computes, in plain torch: the first of the highest."""
    return logits.argmax(dim=-1)


def scaled_logits(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return ``(logits - highest) / temperature``, ``[batch, vocab]`` fp32, at most 0.

    A temperature of 0 counts as 1. Subtracting first keeps tiny temperatures finite where it matters; the
    highest is 0 even where it is infinite.
    """
    wide = logits.float()
    highest = wide.amax(dim=-1, keepdim=True)
    divisor = torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    return torch.where(wide == highest, 0.0, (wide - highest) / divisor)


def filter_cut_reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the cut of each row: the lowest logit that may be drawn, ``[batch]`` fp32, and its id, int32.

    An id may be drawn if its logit is higher, or equal with an id not above the cut's. No data-dependent
    shapes; by a full sort. Arguments as in :func:`sample`.
    """
    vocab_size = logits.shape[-1]
    ordered, ids = torch.sort(logits.float(), dim=-1, descending=True, stable=True)
    scaled = scaled_logits(ordered, temperature)
    count = (scaled >= min_p.float().clamp(max=1.0).log().unsqueeze(1)).sum(dim=-1)
    count = torch.where(min_p > 0, count, vocab_size)
    limit = top_k.long()
    count = torch.where(limit > 0, torch.minimum(limit, count), count).clamp_(min=1)
    rank = torch.arange(vocab_size, device=logits.device)
    mass = torch.where(rank < count.unsqueeze(1), (scaled.exp() * 2.0**MASS_BITS).long(), 0)
    up_to = mass.cumsum(dim=-1)
    wanted = top_p.double() * up_to[:, -1].double()
    reached = ((up_to - mass).double() < wanted.unsqueeze(1)).sum(dim=-1)
    count = torch.where(top_p < 1.0, torch.minimum(reached, count), count).clamp_(min=1)
    last = (count - 1).unsqueeze(1)
    return ordered.gather(1, last).squeeze(1), ids.gather(1, last).squeeze(1).to(torch.int32)


def may_draw(logits: Tensor, cut_logit: Tensor, cut_id: Tensor) -> Tensor:
    """Return ``[batch, vocab]`` bool: the ids that a cut leaves; see :func:`filter_cut_reference`."""
    wide = logits.float()
    ids = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    edge = cut_logit.unsqueeze(1)
    return (wide > edge) | ((wide == edge) & (ids <= cut_id.unsqueeze(1)))


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
    scores = scaled_logits(logits, temperature) + gumbel_noise(seeds, choices, positions, logits.shape[-1])
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
    tokens = greedy_reference(logits)
    random = [row for row, value in enumerate(temperature.tolist()) if value > 0]
    if not random:
        return tokens
    rows = torch.tensor(random, device=logits.device)
    settings = [tensor[rows] for tensor in (temperature, top_k, top_p, min_p)]
    picked = logits[rows]
    scores = scaled_logits(picked, settings[0])
    scores += gumbel_noise(seeds[rows], choices[rows], positions[rows], logits.shape[-1])
    _, k, p, low = settings
    filtered = ((k > 0) | (p < 1.0) | (low > 0)).nonzero().squeeze(1)
    if filters and filtered.numel():
        some = picked[filtered]
        cut_logit, cut_id = filter_cut_reference(some, *(setting[filtered] for setting in settings))
        scores[filtered] = scores[filtered].masked_fill_(~may_draw(some, cut_logit, cut_id), -torch.inf)
    tokens[rows] = scores.argmax(dim=-1)
    return tokens


def mask_stop_ids_reference(logits: Tensor, stop_ids: Tensor, active: Tensor) -> None:
    """What :func:`mask_stop_ids` does, in plain torch and with no data-dependent shape."""
    valid = (stop_ids >= 0) & (stop_ids < logits.shape[-1]) & active.unsqueeze(1)
    values = torch.where(valid, -torch.inf, torch.inf).to(logits.dtype)
    logits.scatter_reduce_(1, torch.where(valid, stop_ids, 0).long(), values, "amin")


_greedy = register(
    "greedy(Tensor logits) -> Tensor",
    cpu=greedy_reference,
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
