"""Which ids a row may draw: min-p, top-k and top-p.

What a row may draw is defined by order: sort its logits from the highest down, equal ones by id. ``min_p``
keeps the ids whose probability is at least ``min_p`` times the highest, ``top_k`` the first k of those, and
``top_p`` the shortest beginning of what is left whose probability mass reaches ``top_p`` of it (at least one
id). So what is kept is always a beginning of that order, given by its last entry, the *cut*: a logit and an
id. Masses are summed in fixed point, so that they do not depend on the order of summation.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Probabilities relative to the highest are summed as integers of this many fraction bits.
MASS_BITS = 40


def scaled_logits(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return ``(logits - highest) / temperature``, ``[batch, vocab]`` fp32, at most 0.

    A temperature of 0 counts as 1. Subtracting first keeps tiny temperatures finite where it matters; the
    highest is 0 even where it is infinite.
    """
    wide = logits.float()
    highest = wide.amax(dim=-1, keepdim=True)
    divisor = torch.where(temperature > 0, temperature, 1.0).unsqueeze(1)
    return torch.where(wide == highest, 0.0, (wide - highest) / divisor)


def order_keys(logits: Tensor) -> Tensor:
    """Map fp32 to int32: the higher the logit the lower the key, and equal ones (0 and -0 too) the same."""
    bits = torch.where(logits == 0, 0.0, logits).view(torch.int32)
    return torch.where(bits < 0, bits & 0x7FFFFFFF, ~bits)


def descending_order(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Sort fp32 ``[batch, vocab]`` from the highest down, equal ones by id; returns logits and ids.

    On the CPU through integer keys: torch sorts a row of integers by radix, about twenty times faster.
    """
    if logits.device.type != "cpu":
        return torch.sort(logits, dim=-1, descending=True, stable=True)
    ids = torch.stack([torch.sort(row, stable=True).indices for row in order_keys(logits).unbind(0)])
    return logits.gather(1, ids), ids


def filter_cut_reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the cut of each row: the lowest logit that may be drawn, ``[batch]`` fp32, and its id, int32.

    An id may be drawn if its logit is higher, or equal with an id not above the cut's. No data-dependent
    shapes; by a full sort. Arguments as in :func:`sample`.
    """
    vocab_size = logits.shape[-1]
    ordered, ids = descending_order(logits.float())
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


def highest_ids(logits: Tensor, k: int) -> Tensor:
    """Return the ids of the first ``k`` of a row ``[vocab]`` in order of logit, then id; ascending, int64."""
    last = logits.topk(k).values[-1]
    above = (logits > last).nonzero().squeeze(1)
    equal = (logits == last).nonzero().squeeze(1)[: k - above.numel()]
    return torch.cat((above, equal)).sort().values


def drawable_ids(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor | None:
    """Return the ids that one row ``[1, vocab]`` may draw, ascending, int64; None for all.

    For the CPU: looks at the settings and does only what they ask for. A row with a NaN has no order; there only id
    0 is left.
    """
    k, vocab_size = int(top_k), logits.shape[-1]
    limited = 0 < k < vocab_size
    if not limited and float(top_p) >= 1.0 and float(min_p) <= 0.0:
        return None
    if bool(logits.isnan().any()):
        return torch.zeros(1, dtype=torch.int64, device=logits.device)
    ids = None
    if limited and k <= vocab_size // 8:
        # A small top-k leaves little to sort; the rest is decided among these as it would be among all.
        ids = highest_ids(logits[0].float(), k)
        if float(top_p) >= 1.0 and float(min_p) <= 0.0:
            return ids
        logits = logits[:, ids]
    cut = filter_cut_reference(logits, temperature, top_k, top_p, min_p)
    left = may_draw(logits, *cut)[0].nonzero().squeeze(1)
    return left if ids is None else ids[left]
