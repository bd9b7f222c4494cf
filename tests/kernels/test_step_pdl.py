"""No wait may be left out of the kernels of a decode step; see ``test_gemv_pdl.py``, whose products are others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

pytest.importorskip("triton")

from pdl_race import Case, check_reads, check_writes, late_copy, perform, placed  # noqa: E402

from mainspring.kernels.triton import activation, norm, pdl, rope, sampling, seats  # noqa: E402
from mainspring.kernels.triton.attention_plan import SplitPlan  # noqa: E402
from mainspring.kernels.triton.decode_attention import decode_attention, rope_and_decode_attention  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not pdl.pdl_supported(torch.device("cuda")), reason="needs programmatic dependent launch"),
]


def case_of(source: torch.Tensor, target: torch.Tensor, call: Callable[[], object]) -> Case:
    """A kernel whose wait is left out through the mode that it is launched in."""

    def run(wait: bool, dependent: bool) -> None:
        chosen = (pdl.ON if wait else pdl.WITHOUT_WAIT) if dependent else pdl.OFF
        usual = pdl.mode
        pdl.mode = lambda device: chosen
        try:
            with placed(target):
                call()
        finally:
            pdl.mode = usual

    return Case(source, target, run)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def norm_case(add: bool) -> Case:
    x, weight = draw(2, 256), draw(256)
    residual, out = draw(2, 256), torch.zeros_like(x)
    if add:
        return case_of(x, out, lambda: norm.add_rms_norm(x, residual, weight, 1e-6))
    return case_of(x, out, lambda: norm.rms_norm(x, weight, 1e-6))


def silu_case() -> Case:
    x, out = draw(2, 512), torch.zeros(2, 256, device="cuda", dtype=torch.bfloat16)
    return case_of(x, out, lambda: activation.silu_and_mul(x))


def greedy_case() -> Case:
    logits, out = draw(3, 5000), torch.zeros(3, device="cuda", dtype=torch.int64)
    return case_of(logits, out, lambda: sampling.greedy(logits))


def attention_case(kind: str, splits: int | SplitPlan, part: str) -> Case:
    d, heads, kv_heads = 64, 4, 2
    qkv = draw(2, (heads + 2 * kv_heads) * d)
    caches = [draw(9, 16, kv_heads, d) for _ in range(2)]
    tables = torch.arange(1, 9, device="cuda", dtype=torch.int32).view(2, 4)
    lengths = torch.tensor([64, 50], device="cuda", dtype=torch.int32)
    positions = (lengths - 1).long()
    slots = tables.gather(1, (positions // 16)[:, None])[:, 0].long() * 16 + positions % 16
    table = torch.rand(64, d, device="cuda")
    out = torch.zeros(2, heads, d, device="cuda", dtype=torch.bfloat16)
    target = {"out": out, "k": caches[0], "v": caches[1]}[part]
    if kind == "rope":
        return case_of(qkv, target, lambda: rope.rope_and_cache(qkv, table, positions, slots, *caches))
    if kind == "attention":
        q = draw(2, heads, d)
        return case_of(q, out, lambda: decode_attention(q, *caches, tables, lengths, 0.1, 0, splits))
    return case_of(
        qkv,
        target,
        lambda: rope_and_decode_attention(
            qkv, table, positions, slots, *caches, tables, lengths, 0.1, settled=kind != "both", num_splits=splits
        ),
    )


RING = SplitPlan(2, 16, 16, 1, 3)


def gather_case() -> Case:
    state = torch.full((5, 9), 3, device="cuda", dtype=torch.int32)
    tables = torch.ones(9, 4, device="cuda", dtype=torch.int32)
    rows = torch.arange(4, device="cuda", dtype=torch.int32)
    out = torch.zeros(4, 4, device="cuda", dtype=torch.int64)
    return case_of(state, out, lambda: seats.gather_seats(rows, state, tables, 16))


def advance_case(part: str) -> Case:
    state = torch.full((5, 9), 1 << 20, device="cuda", dtype=torch.int32)
    tokens = torch.arange(11, 15, device="cuda")
    served, runs = torch.arange(4, device="cuda"), torch.ones(4, device="cuda", dtype=torch.bool)
    stop_ids = torch.full((3, 9), -1, device="cuda", dtype=torch.int32)
    ring, step = torch.zeros(1, 4, 2, device="cuda", dtype=torch.int32), torch.zeros(1, device="cuda").long()
    record, go_on = torch.zeros(4, 2, device="cuda", dtype=torch.int32), torch.zeros(1, device="cuda").int()
    policy = torch.tensor([1 << 40, 0], device="cuda")
    target = {"ring": ring, "record": record}[part]
    return case_of(
        tokens,
        target,
        lambda: seats.advance_seats(tokens, served, runs, state, stop_ids, ring, step, record, go_on, policy),
    )


CASES: dict[str, Callable[[], Case]] = {
    "norm": lambda: norm_case(False),
    "add and norm": lambda: norm_case(True),
    "silu": silu_case,
    "greedy": greedy_case,
    "rope, q": lambda: attention_case("rope", 1, "out"),
    "rope, k": lambda: attention_case("rope", 1, "k"),
    "attention": lambda: attention_case("attention", 1, "out"),
    "attention, splits": lambda: attention_case("attention", 2, "out"),
    "rope and attention": lambda: attention_case("both", 1, "out"),
    "rope and attention, splits": lambda: attention_case("both", 2, "out"),
    "rope and attention, k": lambda: attention_case("both", 1, "k"),
    "rope and attention, v": lambda: attention_case("both", 2, "v"),
    "settled attention": lambda: attention_case("settled", 1, "out"),
    "settled attention, k": lambda: attention_case("settled", 2, "k"),
    "attention with a ring": lambda: attention_case("ring", RING, "out"),
    "attention with a ring, k": lambda: attention_case("ring", RING, "k"),
    "attention with a ring, v": lambda: attention_case("ring", RING, "v"),
    "gather": gather_case,
    "advance, ring": lambda: advance_case("ring"),
    "advance, record": lambda: advance_case("record"),
}


@pytest.mark.parametrize("recorded", [False, True], ids=["stream", "graph"])
@pytest.mark.parametrize("name", CASES)
def test_reads_only_after_the_wait(name: str, recorded: bool) -> None:
    check_reads(CASES[name](), recorded)


@pytest.mark.parametrize("recorded", [False, True], ids=["stream", "graph"])
@pytest.mark.parametrize("name", CASES)
def test_writes_only_after_the_wait(name: str, recorded: bool) -> None:
    check_writes(CASES[name](), recorded)


@pytest.mark.parametrize("recorded", [False, True], ids=["stream", "graph"])
@pytest.mark.parametrize("splits", [1, RING], ids=["plain", "ring"])
def test_an_ordinary_launch_settles_what_lies_in_front_of_it(splits: int | SplitPlan, recorded: bool) -> None:
    """Lengths written late reach a kernel that reads them before its wait if an embedding lies between, only then."""
    caches = [draw(9, 16, 2, 64) for _ in range(2)]
    tables = torch.arange(1, 9, device="cuda", dtype=torch.int32).view(2, 4)
    positions, slots = torch.tensor([50, 40], device="cuda"), torch.tensor([66, 136], device="cuda")
    angles, qkv, weight = torch.rand(64, 64, device="cuda"), draw(2, 8 * 64), draw(8 * 64)
    ids, vectors = torch.arange(2, device="cuda"), draw(2, 64)
    final = torch.tensor([51, 41], device="cuda", dtype=torch.int32)

    def attend(lengths: torch.Tensor) -> torch.Tensor:
        return rope_and_decode_attention(
            qkv, angles, positions, slots, *caches, tables, lengths, 0.1, settled=True, num_splits=splits
        )

    expected = attend(final).clone()

    def work(lengths: torch.Tensor, with_embedding: bool, seen: list[torch.Tensor]) -> None:
        late_copy(final, lengths)
        if with_embedding:
            seats.embed(ids, vectors)
        norm.rms_norm(qkv, weight, 1e-6)
        seen.append(attend(lengths))

    for with_embedding in (True, False):
        lengths = torch.ones_like(final)
        late_copy(final, lengths, 0)
        lengths.fill_(1)
        seen: list[torch.Tensor] = []
        perform(partial(work, lengths, with_embedding, seen), recorded)
        assert torch.equal(seen[-1], expected) == with_embedding
