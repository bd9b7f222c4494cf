"""Triton kernels of :mod:`mainspring.kernels.rope`: one program for one head of one token, in fp32."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mainspring.kernels.triton import pdl
from mainspring.kernels.triton.pdl import pdl_launch_dependents, pdl_wait


# A head whose slot is negative is not stored. (Triton's interpreter gives a scalar comparison that is spread
# over a mask the wrong type, so the slot is spread first.)
@triton.jit
def _rotate_head(
    source_ptr, target_ptr, weight_ptr, table_ptr, eps, half, slot, NORM: tl.constexpr, BLOCK: tl.constexpr
):
    columns = tl.arange(0, BLOCK)
    inside = columns < half
    first_raw = tl.load(source_ptr + columns, mask=inside, other=0.0)
    first = first_raw.to(tl.float32)
    second = tl.load(source_ptr + half + columns, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        mean = (tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * half)
        scale = 1.0 / tl.sqrt_rn(mean + eps)
        weight_1 = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        weight_2 = tl.load(weight_ptr + half + columns, mask=inside, other=0.0).to(tl.float32)
        first = ((first * scale).to(first_raw.dtype).to(tl.float32) * weight_1).to(first_raw.dtype)
        second = ((second * scale).to(first_raw.dtype).to(tl.float32) * weight_2).to(first_raw.dtype)
        first = first.to(tl.float32)
        second = second.to(tl.float32)
    cos = tl.load(table_ptr + columns, mask=inside, other=0.0)
    sin = tl.load(table_ptr + half + columns, mask=inside, other=0.0)
    kept = inside & (columns.to(tl.int64) * 0 + slot >= 0)
    tl.store(target_ptr + columns, (first * cos - second * sin).to(first_raw.dtype), mask=kept)
    tl.store(target_ptr + half + columns, (second * cos + first * sin).to(first_raw.dtype), mask=kept)


@triton.jit
def _rope_kernel(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    cos_sin_ptr,
    positions_ptr,
    num_heads,
    num_kv_heads,
    half,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions_ptr + token).to(tl.int64)
    table = cos_sin_ptr + position * 2 * half
    if head < num_heads:
        source = q_ptr + token * q_token_stride + head * q_head_stride
        target = q_out_ptr + (token * num_heads + head) * 2 * half
        _rotate_head(source, target, q_ptr, table, 0.0, half, 0, NORM=False, BLOCK=BLOCK)
    else:
        source = k_ptr + token * k_token_stride + (head - num_heads) * k_head_stride
        target = k_out_ptr + (token * num_kv_heads + head - num_heads) * 2 * half
        _rotate_head(source, target, k_ptr, table, 0.0, half, 0, NORM=False, BLOCK=BLOCK)


def apply_rope(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`mainspring.kernels.rope.apply_rope`."""
    tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    q = q if q.stride(2) == 1 else q.contiguous()
    k = k if k.stride(2) == 1 else k.contiguous()
    q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    k_out = torch.empty_like(k, memory_format=torch.contiguous_format)
    if tokens:
        half = head_dim // 2
        _rope_kernel[(tokens, num_heads + num_kv_heads)](
            q, k, q_out, k_out, cos_sin, positions, num_heads, num_kv_heads, half,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1),
            BLOCK=triton.next_power_of_2(half), num_warps=1,
            **pdl.options(pdl.mode(q_out.device)),
        )  # fmt: skip
    return q_out, k_out


@triton.jit
def _rope_and_cache_kernel(
    qkv_ptr,
    q_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    num_heads,
    num_kv_heads,
    half,
    qkv_stride,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    head_dim = 2 * half
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    table = cos_sin_ptr + position * head_dim
    source = qkv_ptr + token * qkv_stride + head * head_dim
    entry = slot * num_kv_heads * head_dim
    if head < num_heads:
        target = q_out_ptr + (token * num_heads + head) * head_dim
        _rotate_head(source, target, q_weight_ptr, table, eps, half, 0, NORM=NORM, BLOCK=BLOCK)
    elif head < num_heads + num_kv_heads:
        target = k_cache_ptr + entry + (head - num_heads) * head_dim
        _rotate_head(source, target, k_weight_ptr, table, eps, half, slot, NORM=NORM, BLOCK=BLOCK)
    else:
        target = v_cache_ptr + entry + (head - num_heads - num_kv_heads) * head_dim
        columns = tl.arange(0, 2 * BLOCK)
        kept = (columns < head_dim) & (columns.to(tl.int64) * 0 + slot >= 0)
        tl.store(target + columns, tl.load(source + columns, mask=kept, other=0.0), mask=kept)


def rope_and_cache(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """See :func:`mainspring.kernels.rope.rope_and_cache`."""
    tokens = qkv.shape[0]
    num_kv_heads, head_dim = k_cache.shape[2:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("the KV cache of a layer must be contiguous; pass whole tensors, not strided views")
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    q_out = qkv.new_empty((tokens, num_heads, head_dim))
    if tokens:
        half = head_dim // 2
        _rope_and_cache_kernel[(tokens, num_heads + 2 * num_kv_heads)](
            qkv, q_out, k_cache, v_cache, cos_sin, positions, slots,
            qkv if q_weight is None else q_weight, qkv if k_weight is None else k_weight,
            eps, num_heads, num_kv_heads, half, qkv.stride(0),
            NORM=q_weight is not None, BLOCK=triton.next_power_of_2(half), num_warps=1,
            **pdl.options(pdl.mode(q_out.device)),
        )  # fmt: skip
    return q_out
