"""The matrix product with a weight, behind a class that does not say how the weight is stored."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
        return self.out_features * self.in_features * self.weight.element_size() + (
            0 if self.bias is None else self.bias.nbytes
        )

    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute ``x @ weight.T + bias``; see :func:`linear`."""
        if out is None:
            return F.linear(x, self.weight, self.bias)
        transposed = self.weight.t()
        if self.bias is None:
            return torch.mm(x, transposed, out=out)
        return torch.addmm(self.bias, x, transposed, out=out)

    def __repr__(self) -> str:
        bias = ", bias" if self.bias is not None else ""
        return f"{type(self).__name__}({self.out_features}x{self.in_features}, {self.weight.dtype}{bias})"


class PackedLinearWeight(LinearWeight):
    """A dense CPU weight re-ordered once into oneDNN's blocked layout.

    Faster than the plain layout, and among a few rows the product of one does not depend on how many there
    are: where oneDNN takes another path for a lone row, which is tried when packing, it is multiplied as two.
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
        self._double_lone_row = not torch.equal(self._product(probe)[:1], self._product(probe[:1]))

    def _product(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return product

    @property
    def nbytes(self) -> int:
        """Bytes that a product must read."""
        return self.out_features * self.in_features * self.weight.dtype.itemsize + (
            0 if self.bias is None else self.bias.nbytes
        )

    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute ``x @ weight.T + bias``; see :func:`linear`."""
        if x.shape[0] == 1 and self._double_lone_row:
            product = self._product(x.expand(2, -1))[:1]
        else:
            product = self._product(x)
        return product if out is None else out.copy_(product)


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
