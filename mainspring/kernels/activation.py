"""The gate of a SwiGLU feed-forward block (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mainspring.kernels.library import Prepared, register


def prepare_silu_and_mul(gate_up: Tensor, out: Sequence[Tensor] | None = None) -> Prepared:
    """:func:`silu_and_mul` in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    (product,) = out or (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device),)

    def run() -> None:
        torch._C._nn.silu(gate, out=product)  # type: ignore[call-arg]
        product.mul_(up)

    return run, (product,)


_silu_and_mul = register(
    "silu_and_mul(Tensor gate_up) -> Tensor",
    prepare=prepare_silu_and_mul,
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
