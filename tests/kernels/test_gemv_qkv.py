"""Head norm, rotation and cache write in one launch give what the separate steps give."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from mainspring.kernels.triton.gemv_qkv import (  # noqa: E402
    qk_norm_rope_write,
    reference_qk_norm_rope_write,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(4, 2, 16), (6, 3, 20)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_fused_equals_separate_steps(
    norm: bool, heads: int, kv_heads: int, d: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(heads * d)
    tokens = 3
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * d, device=DEVICE).to(dtype)
    angles = torch.rand(32, d // 2, device=DEVICE) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.tensor([0, 31, 7], device=DEVICE)
    slots = torch.tensor([5, -1, 14], device=DEVICE)
    gains = {}
    if norm:
        gains = {name: torch.randn(d, device=DEVICE).to(dtype) for name in ("q_norm_weight", "k_norm_weight")}
    caches = [torch.full((4, 4, kv_heads, d), float("nan"), device=DEVICE, dtype=dtype) for _ in range(4)]
    out = torch.full((tokens, heads, d), float("nan"), device=DEVICE, dtype=dtype)
    got = qk_norm_rope_write(qkv, *caches[:2], cos_sin, positions, slots, heads, out=out, **gains)
    wanted = reference_qk_norm_rope_write(qkv, *caches[2:], cos_sin, positions, slots, heads, **gains)
    assert got is out
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
    for mine, reference in zip(caches[:2], caches[2:], strict=True):
        torch.testing.assert_close(mine, reference, rtol=tolerance, atol=tolerance, equal_nan=True)
    written = [slot for slot in range(16) if not torch.isnan(caches[0].view(16, -1)[slot]).any()]
    assert written == [5, 14], "a slot of -1 must not be written"


def test_one_norm_weight_alone_is_refused() -> None:
    cache = torch.zeros(1, 4, 1, 8, device=DEVICE)
    qkv, table = torch.zeros(1, 24, device=DEVICE), torch.zeros(4, 8, device=DEVICE)
    index = torch.zeros(1, dtype=torch.long, device=DEVICE)
    with pytest.raises(ValueError, match="both"):
        qk_norm_rope_write(qkv, cache, cache, table, index, index, 1, q_norm_weight=table[0])
