"""One decoder for Llama 2/3.x, Mistral, Qwen2/2.5, Qwen3 and SmolLM2: switches differ, not structure."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mainspring.kernels.activation import silu_and_mul
from mainspring.kernels.attention import prefill_attention, rope_and_decode_attention
from mainspring.kernels.norm import add_rms_norm, rms_norm
from mainspring.kernels.rope import rope_and_cache, rope_table
from mainspring.kernels.seats import embed
from mainspring.models.config import ModelConfig
from mainspring.models.inputs import ModelInputs
from mainspring.models.linear import Linear
from mainspring.models.rope_scaling import inverse_frequencies

KvCache = Sequence[tuple[Tensor, Tensor]]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the weight [size]; its values are undefined until something is loaded."""
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)

    @property
    def settings(self) -> tuple[Tensor, float]:
        """Weight and eps, for a product that takes the norm over."""
        return self.weight, self.eps

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Norm of `x + residual`, and that sum."""
        return add_rms_norm(x, residual, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention over the paged KV cache, with rotary positions."""

    def __init__(self, config: ModelConfig, window: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate one layer's projections; `window` 0 is full attention."""
        super().__init__()
        self.q_size, self.eps = config.q_size, config.rms_norm_eps
        self.scale = config.head_dim**-0.5
        self.window = window
        self.qkv_proj = Linear(
            config.hidden_size,
            config.q_size + 2 * config.kv_size,
            bias=config.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.o_proj = Linear(self.q_size, config.hidden_size, bias=config.o_bias, dtype=dtype, device=device)
        norm = config.qk_norm
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype, device) if norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype, device) if norm else None

    def forward(self, x: Tensor, inputs: ModelInputs, cache: tuple[Tensor, Tensor], cos_sin: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]; writes this step's keys and values into `cache` first."""
        return self.o_proj(self.attend(self.qkv_proj(x), inputs, cache, cos_sin))

    def fused(
        self, stream: Tensor, norm: RMSNorm, inputs: ModelInputs, cache: tuple[Tensor, Tensor], cos_sin: Tensor
    ) -> Tensor:
        """stream [T, hidden] -> stream + forward(norm(stream)), norm and addition inside the two products."""
        qkv = self.qkv_proj.fused(stream, norm=norm.settings)
        return self.o_proj.fused(self.attend(qkv, inputs, cache, cos_sin), residual=stream)

    def attend(self, qkv: Tensor, inputs: ModelInputs, cache: tuple[Tensor, Tensor], cos_sin: Tensor) -> Tensor:
        """qkv [T, q + k + v] -> what the heads saw [T, q]; writes keys and values into `cache` first."""
        k_cache, v_cache = cache
        q_weight = None if self.q_norm is None else self.q_norm.weight
        k_weight = None if self.k_norm is None else self.k_norm.weight
        positions, slots, tables, lengths = inputs.positions, inputs.slots, inputs.block_tables, inputs.seq_lens
        if inputs.query_starts is None:
            attended = rope_and_decode_attention(
                qkv,
                cos_sin,
                positions,
                slots,
                k_cache,
                v_cache,
                tables,
                lengths,
                self.scale,
                self.window,
                q_weight,
                k_weight,
                self.eps,
                settled=True,
            )
        else:
            q = rope_and_cache(qkv, cos_sin, positions, slots, k_cache, v_cache, q_weight, k_weight, self.eps)
            starts = inputs.query_starts
            attended = prefill_attention(q, k_cache, v_cache, tables, starts, lengths, self.scale, self.window)
        return attended.reshape(-1, self.q_size)


