"""Seeded random weights: for measuring a model's shape without its checkpoint."""

from __future__ import annotations

import torch
from torch import nn

from mainspring.models.decoder import Decoder, Embedding, RMSNorm
from mainspring.models.linear import Linear


@torch.no_grad()
def fill_dummy(model: Decoder, seed: int = 0) -> None:
    """Fill every parameter with values that depend on `seed` and the kind of device, made on it.

    Projections have standard deviation 1 / sqrt(in_features), and those that write to the residual stream are
    further divided by sqrt(2 * layers), so that activations stay near 1 at any depth and fit 16-bit types;
    norms are 1, biases small.
    """
    generator = torch.Generator(device=model.device).manual_seed(seed)
    residual = (2 * model.config.num_layers) ** -0.5

    def normal(tensor: torch.Tensor, std: float) -> None:
        tensor.normal_(0.0, std, generator=generator)

    for name, module in model.named_modules():
        if isinstance(module, RMSNorm):
            module.weight.fill_(1.0)
        elif isinstance(module, Embedding):
            normal(module.weight, module.weight.shape[1] ** -0.5)
        elif isinstance(module, Linear):
            if name == "lm_head" and model.config.tie_word_embeddings:
                continue
            into_residual = name.endswith(("o_proj", "down_proj"))
            normal(module.weight, module.in_features**-0.5 * (residual if into_residual else 1.0))
            if isinstance(module.bias, nn.Parameter):
                normal(module.bias, 0.02)
