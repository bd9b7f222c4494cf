"""Every Triton kernel against the fp64 formulas and the references.

On a GPU this runs as it is. Without one, ``test_triton_interpreted_kernels.py`` runs it in a process of its
own under Triton's interpreter (``TRITON_INTERPRET=1``), whose bf16 matrix product is wrong and whose bf16
rounding is by truncation: bf16 needs the GPU. Attention in fp16 is interpreted for one shape only, for time.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from naive_formulas import assert_close, naive_decode, naive_prefill, naive_rms_norm, naive_rope, paged_case

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("no CUDA device; the interpreter runs these in its own process", allow_module_level=True)
pytest.importorskip("triton")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from mainspring.kernels import filters, noise, rope_table  # noqa: E402
from mainspring.kernels import sampling as reference  # noqa: E402
from mainspring.kernels import seats as seats_reference  # noqa: E402
from mainspring.kernels.triton import activation, kv_cache, norm, rope, sampling  # noqa: E402
from mainspring.kernels.triton import filters as triton_filters  # noqa: E402
from mainspring.kernels.triton import noise as triton_noise  # noqa: E402
from mainspring.kernels.triton import seats as triton_seats  # noqa: E402
from mainspring.kernels.triton.attention_plan import SplitPlan, plan_splits  # noqa: E402
from mainspring.kernels.triton.decode_attention import decode_attention, rope_and_decode_attention  # noqa: E402
from mainspring.kernels.triton.prefill_attention import prefill_attention  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
LONGEST = 150 if INTERPRETED else 3000
EDGES = [0, 1, 15, 16, 17, LONGEST]


@triton.jit
def _noise_kernel(seeds_ptr, choices_ptr, positions_ptr, bits_ptr, noise_ptr, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    ids = tl.arange(0, WIDTH)
    bits = triton_noise.random_bits(
        tl.load(seeds_ptr + row), tl.load(choices_ptr + row), tl.load(positions_ptr + row), ids
    )
    tl.store(bits_ptr + row * WIDTH + ids, bits.to(tl.int32, bitcast=True))
    tl.store(noise_ptr + row * WIDTH + ids, triton_noise.gumbel_from_bits(bits))


def test_the_hash_is_the_references_bit_for_bit() -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 12345678901234567], device=DEVICE)
    choices = torch.tensor([0, 1, 2, 3, -4, 2**31 - 1], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([0, 5, 2**31 - 1, 7, -1, 9], dtype=torch.int32, device=DEVICE)
    bits = torch.zeros(6, 1024, dtype=torch.int32, device=DEVICE)
    gumbel = torch.zeros(6, 1024, device=DEVICE)
    _noise_kernel[(6,)](seeds, choices, positions, bits, gumbel, WIDTH=1024)
    key_1, key_2 = noise.row_keys(seeds, choices, positions)
    ids = torch.arange(1024, dtype=torch.int32, device=DEVICE)
    assert torch.equal(bits, noise.random_bits(key_1.unsqueeze(1), key_2.unsqueeze(1), ids))
    expected = noise.gumbel_noise(seeds, choices, positions, ids)
    # The device's logarithm is approximate.
    torch.testing.assert_close(gumbel, expected, rtol=1e-4, atol=1e-4)


def test_gumbel_is_finite_at_both_ends() -> None:
    ends = torch.tensor([0, -1, 1, -2], dtype=torch.int32, device=DEVICE)
    out = torch.zeros(4, device=DEVICE)
    _gumbel_kernel[(1,)](ends, out, WIDTH=4)
    torch.testing.assert_close(out, noise.gumbel_from_bits(ends), rtol=1e-4, atol=1e-4)


@triton.jit
def _gumbel_kernel(bits_ptr, out_ptr, WIDTH: tl.constexpr):
    ids = tl.arange(0, WIDTH)
    bits = tl.load(bits_ptr + ids).to(tl.uint32, bitcast=True)
    tl.store(out_ptr + ids, triton_noise.gumbel_from_bits(bits))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [7, 64, 576, 1000])
def test_norms(dtype: torch.dtype, size: int) -> None:
    x = torch.randn(5, size, device=DEVICE).to(dtype)
    residual = torch.randn(5, size, device=DEVICE).to(dtype)
    weight = torch.randn(size, device=DEVICE).to(dtype)
    assert_close(norm.rms_norm(x, weight, 1e-5), naive_rms_norm(x, weight, 1e-5))
    normed, total = norm.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert_close(normed, naive_rms_norm(total, weight, 1e-5))


def test_norm_of_heads_in_a_qkv_product() -> None:
    qkv = torch.randn(3, 6 * 16, device=DEVICE)
    heads = qkv[:, 16:64].view(3, 3, 16)
    weight = torch.randn(16, device=DEVICE)
    assert_close(norm.rms_norm(heads, weight, 1e-5), naive_rms_norm(heads, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_activation(dtype: torch.dtype) -> None:
    gate_up = (torch.randn(3, 2 * 1100, device=DEVICE) * 4).to(dtype)
    gate_up[0, 0] = -60000.0
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close(activation.silu_and_mul(gate_up), gate * torch.sigmoid(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv_writes_owned_slots_and_no_other_byte(dtype: torch.dtype) -> None:
    qkv = torch.randn(6, 7 * 80, device=DEVICE).to(dtype)
    k, v = qkv[:, 160:320].view(6, 2, 80), qkv[:, 320:480].view(6, 2, 80)
    k_cache = torch.full((3, 4, 2, 80), torch.nan, dtype=dtype, device=DEVICE)
    v_cache = k_cache.clone()
    slots = torch.tensor([11, -1, 0, 5, -1, -9], device=DEVICE)
    kv_cache.write_kv(k, v, k_cache, v_cache, slots)
    for cache, source in ((k_cache, k), (v_cache, v)):
        flat = cache.view(12, 2, 80)
        assert torch.equal(flat[[11, 0, 5]], source[[0, 2, 3]])
        assert bool(flat[[1, 2, 3, 4, 6, 7, 8, 9, 10]].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 80, 128])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_and_cache(dtype: torch.dtype, head_dim: int, normed: bool) -> None:
    heads, kv_heads = 3, 2
    inv_freq = torch.rand(head_dim // 2, device=DEVICE)
    table = rope_table(inv_freq, 60)
    positions = torch.tensor([0, 59, 7], device=DEVICE)
    slots = torch.tensor([7, -1, 0], device=DEVICE)
    qkv = torch.randn(3, (heads + 2 * kv_heads) * head_dim, device=DEVICE).to(dtype)
    k_cache = torch.full((2, 4, kv_heads, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    v_cache = k_cache.clone()
    weights = [torch.randn(head_dim, device=DEVICE).to(dtype) for _ in range(2)] if normed else [None] * 2
    q = rope.rope_and_cache(qkv, table, positions, slots, k_cache, v_cache, *weights, 1e-6)
    split = qkv.view(3, -1, head_dim)
    expected_q, expected_k = split[:, :heads].double(), split[:, heads : heads + kv_heads].double()
    if normed:
        expected_q = naive_rms_norm(expected_q, weights[0], 1e-6)
        expected_k = naive_rms_norm(expected_k, weights[1], 1e-6)
    assert_close(q, naive_rope(expected_q, inv_freq, positions))
    flat_k, flat_v = k_cache.view(8, kv_heads, head_dim), v_cache.view(8, kv_heads, head_dim)
    assert_close(flat_k[[7, 0]], naive_rope(expected_k, inv_freq, positions)[[0, 2]])
    assert torch.equal(flat_v[[7, 0]], split[[0, 2], heads + kv_heads :])
    assert bool(flat_k[1:7].isnan().all()) and bool(flat_v[1:7].isnan().all())
    if not normed:
        rotated_q, rotated_k = rope.apply_rope(
            split[:, :heads], split[:, heads : heads + kv_heads], table, positions.int()
        )
        assert torch.equal(rotated_q, q)
        assert torch.equal(rotated_k[[0, 2]], flat_k[[7, 0]])


def shape_and_dtype(shapes: list[tuple[Any, ...]]) -> list[tuple[tuple[Any, ...], torch.dtype]]:
    """Every shape with every dtype; interpreted, fp16 only with the first shape."""
    return [
        (shape, dtype)
        for index, shape in enumerate(shapes)
        for dtype in DTYPES
        if not INTERPRETED or index == 0 or dtype == torch.float32
    ]


DECODE_SHAPES = [
    # kv heads, query heads of each, head_dim, block size
    (2, 3, 64, 16),
    (1, 8, 80, 16),
    (2, 1, 96, 8),
    (1, 2, 128, 16),
    (1, 4, 256, 16),
    (1, 20, 64, 16),
]


@pytest.mark.parametrize(("shape", "dtype"), shape_and_dtype(DECODE_SHAPES))
@pytest.mark.parametrize(("window", "splits"), [(0, 0), (0, 1), (0, 3), (20, 2), (1, 1)])
def test_decode_attention(dtype: torch.dtype, shape: tuple[int, ...], window: int, splits: int) -> None:
    kv_heads, group, head_dim, block_size = shape
    case = paged_case(EDGES, block_size=block_size, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    on = case.to(DEVICE)
    q = torch.randn(len(EDGES), kv_heads * group, head_dim).to(dtype).to(DEVICE)
    scale = head_dim**-0.5
    out = decode_attention(q, on.k_cache, on.v_cache, on.block_tables, on.seq_lens, scale, window, num_splits=splits)
    assert_close(out, naive_decode(q, case, scale, window))
    assert torch.equal(out[0], torch.zeros_like(out[0]))


def rotate_by(table: torch.Tensor, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate in fp64 by the table's own angles, which are rounded to fp32 as the models' are."""
    cos, sin = table[positions].double().unsqueeze(1).chunk(2, dim=-1)
    first, second = x.double().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@pytest.mark.parametrize(("shape", "dtype"), shape_and_dtype([(2, 3, 64, 16), (1, 2, 128, 16), (2, 1, 80, 8)]))
