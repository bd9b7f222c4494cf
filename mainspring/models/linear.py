"""The linear layer of the decoder: one weight, plain or packed for the CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mainspring.kernels.linear import Fusion, LinearWeight, fused_linear, fusion, linear, pack_linear


class Linear(nn.Module):
    """`y = x @ weight.T + bias`.

    `weight` is [out_features, in_features] in the model's dtype: a parameter, or after `pack` an opaque
    oneDNN tensor under the same name.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        weight: nn.Parameter | None = None,
    ) -> None:
        """Allocate the layer, or share `weight`; its values are undefined until something is loaded."""
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight: Tensor
        if weight is None:
            weight = nn.Parameter(
                torch.empty(out_features, in_features, dtype=dtype, device=device), requires_grad=False
            )
        self.weight = weight
        self.bias: Tensor | None
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), requires_grad=False)
        else:
            self.register_parameter("bias", None)

        self._product = LinearWeight(self.weight, self.bias)

    @property
    def kind(self) -> str:
        """How the weight is stored: `dense`, or `packed` for oneDNN."""
        return self._product.kind

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [tokens, in_features] -> [tokens, out_features], written into `out` when one is given."""
        return linear(x, self._product, out)

    def fusion(self, x: Tensor) -> Fusion:
        """What to fuse in a layer with products like this one, for its hidden states x [tokens, hidden]."""
        return fusion(x, self._product)

    def fused(
        self,
        x: Tensor,
        *,
        norm: tuple[Tensor, float] | None = None,
        residual: Tensor | None = None,
        swiglu: bool = False,
        gated: bool = False,
    ) -> Tensor:
        """This layer behind an RMSNorm (weight, eps) or SwiGLU's gate, and in front of an addition or of SwiGLU, in one
        kernel; see `fused_linear`."""
        norm_weight, eps = norm if norm is not None else (None, 0.0)
        return fused_linear(
            x, self._product, norm_weight=norm_weight, eps=eps, residual=residual, swiglu=swiglu, gated=gated
        )

    @torch.no_grad()
    def pack(self) -> None:
        """Store the weight in oneDNN's layout, where it can be; the layer lets go of the plain copy."""
        packed = pack_linear(self._product)
        if packed is self._product:
            return
        self._product = packed
        del self.weight
        self.register_buffer("weight", packed.weight, persistent=False)

    @torch.no_grad()
    def write(self, start: int, rows: Tensor) -> None:
        """Replace weight rows from `start` on; memory keeps its address, a packed tensor its identity."""
        if self.kind == "dense":
            self.weight.narrow(0, start, rows.shape[0]).copy_(rows)
            return
        plain = self.weight.to_dense()
        plain.narrow(0, start, rows.shape[0]).copy_(rows)
        self.weight.copy_(pack_linear(LinearWeight(plain)).weight)

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        return f"in={self.in_features}, out={self.out_features}, bias={self.bias is not None}, {self.kind}"
