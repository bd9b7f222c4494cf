"""What stands between the QKV product and attention, in one launch: head norm, rotation and the write to
the KV cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mainspring.kernels.triton.gemv_common import launch, pdl_launch_dependents, pdl_supported, pdl_wait


@triton.jit
def norm_and_rotate(
    first,
    second,
    gain_first,
    gain_second,
    cos,
    sin,
    eps,
    D: tl.constexpr,
    NORM: tl.constexpr,
    dtype: tl.constexpr,
):
    """Halves of heads, [H, D / 2] fp32 each, normalised over D (where NORM) and rotated; rounded as
    separate steps are.

    ``gain_*`` are the head norm's weight, [1, D / 2]; ``cos`` and ``sin`` are [1, D / 2] fp32. ``dtype`` is
    the model's: the norm's result is rounded to it before the rotation, as it is when the two are separate
    operations.
    """
    if NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = (1.0 / tl.sqrt(squares / D + eps))[:, None]
        first = (gain_first * (first * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        second = (gain_second * (second * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _qk_norm_rope_write_kernel(
    qkv_ptr, q_ptr, k_cache_ptr, v_cache_ptr, cos_sin_ptr, positions_ptr, slots_ptr, q_gain_ptr, k_gain_ptr,
    stride_qkv, stride_q, stride_slot, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
    NORM: tl.constexpr, PDL: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    Q_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    KV_BLOCKS: tl.constexpr = (KV_HEADS + BLOCK_H - 1) // BLOCK_H
    BLOCKS: tl.constexpr = Q_BLOCKS + 2 * KV_BLOCKS
    dtype = qkv_ptr.dtype.element_ty
    token = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    is_q = block < Q_BLOCKS
    is_v = block >= Q_BLOCKS + KV_BLOCKS
    start = tl.where(is_q, block, tl.where(is_v, block - Q_BLOCKS - KV_BLOCKS, block - Q_BLOCKS)) * BLOCK_H
    heads = start + tl.arange(0, BLOCK_H)
    limit = tl.where(is_q, HEADS, KV_HEADS)
    base = tl.where(is_q, 0, tl.where(is_v, HEADS + KV_HEADS, HEADS)) * D
    lane = tl.arange(0, HALF)
    in_half = lane < D // 2
    mask = (heads < limit)[:, None] & in_half[None, :]
    gain_first = tl.full([1, HALF], 1.0, tl.float32)
    gain_second = tl.full([1, HALF], 1.0, tl.float32)
    if NORM:
        gain_ptr = tl.where(is_q, q_gain_ptr, k_gain_ptr)
        gain_first = tl.load(gain_ptr + lane, mask=in_half, other=0.0).to(tl.float32)[None, :]
        gain_second = tl.load(gain_ptr + D // 2 + lane, mask=in_half, other=0.0).to(tl.float32)[None, :]
    pdl_launch_dependents(PDL)
    pdl_wait(PDL and WAIT)

    slot = tl.load(slots_ptr + token)
    # Of a token without a slot no key and value head is written.
    keep = (heads < tl.where(is_q | (slot >= 0), limit, 0))[:, None] & in_half[None, :]
    source = qkv_ptr + token.to(tl.int64) * stride_qkv + base + heads[:, None] * D + lane[None, :]
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + D // 2, mask=mask, other=0.0).to(tl.float32)
    if is_v:
        out = v_cache_ptr + slot.to(tl.int64) * stride_slot + heads[:, None] * D + lane[None, :]
        tl.store(out, first.to(dtype), mask=keep)
        tl.store(out + D // 2, second.to(dtype), mask=keep)
    else:
        position = tl.load(positions_ptr + token).to(tl.int64)
        cos = tl.load(cos_sin_ptr + position * D + lane, mask=in_half, other=0.0)[None, :]
        sin = tl.load(cos_sin_ptr + position * D + D // 2 + lane, mask=in_half, other=0.0)[None, :]
        first, second = norm_and_rotate(first, second, gain_first, gain_second, cos, sin, eps, D, NORM, dtype)
        if is_q:
            out = q_ptr + token.to(tl.int64) * stride_q + heads[:, None] * D + lane[None, :]
        else:
            out = k_cache_ptr + slot.to(tl.int64) * stride_slot + heads[:, None] * D + lane[None, :]
        tl.store(out, first.to(dtype), mask=keep)
        tl.store(out + D // 2, second.to(dtype), mask=keep)


def reference_qk_norm_rope_write(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    heads: int,
    *,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """What ``qk_norm_rope_write`` computes, one operation after the other in torch."""
    kv_heads, d = k_cache.shape[-2:]
    q, k, v = qkv.view(qkv.shape[0], -1, d).split([heads, kv_heads, kv_heads], dim=1)

    def normed(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is None:
            return x
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * scaled.to(x.dtype)

    cos, sin = cos_sin[positions.long()].chunk(2, dim=-1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.float().chunk(2, dim=-1)
        turned = (first * cos[:, None] - second * sin[:, None], second * cos[:, None] + first * sin[:, None])
        return torch.cat(turned, dim=-1).to(x.dtype)

    kept = slots >= 0
    k_cache.view(-1, kv_heads, d)[slots[kept]] = rotated(normed(k, k_norm_weight))[kept]
    v_cache.view(-1, kv_heads, d)[slots[kept]] = v[kept]
    return rotated(normed(q, q_norm_weight))


def qk_norm_rope_write(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    heads: int,
    *,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    pdl: bool | None = None,
    wait: bool = True,
) -> torch.Tensor:
    """Normalise the heads of q and k (where weights are given), rotate them, write k and v to the cache;
    returns q.

    Args:
        qkv: [T, (heads + 2 * kv_heads) * D], rows contiguous.
        k_cache: [blocks, block_size, kv_heads, D], contiguous; written at ``slots``.
        v_cache: like ``k_cache``.
        cos_sin: [max_positions, D] fp32, cosines then sines.
        positions: [T] int.
        slots: [T] int64; a token with slot -1 is not written.
        heads: query heads.
        q_norm_weight: [D]; with ``k_norm_weight``, or neither.
        k_norm_weight: [D].
        eps: of the head norm.
        out: [T, heads, D] to write q into; made when None.
        pdl: programmatic dependent launch; None is "where the device can".
        wait: False removes the wait (for the test that needs it removed).

    Raises:
        ValueError: when shapes do not fit.
    """
    kv_heads, d = k_cache.shape[-2:]
    tokens = qkv.shape[0]
    if qkv.shape != (tokens, (heads + 2 * kv_heads) * d) or qkv.stride(1) != 1:
        raise ValueError(f"qkv must be [T, {(heads + 2 * kv_heads) * d}] with contiguous rows, got {qkv.shape}")
    if (q_norm_weight is None) != (k_norm_weight is None):
        raise ValueError("give both q_norm_weight and k_norm_weight, or neither")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()) or v_cache.shape != k_cache.shape:
        raise ValueError("k_cache and v_cache must be contiguous and of one shape")
    if out is None:
        out = torch.empty((tokens, heads, d), dtype=qkv.dtype, device=qkv.device)
    supported = pdl_supported(qkv.device)
    use_pdl = supported if pdl is None else (pdl and supported)
    block_h = min(4, triton.next_power_of_2(kv_heads))
    blocks = triton.cdiv(heads, block_h) + 2 * triton.cdiv(kv_heads, block_h)
    gains = (qkv, qkv) if q_norm_weight is None or k_norm_weight is None else (q_norm_weight, k_norm_weight)
    launch(
        _qk_norm_rope_write_kernel, tokens * blocks,
        (qkv, out, k_cache, v_cache, cos_sin, positions, slots, *gains,
         qkv.stride(0), out.stride(0), kv_heads * d, eps),
        {"HEADS": heads, "KV_HEADS": kv_heads, "D": d, "HALF": triton.next_power_of_2(d // 2),
         "BLOCK_H": block_h, "NORM": q_norm_weight is not None, "PDL": use_pdl, "WAIT": wait},
        warps=1, pdl=use_pdl,
    )  # fmt: skip
    return out
