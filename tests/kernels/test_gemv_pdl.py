"""No wait may be left out of a kernel that starts before the one in front of it is done.

The kernel in front lets its dependents start at once and then idles for milliseconds before it does its
work. A kernel that waits gives the right answer all the same; with its wait compiled out the answer must be
wrong, or the test would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

pytest.importorskip("triton")
from pdl_race import Case, check_done, check_reads, check_writes  # noqa: E402

from mainspring.kernels.triton.gemv_common import Epilogue, Prologue, WeightOperand, pdl_supported  # noqa: E402
from mainspring.kernels.triton.gemv_ops import head_argmax, reduce_argmax, skinny_matmul  # noqa: E402
from mainspring.kernels.triton.gemv_plan import Tile  # noqa: E402
from mainspring.kernels.triton.gemv_qkv import qk_norm_rope_write  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not pdl_supported(torch.device("cuda")), reason="needs programmatic dependent launch"),
]
N, K = 512, 512


def product_case(tile: Tile, rows: int, prologue: Prologue, epilogue: Epilogue, residual: bool) -> Case:
    torch.manual_seed(0)
    dtype = torch.bfloat16
    x = torch.randn(rows, K * (2 if prologue == Prologue.SILU else 1), device="cuda", dtype=dtype)
    weight = WeightOperand.dense(torch.randn(N, K, device="cuda", dtype=dtype) * K**-0.5)
    gain = torch.randn(K, device="cuda", dtype=dtype)
    beside = torch.randn(rows, N, device="cuda", dtype=dtype) if residual else None
    if epilogue == Epilogue.ARGMAX:
        workspace = (
            torch.zeros(rows, N, device="cuda"),
            torch.zeros(rows, N, device="cuda", dtype=torch.int32),
        )

        def first_stage(wait: bool, pdl: bool) -> None:
            head_argmax(x, weight, tile, workspace=workspace, norm_weight=gain, prologue=prologue, pdl=pdl, wait=wait)

        return Case(x, workspace[0], first_stage)
    out = torch.zeros(rows, N // 2 if epilogue == Epilogue.SWIGLU else N, device="cuda", dtype=dtype)

    def product(wait: bool, pdl: bool) -> None:
        skinny_matmul(
            x, weight, tile, out=out, residual=beside, norm_weight=gain,
            prologue=prologue, epilogue=epilogue, pdl=pdl, wait=wait,
        )  # fmt: skip

    return Case(x, out, product)


def reduce_case() -> Case:
    values = torch.randn(2, 300, device="cuda")
    indices = torch.arange(300, device="cuda", dtype=torch.int32).repeat(2, 1)
    out = torch.full((2,), -1, device="cuda", dtype=torch.int32)
    return Case(values, out, lambda wait, pdl: reduce_argmax(values, indices, 300, out, pdl=pdl, wait=wait))


def qkv_case(part: str) -> Case:
    d, heads, kv_heads = 64, 4, 2
    qkv = torch.randn(2, (heads + 2 * kv_heads) * d, device="cuda", dtype=torch.bfloat16)
    caches = [torch.zeros(2, 16, kv_heads, d, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    out = torch.zeros(2, heads, d, device="cuda", dtype=torch.bfloat16)
    angles = torch.rand(8, d // 2, device="cuda")
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions, slots = torch.tensor([3, 5], device="cuda"), torch.tensor([17, 30], device="cuda")

    def run(wait: bool, pdl: bool) -> None:
        qk_norm_rope_write(qkv, *caches, table, positions, slots, heads, out=out, pdl=pdl, wait=wait)

    return Case(qkv, {"q": out, "k": caches[0], "v": caches[1]}[part], run)


PLAIN, NORM, SILU = Prologue.PLAIN, Prologue.NORM, Prologue.SILU
VECTOR, DOT = Tile("vector", 8, 256, 4, 1), Tile("dot", 16, 128, 4, 1)
MMA = Tile("mma", 8, 256, 4, 1, split_k=4, inner=False)
RING = Tile("ring", 8, 256, 4, split_k=4, stages=2)
CASES: dict[str, Callable[[], Case]] = {
    "vector": lambda: product_case(VECTOR, 1, PLAIN, Epilogue.PLAIN, False),
    "vector, several tiles": lambda: product_case(
        Tile("vector", 2, 256, 1, 2, per_sm=1), 1, NORM, Epilogue.PLAIN, False
    ),
    "vector, residual": lambda: product_case(VECTOR, 2, PLAIN, Epilogue.PLAIN, True),
    "vector, norm, swiglu": lambda: product_case(VECTOR, 2, NORM, Epilogue.SWIGLU, False),
    "vector, silu": lambda: product_case(VECTOR, 2, SILU, Epilogue.PLAIN, False),
    "vector, arg-max": lambda: product_case(VECTOR, 2, NORM, Epilogue.ARGMAX, False),
    "dot": lambda: product_case(DOT, 3, PLAIN, Epilogue.PLAIN, True),
    "dot, norm, swiglu": lambda: product_case(DOT, 17, NORM, Epilogue.SWIGLU, False),
    "dot, arg-max": lambda: product_case(DOT, 4, PLAIN, Epilogue.ARGMAX, False),
    "mma": lambda: product_case(MMA, 1, PLAIN, Epilogue.PLAIN, False),
    "mma, staged": lambda: product_case(Tile("mma", 8, 256, 4, 2, split_k=4), 1, PLAIN, Epilogue.PLAIN, True),
    "mma, norm, swiglu": lambda: product_case(MMA, 1, NORM, Epilogue.SWIGLU, False),
    "mma, 16 rows, residual": lambda: product_case(MMA, 16, NORM, Epilogue.PLAIN, True),
    "mma, arg-max": lambda: product_case(MMA, 1, NORM, Epilogue.ARGMAX, False),
    "ring": lambda: product_case(RING, 1, NORM, Epilogue.PLAIN, True),
    "ring, 16 rows, swiglu": lambda: product_case(RING, 16, PLAIN, Epilogue.SWIGLU, False),
    "ring, arg-max": lambda: product_case(RING, 1, PLAIN, Epilogue.ARGMAX, False),
    "arg-max, second stage": reduce_case,
    "qkv, q": lambda: qkv_case("q"),
    "qkv, k": lambda: qkv_case("k"),
    "qkv, v": lambda: qkv_case("v"),
}


@pytest.mark.parametrize("recorded", [False, True], ids=["stream", "graph"])
@pytest.mark.parametrize("name", CASES)
def test_reads_only_after_the_wait(name: str, recorded: bool) -> None:
    check_reads(CASES[name](), recorded)


@pytest.mark.parametrize("recorded", [False, True], ids=["stream", "graph"])
@pytest.mark.parametrize("name", CASES)
def test_writes_only_after_the_wait(name: str, recorded: bool) -> None:
    check_writes(CASES[name](), recorded)


@pytest.mark.parametrize("name", ["vector", "dot", "mma", "ring", "qkv, q"])
def test_done_means_that_the_kernels_in_front_are_done(name: str) -> None:
    check_done(CASES[name]())
