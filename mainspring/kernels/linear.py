"""The matrix product with a weight, behind a class that does not say how the weight is stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mainspring.kernels.activation import silu_and_mul
from mainspring.kernels.library import fast_path, register
from mainspring.kernels.norm import rms_norm

#: Products of more rows than this always go to ``torch``: no kernel here takes more.
SKINNY_ROWS = 64


def fused_linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    swiglu: bool = False,
    gated: bool = False,
) -> Tensor:
    """What :func:`fused_linear` computes, one operation after the other, each rounded to the dtype of ``x``."""
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    if gated:
        x = silu_and_mul(x)
    product = F.linear(x, weight, bias)
    if swiglu:
        product = silu_and_mul(product)
    return product if residual is None else product + residual


def linear_out_reference(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """A product written into ``out``."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


_fused_linear = register(
    "fused_linear(Tensor x, Tensor weight, Tensor? bias=None, Tensor? norm_weight=None, float eps=0.0, "
    "Tensor? residual=None, bool swiglu=False, bool gated=False) -> Tensor",
    cpu=fused_linear_reference,
    cuda="mainspring.kernels.triton.linear:fused_linear",
    plain=fused_linear_reference,
)
_linear_out = register(
    "linear_out(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out) -> ()",
    cpu=linear_out_reference,
    cuda="mainspring.kernels.triton.linear:linear_out",
    plain=linear_out_reference,
)


class LinearWeight:
    """A weight ``[out_features, in_features]`` with an optional bias ``[out_features]``, stored densely.

    Other ways of storing one (packed, quantized) derive from this class and override :meth:`apply` and
    :meth:`tensors`; whoever multiplies calls :func:`linear` and does not ask which kind it is.
    """

    kind = "dense"

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        if weight.dim() != 2:
            raise ValueError(f"a linear weight must be [out_features, in_features], not {list(weight.shape)}")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(
                f"bias {list(bias.shape)} does not fit weight {list(weight.shape)}; it must be [{weight.shape[0]}]"
            )
        self.weight: Tensor = weight
        self.bias: Tensor | None = bias
        self.out_features: int = weight.shape[0]
        self.in_features: int = weight.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that a product reads, by name; what a recording's address book has to hold."""
        return {"weight": self.weight} if self.bias is None else {"weight": self.weight, "bias": self.bias}

    @property
    def nbytes(self) -> int:
        """Bytes that a product must read."""
        return self.out_features * self.in_features * self.weight.dtype.itemsize + (
            0 if self.bias is None else self.bias.nbytes
        )

    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute ``x @ weight.T + bias``; see :func:`linear`."""
        skinny = x.is_cuda and x.shape[0] <= SKINNY_ROWS
        if out is None:
            product: Tensor = (_fused_linear if skinny else F.linear)(x, self.weight, self.bias)
            return product
        (_linear_out if skinny else linear_out_reference)(x, self.weight, self.bias, out)
        return out

    def apply_fused(
        self,
        x: Tensor,
        norm_weight: Tensor | None,
        eps: float,
        residual: Tensor | None,
        swiglu: bool,
        gated: bool,
    ) -> Tensor:
        """Compute what :func:`fused_linear` says, where :func:`fusion` says that it pays."""
        product: Tensor = _fused_linear(x, self.weight, self.bias, norm_weight, eps, residual, swiglu, gated)
        return product

    def __repr__(self) -> str:
        bias = ", bias" if self.bias is not None else ""
        return f"{type(self).__name__}({self.out_features}x{self.in_features}, {self.weight.dtype}{bias})"


class PackedLinearWeight(LinearWeight):
    """A dense CPU weight re-ordered once into oneDNN's blocked layout.

    Faster than the plain layout, and among a few rows the product of one does not depend on how many there
    are: where oneDNN takes another path for a lone row, it is multiplied as two. Other numbers of rows are padded as
    :func:`padded_rows` says, for oneDNN compiles a product for each number of rows and keeps it, about half a megabyte.
    The packed tensor is opaque: it has no address, so a recording can name it but not check it.
    """

    kind = "packed"

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        if not can_pack(weight):
            raise ValueError(
                f"oneDNN here cannot pack {weight.dtype} on {weight.device}; "
                "pack_linear() leaves such a weight as it is"
            )
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        probe = torch.linspace(-1, 1, 2 * self.in_features, device="cpu").view(2, -1).to(weight.dtype)
        # Rounding to 16 bits hides from most probes that the sums differ, so those types are not asked.
        self._double_lone_row = weight.dtype != torch.float32 or not torch.equal(
            self._product(probe)[:1], self._product(probe[:1])
        )

    def _product(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return product

    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute ``x @ weight.T + bias``; see :func:`linear`."""
        if x.shape[0] == 1 and self._double_lone_row:
            product = self._product(x.expand(2, -1))[:1]
        else:
            rows = x.shape[0]
            more = padded_rows(rows) - rows
            product = self._product(F.pad(x, (0, 0, 0, more)))[:rows] if more else self._product(x)
        return product if out is None else out.copy_(product)