@pytest.mark.parametrize(
    ("window", "splits", "normed"), [(0, 0, True), (0, 1, False), (0, 3, True), (20, 2, False), (1, 1, True)]
)
def test_rotation_cache_and_attention_in_one(
    dtype: torch.dtype, shape: tuple[int, ...], window: int, splits: int, normed: bool
) -> None:
    check_rotation_cache_and_attention(dtype, shape, window, splits, normed)


RINGS = [
    # splits, keys of a run, keys at a time, warps, stages
    SplitPlan(1, 32, 32, 2, 3),
    SplitPlan(3, 16, 16, 1, 4),
    SplitPlan(2, 64, 32, 1, 3),
    SplitPlan(40, 64, 64, 4, 2),
]


@pytest.mark.skipif(INTERPRETED, reason="Gluon kernels need a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 3, 64, 16), (1, 2, 128, 16), (2, 1, 128, 8), (1, 16, 64, 32), (1, 4, 256, 16)])
@pytest.mark.parametrize("plan", RINGS)
@pytest.mark.parametrize(("window", "normed"), [(0, True), (0, False), (20, True), (1, False)])
def test_rotation_cache_and_attention_with_a_ring_of_buffers(
    dtype: torch.dtype, shape: tuple[int, ...], plan: SplitPlan, window: int, normed: bool
) -> None:
    check_rotation_cache_and_attention(dtype, shape, window, plan, normed)


def check_rotation_cache_and_attention(
    dtype: torch.dtype, shape: tuple[int, ...], window: int, splits: int | SplitPlan, normed: bool
) -> None:
    """The new key is in no cache: the row's slot holds NaN before, and its key and value after."""
    kv_heads, group, head_dim, block_size = shape
    case = paged_case(EDGES, block_size=block_size, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    on = case.to(DEVICE)
    heads = kv_heads * group
    qkv = torch.randn(len(EDGES), (heads + 2 * kv_heads) * head_dim, device=DEVICE).to(dtype)
    qkv[0] = torch.nan
    weights = [(1 + 0.2 * torch.randn(head_dim, device=DEVICE)).to(dtype) for _ in range(2)] if normed else [None] * 2
    inv_freq = torch.rand(head_dim // 2, device=DEVICE)
    table = rope_table(inv_freq, LONGEST)
    positions = (on.seq_lens - 1).clamp(min=0).long()
    blocks = on.block_tables.long().gather(1, (positions // block_size)[:, None])[:, 0]
    slots = torch.where(on.seq_lens > 0, blocks * block_size + positions % block_size, -1)
    split = qkv.view(len(EDGES), -1, head_dim)
    q, k, v = split[:, :heads].double(), split[:, heads : heads + kv_heads].double(), split[:, heads + kv_heads :]
    if normed:
        q, k = naive_rms_norm(q, weights[0], 1e-6), naive_rms_norm(k, weights[1], 1e-6)
    q, k = rotate_by(table, q, positions), rotate_by(table, k, positions)
    flat_k, flat_v = on.k_cache.view(-1, kv_heads, head_dim), on.v_cache.view(-1, kv_heads, head_dim)
    flat_k[slots[1:]], flat_v[slots[1:]] = torch.nan, torch.nan
    untouched = [torch.ones(flat_k.shape[0], dtype=torch.bool, device=DEVICE).index_fill(0, slots[1:], False)]
    before = flat_k[untouched[0]].clone(), flat_v[untouched[0]].clone()
    for row in range(1, len(EDGES)):
        case.keys[row][-1], case.values[row][-1] = k[row].to(dtype).cpu(), v[row].cpu()
    scale = head_dim**-0.5
    out = rope_and_decode_attention(
        qkv, table, positions, slots, on.k_cache, on.v_cache, on.block_tables, on.seq_lens, scale, window, *weights,
        1e-6, settled=splits != 1, num_splits=splits,
    )  # fmt: skip
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert_close(out[1:], naive_decode(q, case, scale, window)[1:])
    assert_close(flat_k[slots[1:]], k[1:])
    assert torch.equal(flat_v[slots[1:]], v[1:])
    for now, then in zip((flat_k, flat_v), before, strict=True):
        assert torch.equal(now[untouched[0]].nan_to_num(9.0), then.nan_to_num(9.0)), "wrote to another slot"


def test_decode_attention_takes_strided_queries() -> None:
    case = paged_case([20, 9], block_size=8, kv_heads=2, head_dim=16, dtype=torch.float32)
    on = case.to(DEVICE)
    q = torch.randn(2, 8 * 16, device=DEVICE)[:, : 4 * 16].view(2, 4, 16)
    out = decode_attention(q, on.k_cache, on.v_cache, on.block_tables, on.seq_lens, 0.25)
    assert_close(out, naive_decode(q, case, 0.25, 0))


@pytest.mark.parametrize("splits", [1, 4])
def test_scratch_space_of_splits_that_are_not_used_may_hold_anything(
    splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.Tensor.new_empty

    def poisoned(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        new = empty(x, *args, **kwargs)
        return new.fill_(torch.nan) if new.is_floating_point() else new

    case = paged_case([0, 1, 70, 300], block_size=16, kv_heads=1, head_dim=16, dtype=torch.float32)
    on = case.to(DEVICE)
    q = torch.randn(4, 2, 16, device=DEVICE)
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    out = decode_attention(q, on.k_cache, on.v_cache, on.block_tables, on.seq_lens, 0.25, num_splits=splits)
    assert_close(out, naive_decode(q, case, 0.25, 0))


def test_the_plan_of_splits_fills_a_device_and_never_exceeds_the_keys() -> None:
    for batch in (1, 2, 7, 64, 256, 512):
        for kv_heads in (1, 3, 8):
            for max_keys in (16, 64, 256, 8192, 131072):
                for row_bytes in (128, 256, 1024):
                    for ring in (False, True):
                        plan = plan_splits(batch, kv_heads, max_keys, row_bytes, ring)
                        assert 1 <= plan.splits <= 128 and (plan.splits - 1) * plan.min_split < max_keys
                        assert plan.min_split % plan.block_n == 0
    assert plan_splits(1, 8, 2048, 256, True) == SplitPlan(33, 32, 32, 2)
    assert plan_splits(1, 8, 8192, 256, True) == SplitPlan(66, 32, 32, 2)
    assert plan_splits(256, 8, 400, 256, False).splits == 1


PREFILL = [
    ([16], [16]),
    ([1, 65, 5], [1, 65, 5]),
    ([140, 16, 33], [70, 1, 16]),
    ([20, 90, 3], [0, 90, 0]),
]


@pytest.mark.parametrize(("shape", "dtype"), shape_and_dtype([(2, 2, 64, 16), (1, 3, 80, 8), (1, 1, 256, 16)]))
@pytest.mark.parametrize(("lengths", "counts"), PREFILL)
@pytest.mark.parametrize("window", [0, 1, 30])
def test_prefill_attention(
    dtype: torch.dtype, shape: tuple[int, ...], lengths: list[int], counts: list[int], window: int
) -> None:
    kv_heads, group, head_dim, block_size = shape
    case = paged_case(lengths, block_size=block_size, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    on = case.to(DEVICE)
    q = torch.randn(sum(counts), kv_heads * group, head_dim).to(dtype).to(DEVICE)
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)
    scale = head_dim**-0.5
    out = prefill_attention(q, on.k_cache, on.v_cache, on.block_tables, starts, on.seq_lens, scale, window)
    assert_close(out, naive_prefill(q, case, counts, scale, window))


@pytest.mark.parametrize(("lengths", "counts"), [([70, 3, 17], [65, 3, 1]), ([64], [64]), ([], [])])
def test_prefill_attention_of_a_padded_step(lengths: list[int], counts: list[int]) -> None:
    """As it is recorded: 8 sequences whatever there are, and tokens behind the last that belong to none."""
    real, tokens = len(counts), 128
    case = paged_case(lengths or [1], block_size=16, kv_heads=2, head_dim=32, dtype=torch.float32)
    q = torch.full((tokens, 4, 32), torch.nan)
    q[: sum(counts)] = torch.randn(sum(counts), 4, 32)
    starts = torch.full((9,), sum(counts), dtype=torch.int32)
    starts[: real + 1] = torch.tensor([0, *counts]).cumsum(0)
    lens = torch.zeros(8, dtype=torch.int32)
    lens[:real] = torch.tensor(lengths, dtype=torch.int32)
    tables = torch.full(
        (8, case.block_tables.shape[1]), 1 << 20, dtype=torch.int32
    )  # followed, it would be far outside
    tables[:real] = case.block_tables[:real]
    on = case.to(DEVICE)
    given = [value.to(DEVICE) for value in (tables, starts, lens)]
    out = prefill_attention(q.to(DEVICE), on.k_cache, on.v_cache, *given, 0.2)
    if counts:
        assert_close(out[: sum(counts)], naive_prefill(q[: sum(counts)], case, counts, 0.2, 0))
    assert not out[sum(counts) :].any()


def test_prefill_attention_of_a_long_prompt() -> None:
    for dtype in DTYPES:
        case = paged_case([600], block_size=16, kv_heads=1, head_dim=32, dtype=dtype)
        on = case.to(DEVICE)
        q = torch.randn(550, 1, 32).to(dtype).to(DEVICE)
        starts = torch.tensor([0, 550], dtype=torch.int32, device=DEVICE)
        out = prefill_attention(q, on.k_cache, on.v_cache, on.block_tables, starts, on.seq_lens, 0.2)
        assert_close(out, naive_prefill(q, case, [550], 0.2, 0))


def settings(batch: int, **changed: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    values = {
        "temperature": torch.rand(batch, generator=generator) + 0.2,
        "top_k": torch.zeros(batch, dtype=torch.int32),
        "top_p": torch.ones(batch),
        "min_p": torch.zeros(batch),
        "seeds": torch.randint(-(2**62), 2**62, (batch,), generator=generator),
        "choices": torch.randint(0, 3, (batch,), generator=generator).int(),
        "positions": torch.randint(0, 3000, (batch,), generator=generator).int(),
    }
    return [value.to(DEVICE) for value in (values | changed).values()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 50, 2048, 5001])
def test_greedy_and_its_ties(dtype: torch.dtype, vocab: int) -> None:
    logits = torch.randint(-3, 4, (4, vocab), device=DEVICE).to(dtype)
    logits[3] = -torch.inf
    assert sampling.greedy(logits).tolist() == reference.greedy_reference(logits.cpu()).tolist()
    one = torch.zeros(1, vocab, dtype=dtype, device=DEVICE)
    one[0, -1] = 1.0
    assert sampling.greedy(one).tolist() == [vocab - 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_draws_are_the_references(dtype: torch.dtype) -> None:
    batch = 16
    logits = (torch.randn(batch, 5001) * 3).to(dtype).to(DEVICE)
    temperature = torch.rand(batch) + 0.2
    temperature[0], temperature[1], temperature[2] = 0.0, 1e-6, 1e-3
    given = settings(batch, temperature=temperature)
    assert torch.equal(sampling.sample(logits, *given, False), reference.sample_reference(logits, *given))


def test_filtered_draws_are_the_references() -> None:
    batch = 16
    logits = torch.randn(batch, 5001).mul(3).to(DEVICE)
    given = settings(
        batch,
        top_k=torch.randint(-1, 60, (batch,)).int(),
        top_p=torch.rand(batch),
        min_p=torch.rand(batch) * 0.05,
    )
    assert torch.equal(sampling.sample(logits, *given), reference.sample_reference(logits, *given))


@pytest.mark.parametrize(
    ("shape", "dtype"), shape_and_dtype([(300, 2.0), (1, 1.0), (4500, 3.0), (9001, 0.01), (4500, 0.0)])
)
def test_the_cut_is_the_references(dtype: torch.dtype, shape: tuple[int, float]) -> None:
    vocab, spread = int(shape[0]), shape[1]
    choices = [
        # temperature, top_k, top_p, min_p
        (1.0, 50, 1.0, 0.0),
        (1.0, 0, 0.9, 0.0),
        (0.3, 40, 0.7, 0.0),
        (1.0, 0, 1.0, 0.05),
        (0.8, 20, 0.95, 0.1),
        (1.0, 1, 1.0, 0.0),
        (2.0, 0, 1e-4, 0.0),
        (1e-6, 30, 0.5, 0.0),
        (5.0, vocab - 1, 0.999, 0.0),
        (1.0, 0, 0.0, 1.0),
    ]
    logits = (torch.randn(len(choices), vocab) * spread).to(dtype).to(DEVICE)
    given = [torch.tensor(column, device=DEVICE) for column in zip(*choices, strict=True)]
    cut = triton_filters.filter_cut(logits, *given)
    right = filters.filter_cut_reference(logits, *given)
    assert torch.equal(filters.may_draw(logits, *cut), filters.may_draw(logits, *right))


def test_rows_that_filter_nothing_keep_everything() -> None:
    logits = torch.randn(4, 5000, device=DEVICE)
    rows = [(1.0, 0, 1.0, 0.0), (1.0, -1, 1.5, 0.0), (0.0, 5, 0.5, 0.5), (1.0, 5000, 1.0, -1.0)]
    given = [torch.tensor(column, device=DEVICE) for column in zip(*rows, strict=True)]
    assert bool(filters.may_draw(logits, *triton_filters.filter_cut(logits, *given)).all())


def test_a_draw_does_not_depend_on_its_row() -> None:
    logits = torch.randn(5, 3000, device=DEVICE)
    given = settings(5)
    together = sampling.sample(logits, *given, False)
    for row in range(5):
        one = slice(row, row + 1)
        assert sampling.sample(logits[one], *[value[one] for value in given], False) == together[row]


def test_masked_logits_are_not_drawn() -> None:
    logits = torch.full((8, 4100), -torch.inf, device=DEVICE)
    assert bool((sampling.sample(logits, *settings(8), False) < 4100).all())
    logits[:, 4099] = -3.0
    assert sampling.sample(logits, *settings(8), False).tolist() == [4099] * 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_stop_ids(dtype: torch.dtype) -> None:
    logits = torch.randn(4, 300, device=DEVICE).to(dtype)
    expected = logits.cpu()
    stop_ids = torch.tensor([[0, 299, -1], [1, 2, 3], [-1, 300, -8], [5, 5, 6]], dtype=torch.int32)
    active = torch.tensor([True, False, True, True])
    reference.mask_stop_ids_reference(expected, stop_ids, active)
    sampling.mask_stop_ids(logits, stop_ids.to(DEVICE), active.to(DEVICE))
    assert torch.equal(logits.cpu(), expected)


def seat_state(seats: int, max_blocks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random seats, some dead, some without a block for their position, some at the end of their tables."""
    generator = torch.Generator().manual_seed(11)
    state = torch.randint(0, 5, (7, seats + 1), dtype=torch.int32, generator=generator)
    state[1] = torch.randint(0, max_blocks * 4 + 3, (seats + 1,), dtype=torch.int32, generator=generator)
    state[2] = (torch.rand(seats + 1, generator=generator) < 0.8).int()
    state[3:5] = torch.randint(-1, 4, (2, seats + 1), dtype=torch.int32, generator=generator)
    state[:, seats] = 0
    tables = torch.randint(0, 50, (seats + 1, max_blocks), dtype=torch.int32, generator=generator)
    tables[torch.rand(tables.shape, generator=generator) < 0.2] = 0
    tables[seats] = 0
    stop_ids = torch.randint(-1, 5, (3, seats + 1), dtype=torch.int32, generator=generator)
    return state.to(DEVICE), tables.to(DEVICE), stop_ids.to(DEVICE)


@pytest.mark.parametrize(("rows", "max_blocks"), [(1, 1), (9, 5), (150, 40), (4, 1500)])
def test_rows_find_their_seats(rows: int, max_blocks: int) -> None:
    state, tables, _ = seat_state(160, max_blocks)
    served = torch.randperm(160)[:rows].int().to(DEVICE)
    served[rows // 2 + 1 :] = -1
    got = triton_seats.gather_seats(served, state, tables, 4)
    wanted = seats_reference.gather_seats_reference(served, state, tables, 4)
    assert not bool(wanted[1][rows // 2 + 1 :].any())
    for mine, right in zip(got, wanted, strict=True):
        assert mine.dtype == right.dtype and torch.equal(mine, right)


@pytest.mark.parametrize("rows", [1, 9, 150])
@pytest.mark.parametrize("policy", [(100, 0), (100, 1), (8, 0)])
def test_seats_move_on_and_tokens_reach_the_ring(rows: int, policy: tuple[int, int]) -> None:
    state, _, stop_ids = seat_state(160, 5)
    state[3] += 3
    seats = torch.randperm(160)[:rows].to(DEVICE)
    seats[rows // 2 + 1 :] = 160
    runs = (torch.rand(rows).to(DEVICE) < 0.9) & (seats < 160)
    ring = torch.full((4, rows + 3, 2), -7, dtype=torch.int32, device=DEVICE)
    record = torch.full((rows + 2, 5), -7, dtype=torch.int32, device=DEVICE)
    step, go_on = torch.tensor([6], device=DEVICE), torch.tensor([-7], dtype=torch.int32, device=DEVICE)
    word = torch.tensor(policy, device=DEVICE)
    other = [tensor.clone() for tensor in (state, ring, step, record, go_on)]
    for turn in range(4):
        tokens = torch.randint(0, 40, (rows,), device=DEVICE)
        served = torch.full_like(seats, 160) if turn == 1 else seats
        working = runs & (served < 160) & (state[2, served] != 0)
        mine = (state, stop_ids, ring, step, record, go_on)
        right = (other[0], stop_ids, *other[1:])
        triton_seats.advance_seats(tokens, served, working, *mine, word)
        seats_reference.advance_seats_reference(tokens, served, working, *right, word)
        for got, wanted in zip(mine, right, strict=True):
            assert torch.equal(got, wanted)
    assert step.item() == 9
    assert (record[:, 2:] == -7).all()


def goes_on(policy: tuple[int, int], remaining: list[int]) -> list[int]:
    """The flag after each of four steps of rows that may still get ``remaining`` tokens."""
    rows = len(remaining)
    state = torch.ones(5, rows + 1, dtype=torch.int32, device=DEVICE)
    state[3, :rows] = torch.tensor(remaining, dtype=torch.int32)
    state[2, rows] = 0
    stop_ids = torch.full((2, rows + 1), -1, dtype=torch.int32, device=DEVICE)
    ring = torch.zeros(4, rows, 2, dtype=torch.int32, device=DEVICE)
    record = torch.zeros(rows, 2, dtype=torch.int32, device=DEVICE)
    step, go_on = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    seats, flags = torch.arange(rows, device=DEVICE), []
    for advance in (triton_seats.advance_seats, seats_reference.advance_seats_reference):
        own = [tensor.clone() for tensor in (state, stop_ids, ring, step, record, go_on)]
        flags.append([])
        for _ in range(4):
            runs = own[0][2, :rows] != 0
            advance(torch.full_like(seats, 7), seats, runs, *own, torch.tensor(policy, device=DEVICE))
            flags[-1].append(own[5].item())
    assert flags[0] == flags[1]
    return flags[0]


def test_the_step_says_whether_it_may_be_repeated() -> None:
    assert goes_on((100, 0), [3, 1]) == [1, 1, 0, 0]  # while a row is left
    assert goes_on((100, 1), [3, 1]) == [0, 1, 0, 0]  # and none ended just now
    assert goes_on((2, 0), [9, 9]) == [1, 0, 0, 0]  # and there are steps to take


@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_are_rows_of_the_table(dtype: torch.dtype) -> None:
    weight = torch.randn(30, 1100, device=DEVICE).to(dtype)
    ids = torch.tensor([29, 0, 7, 7], device=DEVICE)
    assert torch.equal(triton_seats.embed(ids, weight), weight[ids])


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_a_recording_replays_with_new_lengths_and_new_sampling_settings() -> None:
    from mainspring import kernels

    case = paged_case([0, 40, 17, 300], block_size=16, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    on = case.to(DEVICE)
    q = torch.randn(4, 8, 64, device=DEVICE).bfloat16()
    logits = torch.randn(4, 5000, device=DEVICE)
    given = settings(4)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        attended = kernels.decode_attention(q, on.k_cache, on.v_cache, on.block_tables, on.seq_lens, 0.125)
        return attended, kernels.sample(logits, *given)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attended, tokens = step()
    for lengths in ([0, 40, 17, 300], [0, 0, 5, 129], [0, 33, 0, 1]):
        on.seq_lens.copy_(torch.tensor(lengths))
        given[1].random_(-1, 50)
        given[6] += 1
        graph.replay()
        expected_attended, expected_tokens = step()
        assert torch.equal(attended, expected_attended) and torch.equal(tokens, expected_tokens)
        assert bool(attended.isfinite().all())
