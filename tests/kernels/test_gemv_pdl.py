"""No wait may be left out of a kernel that starts before the one in front of it is done.

The kernel in front lets its dependents start at once and then idles for milliseconds before it does its
work. A kernel that waits gives the right answer all the same; with its wait compiled out the answer must be
wrong, or the test would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from mainspring.kernels.triton.gemv_common import Epilogue, Prologue, WeightOperand, pdl_supported  # noqa: E402
from mainspring.kernels.triton.gemv_ops import head_argmax, reduce_argmax, skinny_matmul  # noqa: E402
from mainspring.kernels.triton.gemv_plan import Tile  # noqa: E402
from mainspring.kernels.triton.gemv_qkv import qk_norm_rope_write  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not pdl_supported(torch.device("cuda")), reason="needs programmatic dependent launch"),
]
DELAY = 3_000_000  # nanoseconds: far above the time a launch takes on the CPU
N, K = 512, 512


@triton.jit
def _late_copy_kernel(source_ptr, target_ptr, count, nanoseconds, BLOCK: tl.constexpr):
    """Let dependents start, wait, idle, then copy bytes."""
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    begin = tl.extra.cuda.globaltimer()
    now = begin
    while now - begin < nanoseconds:
        now = tl.extra.cuda.globaltimer()
    # A clock never runs backwards, but the compiler cannot know: the copy has to stay behind the loop.
    skew = tl.where(now < begin, 1, 0)
    for start in range(0, count, BLOCK):
        at = start + skew + tl.arange(0, BLOCK)
        tl.store(target_ptr + at, tl.load(source_ptr + at, mask=at < count), mask=at < count)


def late_copy(source: torch.Tensor, target: torch.Tensor, nanoseconds: int = DELAY) -> None:
    """Copy ``source`` to ``target``, both contiguous, after idling."""
    raw, to = source.view(-1).view(torch.uint8), target.view(-1).view(torch.uint8)
    _late_copy_kernel[(1,)](raw, to, raw.numel(), nanoseconds, BLOCK=1024, num_warps=4, launch_pdl=True)


@dataclass
class Case:
    """A kernel under test: ``run(wait, pdl)`` reads ``source`` and writes ``target``."""

    source: torch.Tensor
    target: torch.Tensor
    run: Callable[[bool, bool], object]


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


def perform(work: Callable[[], None], recorded: bool) -> None:
    """Run ``work`` on a stream of its own, or record and replay it."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    if not recorded:
        with torch.cuda.stream(stream):
            work()
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
        graph.replay()
    torch.cuda.synchronize()


def compiled(case: Case) -> Case:
    """Compile everything, so that nothing stands between two launches."""
    for wait in (True, False):
        case.run(wait, True)
    case.run(True, False)
    late_copy(case.source, torch.empty_like(case.source), 0)
    late_copy(case.target, torch.empty_like(case.target), 0)
    return case


@pytest.mark.parametrize("recorded", [False, True], ids=["stream", "graph"])
@pytest.mark.parametrize("name", CASES)
def test_reads_only_after_the_wait(name: str, recorded: bool) -> None:
    case = compiled(CASES[name]())
    old, new = case.source.clone(), torch.randn_like(case.source)
    case.source.copy_(new)
    case.target.zero_()
    case.run(True, False)
    wanted = case.target.clone()

    def answer(wait: bool) -> torch.Tensor:
        case.source.copy_(old)
        case.target.zero_()

        def work() -> None:
            late_copy(new, case.source)
            case.run(wait, True)

        perform(work, recorded)
        return case.target.clone()

    assert torch.equal(answer(wait=True), wanted)
    assert not torch.equal(answer(wait=False), wanted), "right without its wait: the test proves nothing"


@pytest.mark.parametrize("recorded", [False, True], ids=["stream", "graph"])
@pytest.mark.parametrize("name", CASES)
def test_writes_only_after_the_wait(name: str, recorded: bool) -> None:
    case = compiled(CASES[name]())
    old = torch.full_like(case.target, 7)

    def seen(wait: bool) -> torch.Tensor:
        case.target.copy_(old)
        kept = torch.zeros_like(old)

        def work() -> None:
            late_copy(case.target, kept)
            case.run(wait, True)

        perform(work, recorded)
        return kept

    assert torch.equal(seen(wait=True), old), "overwrote what the kernel in front was still to read"
    assert not torch.equal(seen(wait=False), old), "right without its wait: the test proves nothing"


@pytest.mark.parametrize("name", CASES)
def test_done_only_after_the_kernels_in_front(name: str) -> None:
    """A kernel two places behind relies on the one between: done must mean that all before it are done."""
    case = compiled(CASES[name]())
    new = torch.randn(256, device="cuda")

    def seen(wait: bool) -> torch.Tensor:
        buffer, kept = torch.zeros_like(new), torch.zeros_like(new)

        def work() -> None:
            late_copy(new, buffer)
            case.run(wait, True)
            late_copy(buffer, kept, 0)

        perform(work, recorded=True)
        return kept

    assert torch.equal(seen(wait=True), new)
    if name not in (
        "vector, arg-max",
        "dot, arg-max",
        "mma, arg-max",
        "ring, arg-max",
    ):  # their second stage still waits
        assert not torch.equal(seen(wait=False), new), "right without its wait: the test proves nothing"
