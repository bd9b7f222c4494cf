"""Triton kernel of :mod:`mainspring.kernels.kv_cache`: one program a token."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _write_kv_kernel(k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, k_stride, v_stride, size, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    # A negative slot touches nothing. (Triton's interpreter gives a scalar comparison that is spread over a
    # mask the wrong type, so the slot is spread first.)
    owned = (columns < size) & (columns.to(tl.int64) * 0 + slot >= 0)
    k = tl.load(k_ptr + token * k_stride + columns, mask=owned, other=0.0)
    v = tl.load(v_ptr + token * v_stride + columns, mask=owned, other=0.0)
    tl.store(k_cache_ptr + slot * size + columns, k, mask=owned)
    tl.store(v_cache_ptr + slot * size + columns, v, mask=owned)


def _rows(x: Tensor) -> Tensor:
    """``x`` ``[tokens, heads, head_dim]`` itself if each token lies in one piece, otherwise a copy."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """See :func:`mainspring.kernels.kv_cache.write_kv`."""
    tokens, num_kv_heads, head_dim = k.shape
    if not tokens:
        return
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("the KV cache of a layer must be contiguous; pass whole tensors, not strided views")
    k, v = _rows(k), _rows(v)
    size = num_kv_heads * head_dim
    _write_kv_kernel[(tokens,)](
        k, v, k_cache, v_cache, slots, k.stride(0), v.stride(0), size, BLOCK=triton.next_power_of_2(size)
    )