class MLP(nn.Module):
    """Gated feed-forward: `down(silu(gate(x)) * up(x))`, gate and up in one weight."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate one layer's projections."""
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = Linear(hidden, 2 * inner, bias=bias, dtype=dtype, device=device)
        self.down_proj = Linear(inner, hidden, bias=bias, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        if self.gate_up_proj.fusion(x).swiglu:
            return self.down_proj(self.gate_up_proj.fused(x, swiglu=True))
        return self.down_proj(silu_and_mul(self.gate_up_proj(x)))

    def fused(self, stream: Tensor, norm: RMSNorm) -> Tensor:
        """stream [T, hidden] -> stream + forward(norm(stream)), norm, gate and addition inside the two products."""
        gate_up = self.gate_up_proj.fused(stream, norm=norm.settings)
        return self.down_proj.fused(gate_up, residual=stream, gated=True)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate layer `index`."""
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.self_attn = Attention(config, config.sliding_windows[index], dtype, device)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.mlp = MLP(config, dtype, device)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        inputs: ModelInputs,
        cache: tuple[Tensor, Tensor],
        cos_sin: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """(what the layer before added [T, hidden], residual stream [T, hidden] or None) -> the same pair.

        Without a residual stream, x is the stream itself: nothing waits to be added.
        """
        if residual is None and self.self_attn.qkv_proj.fusion(x).norm:
            x = self.self_attn.fused(x, self.input_layernorm, inputs, cache, cos_sin)
            return self.mlp.fused(x, self.post_attention_layernorm), None
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, inputs, cache, cos_sin)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


class Embedding(nn.Module):
    """Token ids -> vectors."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the weight [vocab, hidden]; its values are undefined until something is loaded."""
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(vocab_size, hidden_size, dtype=dtype, device=device), requires_grad=False
        )

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] -> [T, hidden]."""
        return embed(token_ids, self.weight)


class DecoderBody(nn.Module):
    """Embedding, layers and final norm; the part that checkpoints call `model`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate everything, on `device`."""
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype, device)
        self.layers = nn.ModuleList(DecoderLayer(config, i, dtype, device) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)

    def forward(self, inputs: ModelInputs, kv_cache: KvCache, cos_sin: Tensor) -> Tensor:
        """Hidden states [T, hidden] after the final norm."""
        x: Tensor = self.embed_tokens(inputs.token_ids)
        residual: Tensor | None = None
        for layer, cache in zip(self.layers, kv_cache, strict=True):
            x, residual = layer(x, residual, inputs, cache, cos_sin)
        return self.norm(x) if residual is None else self.norm.add(x, residual)[0]


class Decoder(nn.Module):
    """A whole model: `forward` for hidden states, `compute_logits` for the rows that need them.

    Weights are allocated once and keep their addresses. `max_positions` bounds the positions that may be used
    (default: what the configuration states) and settles length-dependent RoPE scaling.
    """

    cos_sin: Tensor

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        max_positions: int | None = None,
    ) -> None:
        """Allocate the model on `device` in `dtype`, with undefined values."""
        super().__init__()
        device = torch.device(device)
        self.config = config
        self.max_positions = max_positions or config.max_position_embeddings
        self.model = DecoderBody(config, dtype, device)
        self.lm_head = Linear(
            config.hidden_size,
            config.vocab_size,
            bias=False,
            dtype=dtype,
            device=device,
            weight=self.model.embed_tokens.weight if config.tie_word_embeddings else None,
        )
        inv_freq, scaling = inverse_frequencies(config, self.max_positions)
        self.register_buffer("cos_sin", rope_table(inv_freq.to(device), self.max_positions, scaling), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights, hidden states and KV cache."""
        return self.model.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.model.embed_tokens.weight.device

    def forward(self, inputs: ModelInputs, kv_cache: KvCache) -> Tensor:
        """Hidden states [T, hidden] after the final norm; writes one (k, v) pair a layer into `kv_cache`.

        `kv_cache` has a pair of tensors [num_blocks, block_size, num_kv_heads, head_dim] for each layer.
        """
        return self.model(inputs, kv_cache, self.cos_sin)

    def pack(self) -> None:
        """Store the projections in the CPU's fastest layout, one at a time, dropping each plain copy.

        Does nothing on other devices. The token embeddings stay plain, so a tied head has its own packed
        copy.
        """
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [n, hidden] -> logits [n, vocab] in the model's dtype, into `out` when one is given."""
        return self.lm_head(hidden, out)