def padded_rows(rows: int) -> int:
    """Rows with which a packed product of ``rows`` is computed: 1, 2, a multiple of 4, and above 64 of a 16th to an
    8th of ``rows``, so that prompts of all lengths need a few compiled products. 42 numbers serve up to 512 rows."""
    if rows <= 2:
        return rows
    step = max(4, (1 << (rows - 1).bit_length()) // 16)
    return -(-rows // step) * step


@dataclass(frozen=True)
class Fusion:
    """What a product of few rows takes over from the kernels beside it.

    ``norm``: the RMSNorm in front of it, and the addition to the residual stream behind it. ``swiglu``: the
    activation between gate-up and down product.
    """

    norm: bool = False
    swiglu: bool = False


NO_FUSION = Fusion()


def fusion(x: Tensor, weight: LinearWeight) -> Fusion:
    """What to fuse in a layer whose hidden states are ``x`` ``[rows, hidden]`` and whose weights are like ``weight``.

    Chosen from the time of all products of a step on an H200, in bf16, with what stands between them but attention.
    One row, hidden size 1,024: 0.462 ms with nothing fused, 0.439 with everything, 0.429 without SwiGLU. With 2,048
    and 4,096 the norm is better alone (0.682 against 0.737 ms, 3.63 against 3.74), for each of the many programs of
    such a product reads and normalises the whole row anew, while fused SwiGLU gains 2 and 27 us. 16 rows, hidden
    size 1,024: 0.613 ms with nothing fused, 0.650 with all but SwiGLU, 0.624 with all, 0.590 with all but the norm.
    """
    rows, hidden = x.shape
    if not x.is_cuda or rows > 16 or weight.kind != "dense" or x.dtype == torch.float32 or not fast_path():
        return NO_FUSION
    alone = rows == 1 and hidden <= 1024
    return Fusion(norm=alone, swiglu=not alone)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can pack this weight on this machine."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32


def pack_linear(weight: LinearWeight) -> LinearWeight:
    """Return the form of a dense weight that multiplies fastest on its device.

    On the CPU that is oneDNN's packed layout, a copy: drop the original to have its memory back. A weight
    that cannot be packed, or is packed already, is returned as it is.
    """
    if weight.kind != "dense" or not can_pack(weight.weight):
        return weight
    return PackedLinearWeight(weight.weight, weight.bias)


def linear(x: Tensor, weight: LinearWeight, out: Tensor | None = None) -> Tensor:
    """Multiply by a weight: ``x @ weight.T + bias``.

    Args:
        x: ``[rows, in_features]`` in the weight's dtype.
        weight: the weight, of any kind.
        out: ``[rows, out_features]`` to write into, or None for a new tensor.

    Returns:
        ``[rows, out_features]``: ``out`` where it was given.
    """
    return weight.apply(x, out)


def fused_linear(
    x: Tensor,
    weight: LinearWeight,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    swiglu: bool = False,
    gated: bool = False,
) -> Tensor:
    """A product with what stands in front of it and behind it, in one kernel where there is one.

    Args:
        x: ``[rows, in_features]`` in the weight's dtype.
        weight: the weight, stored densely.
        norm_weight: ``[in_features]``: multiply ``rms_norm(x, norm_weight, eps)`` rather than ``x``.
        eps: of the norm.
        residual: ``[rows, out_features]``, added to the product.
        swiglu: the weight holds gate rows, then as many up rows: return ``silu(gate) * up``,
            ``[rows, out_features / 2]``; not together with ``residual``.
        gated: ``x`` is ``[rows, 2 in_features]``, gate columns and then as many up columns: multiply
            ``silu(gate) * up``; not together with a norm.

    Returns:
        A new tensor in the dtype of ``x``. What the kernel rounds only once the reference rounds after each operation.

    Raises:
        ValueError: ``swiglu`` and ``residual`` together, or ``gated`` and a norm.
    """
    if swiglu and residual is not None:
        raise ValueError("swiglu and residual exclude each other: the addition belongs to the product behind")
    if gated and norm_weight is not None:
        raise ValueError("gated and norm_weight exclude each other: the norm belongs to the product in front")
    return weight.apply_fused(x, norm_weight, eps, residual, swiglu, gated)
