"""The skinny products against an fp64 reference, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

triton = pytest.importorskip("triton")

from mainspring.kernels.triton.gemv_common import Epilogue, Prologue, WeightOperand  # noqa: E402
from mainspring.kernels.triton.gemv_ops import head_argmax, reference_matmul, skinny_matmul  # noqa: E402
from mainspring.kernels.triton.gemv_plan import Tile  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter cuts bf16 off where a GPU rounds.
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2 if DEVICE == "cuda" else 2e-2}
VECTOR = [
    Tile(block_n=4, block_k=64, prefetch=1),
    Tile(block_n=8, block_k=32, prefetch=3, per_sm=1),
    Tile(block_n=4, block_k=128, prefetch=9, inner=False, evict=""),
    Tile(block_n=4, block_k=32, prefetch=2, per_sm=2, inner=False),
]
DOT = [
    Tile("dot", block_n=16, block_k=64, prefetch=1),
    Tile("dot", block_n=32, block_k=64, prefetch=2, split_k=2),
]
UNITS = [
    Tile("mma", block_n=8, block_k=128, warps=4, prefetch=1, split_k=4),
    Tile("mma", block_n=16, block_k=64, warps=2, prefetch=2, split_k=1, inner=False),
    Tile("mma", block_n=8, block_k=64, warps=2, prefetch=1, split_k=2, per_sm=1),
    Tile("mma", block_n=16, block_k=32, warps=1, prefetch=9, inner=False),
    Tile("ring", block_n=8, block_k=128, warps=2, split_k=2, stages=4),
    Tile("ring", block_n=16, block_k=64, warps=2, split_k=1, stages=3, per_sm=1),
]
TILES = VECTOR + DOT + (UNITS if DEVICE == "cuda" else [])


def draw(shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, dtype=torch.float32) * scale).to(dtype).to(DEVICE)


def close(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert not torch.isnan(got).any()
    error = (got.double() - wanted).norm() / wanted.norm()
    assert error < LIMITS[dtype], f"relative error {error:.2e}"


def poisoned(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """An output of NaN inside a wider one, so that writes outside of it show."""
    return torch.full((rows, columns + 3), float("nan"), dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("tile", TILES, ids=Tile.short)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 20, 128), (3, 13, 200)])
def test_product_equals_fp64(tile: Tile, dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    if tile.kernel in ("mma", "ring") and dtype == torch.float32:
        pytest.skip("these kernels are for 16-bit operands")
    torch.manual_seed(rows * n + k)
    x, w, b = draw((rows, k), dtype), draw((n, k), dtype, k**-0.5), draw((n,), dtype)
    r = draw((rows, n), dtype)
    weight = WeightOperand.dense(w)
    whole = poisoned(rows, n, dtype)
    if tile.kernel == "ring" and k % 16:
        with pytest.raises(ValueError, match="multiples of 16"):
            skinny_matmul(x, weight, tile)
        return
    skinny_matmul(x, weight, tile, out=whole[:, :n], bias=b, residual=r)
    close(whole[:, :n], reference_matmul(x, weight, bias=b, residual=r), dtype)
    assert torch.isnan(whole[:, n:]).all(), "wrote outside of its output"


@pytest.mark.parametrize("tile", TILES, ids=Tile.short)
@pytest.mark.parametrize("prologue", [Prologue.NORM, Prologue.SILU], ids=lambda p: p.name)
@pytest.mark.parametrize("epilogue", [Epilogue.PLAIN, Epilogue.SWIGLU], ids=lambda e: e.name)
def test_fused_product_equals_fp64(tile: Tile, prologue: Prologue, epilogue: Epilogue) -> None:
    dtype, rows, n, k = torch.bfloat16, 2, 20, 160
    torch.manual_seed(5)
    x = draw((rows, 2 * k if prologue == Prologue.SILU else k), dtype, 3.0)
    weight, g = WeightOperand.dense(draw((n, k), dtype, k**-0.5)), draw((k,), dtype)
    columns = n // 2 if epilogue == Epilogue.SWIGLU else n
    whole = poisoned(rows, columns, dtype)
    skinny_matmul(x, weight, tile, out=whole[:, :columns], norm_weight=g, prologue=prologue, epilogue=epilogue)
    wanted = reference_matmul(x, weight, norm_weight=g, prologue=prologue, epilogue=epilogue)
    close(whole[:, :columns], wanted, dtype)
    assert torch.isnan(whole[:, columns:]).all()


@pytest.mark.parametrize("tile", TILES, ids=Tile.short)
def test_row_scaled_weight_gives_its_dequantised_product(tile: Tile) -> None:
    torch.manual_seed(2)
    x = draw((2, 96), torch.bfloat16)
    weight = WeightOperand.row_scaled(draw((20, 96), torch.float32, 0.1))
    got = skinny_matmul(x, weight, tile)
    close(got, reference_matmul(x, weight), torch.bfloat16)


@pytest.mark.parametrize("tile", TILES, ids=Tile.short)
def test_head_argmax_is_that_of_stored_logits(tile: Tile) -> None:
    torch.manual_seed(3)
    x, weight = draw((2, 64), torch.bfloat16), WeightOperand.dense(draw((60, 64), torch.bfloat16))
    weight.tensor[50] = weight.tensor[17]
    x[1] = weight.tensor[17]
    logits = skinny_matmul(x, weight, tile)
    got = head_argmax(x, weight, tile)
    assert got.tolist() == logits.float().argmax(dim=-1).tolist()
    assert got[1] == 17, "of equal values the first must win"


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 13, 16])
@pytest.mark.parametrize("tile", UNITS, ids=Tile.short)
@pytest.mark.parametrize("prologue", list(Prologue), ids=lambda p: p.name)
@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="Gluon kernels have no interpreter")
def test_matrix_units_take_every_number_of_rows(rows: int, tile: Tile, prologue: Prologue) -> None:
    dtype, n, k = torch.float16, 1000, 416
    torch.manual_seed(rows)
    x = draw((rows, 2 * k if prologue == Prologue.SILU else k), dtype)
    weight, g, r = (
        WeightOperand.dense(draw((n, k), dtype, k**-0.5)),
        draw((k,), dtype),
        draw((rows, n), dtype),
    )
    whole = poisoned(rows, n, dtype)
    got = skinny_matmul(x, weight, tile, out=whole[:, :n], norm_weight=g, residual=r, prologue=prologue)
    close(got, reference_matmul(x, weight, norm_weight=g, residual=r, prologue=prologue), dtype)
    assert torch.isnan(whole[:, n:]).all()


def test_head_argmax_refuses_a_small_workspace() -> None:
    x, weight = draw((1, 32), torch.bfloat16), WeightOperand.dense(draw((64, 32), torch.bfloat16))
    small = (torch.empty(1, 2, device=DEVICE), torch.empty(1, 2, dtype=torch.int32, device=DEVICE))
    with pytest.raises(ValueError, match="2 slots"):
        head_argmax(x, weight, Tile(block_n=4, block_k=32), workspace=small)


def test_operands_that_do_not_fit_are_refused() -> None:
    weight = WeightOperand.dense(draw((8, 32), torch.bfloat16))
    with pytest.raises(ValueError, match=r"x must be \[M, 32\]"):
        skinny_matmul(draw((1, 31), torch.bfloat16), weight, Tile())
    with pytest.raises(ValueError, match="must agree"):
        skinny_matmul(draw((1, 32), torch.float32), weight, Tile())
    with pytest.raises(ValueError, match="9 rows"):
        skinny_matmul(draw((9, 32), torch.bfloat16), weight, Tile())
    with pytest.raises(ValueError, match="power of two"):
        Tile(block_n=12)
    with pytest.raises(ValueError, match="unknown tile settings"):
        Tile.from_dict({"block": 3})
