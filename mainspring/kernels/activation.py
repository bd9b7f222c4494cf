"""The gate of a SwiGLU feed-forward block (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mainspring.kernels.library import register


def silu_and_mul_reference(gate_up: Tensor) -> Tensor:
    """What :func:`silu_and_mul` computes, in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


_silu_and_mul = register(
    "silu_and_mul(Tensor gate_up) -> Tensor",
    cpu=silu_and_mul_reference,
    cuda="mainspring.kernels.triton.activation:silu_and_mul",
)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Compute ``silu(gate) * up``.

    Args:
        gate_up: ``[..., 2 * n]``: the gate in the first half of the last dimension, the rest in the second.

    Returns:
        ``[..., n]``, new, in the dtype of ``gate_up``; the gate is rounded to that dtype before it is
        multiplied, as Hugging Face's models do it.
    """
    out: Tensor = _silu_and_mul(gate_up)
    return out
