from __future__ import annotations

import pytest
import torch
from naive_formulas import assert_close, naive_rms_norm

from mainspring.kernels import LinearWeight, linear, pack_linear
from mainspring.kernels.linear import Fusion, fused_linear, fusion, padded_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 5, 67])
def test_linear_equals_the_formula(dtype: torch.dtype, bias: bool, packed: bool, rows: int) -> None:
    x, w = torch.randn(rows, 48).to(dtype), torch.randn(32, 48).to(dtype)
    b = torch.randn(32).to(dtype) if bias else None
    weight = LinearWeight(w, b)
    weight = pack_linear(weight) if packed else weight
    expected = x.double() @ w.double().T + (0 if b is None else b.double())
    out = linear(x, weight)
    assert_close(out, expected)
    given = torch.full((rows, 32), torch.nan, dtype=dtype)
    assert linear(x, weight, out=given).data_ptr() == given.data_ptr()
    assert_close(given, expected)
    assert weight.nbytes == (32 * 48 + (32 if bias else 0)) * dtype.itemsize


@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), (576, 1536), (3072, 576)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_product_of_a_row_does_not_depend_on_its_company(
    dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    weight = pack_linear(LinearWeight(torch.randn(outputs, inputs).to(dtype)))
    if weight.kind != "packed":
        pytest.skip(f"oneDNN cannot pack {dtype} on this machine")
    x = torch.randn(16, inputs).to(dtype)
    together = linear(x, weight)
    for rows in (1, 2, 3, 8, 15):
        assert torch.equal(linear(x[:rows], weight), together[:rows])


def test_packed_products_of_all_lengths_need_few_compiled_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = pack_linear(LinearWeight(torch.randn(8, 16)))
    if weight.kind != "packed":
        pytest.skip("oneDNN cannot pack on this machine")
    compiled = set()
    product = weight._product  # type: ignore[attr-defined]

    def count(x: torch.Tensor) -> torch.Tensor:
        compiled.add(x.shape[0])
        return product(x)

    monkeypatch.setattr(weight, "_product", count)
    for rows in range(1, 513):
        assert linear(torch.ones(rows, 16), weight).shape == (rows, 8)
    assert len(compiled) <= 42


def test_padding_of_a_packed_product_is_small() -> None:
    for rows in range(1, 5000):
        padded = padded_rows(rows)
        assert rows <= padded <= max(rows + 3, rows * 9 / 8)
        assert padded_rows(padded) == padded
    for rung in (1, 2, 4, 8, 16, 24, 32, 64, 128, 256):
        assert padded_rows(rung) == rung  # decode steps of the usual ladders are not padded


def test_tensors_names_what_a_product_reads() -> None:
    w, b = torch.randn(4, 3), torch.randn(4)
    assert set(LinearWeight(w).tensors()) == {"weight"}
    tensors = LinearWeight(w, b).tensors()
    assert tensors["weight"] is w and tensors["bias"] is b


def test_packing_twice_packs_once() -> None:
    packed = pack_linear(LinearWeight(torch.randn(4, 8)))
    assert packed.kind == "packed" and pack_linear(packed) is packed


def test_a_weight_that_cannot_be_packed_is_returned_as_it_is() -> None:
    weight = LinearWeight(torch.zeros(4, 8, dtype=torch.float64))
    assert pack_linear(weight) is weight


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"not \[4\]"):
        LinearWeight(torch.randn(4))
    with pytest.raises(ValueError, match=r"bias \[3\] does not fit weight \[4, 8\]"):
        LinearWeight(torch.randn(4, 8), torch.randn(3))


@pytest.mark.parametrize("swiglu", [False, True])
def test_a_fused_product_is_the_operations_that_it_stands_for(swiglu: bool) -> None:
    x, w, b, g = (torch.randn(shape, dtype=torch.float64).float() for shape in ((3, 48), (32, 48), (32,), (48,)))
    residual = None if swiglu else torch.randn(3, 32)
    out = fused_linear(x, LinearWeight(w, b), norm_weight=g, eps=1e-5, residual=residual, swiglu=swiglu)
    expected = naive_rms_norm(x, g, 1e-5) @ w.double().T + b
    if swiglu:
        gate, up = expected.chunk(2, dim=-1)
        expected = gate * torch.sigmoid(gate) * up
    assert_close(out, expected if residual is None else expected + residual)


def test_swiglu_and_residual_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        fused_linear(torch.zeros(1, 8), LinearWeight(torch.zeros(4, 8)), residual=torch.zeros(1, 4), swiglu=True)


@pytest.mark.parametrize("with_residual", [False, True])
def test_a_gated_product_is_the_operations_that_it_stands_for(with_residual: bool) -> None:
    x, w, b = (torch.randn(shape, dtype=torch.float64).float() for shape in ((3, 2 * 48), (32, 48), (32,)))
    residual = torch.randn(3, 32) if with_residual else None
    gate, up = x.double().chunk(2, dim=-1)
    expected = (gate * torch.sigmoid(gate) * up) @ w.double().T + b
    out = fused_linear(x, LinearWeight(w, b), residual=residual, gated=True)
    assert_close(out, expected if residual is None else expected + residual)


def test_a_gate_and_a_norm_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        fused_linear(torch.zeros(1, 16), LinearWeight(torch.zeros(4, 8)), norm_weight=torch.ones(8), gated=True)


def test_nothing_is_fused_on_a_cpu() -> None:
    assert fusion(torch.zeros(1, 1024, dtype=torch.bfloat16), LinearWeight(torch.zeros(4, 1024))) == Fusion()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17, 64])
@pytest.mark.parametrize(("n", "k"), [(1024, 2048), (6144, 1024), (96, 576), (40, 104)])
def test_products_on_a_gpu_equal_the_formula(dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    x, w = torch.randn(rows, k, device="cuda").to(dtype), (torch.randn(n, k, device="cuda") * k**-0.5).to(dtype)
    g, b, r = (torch.randn(size, device="cuda").to(dtype) for size in ((k,), (n,), (rows, n)))
    weight = LinearWeight(w, b)
    plain = x.double() @ w.double().T + b.double()
    assert_close(linear(x, weight), plain)
    given = torch.full((rows + 1, n), torch.nan, dtype=dtype, device="cuda")
    assert_close(linear(x, weight, out=given[:rows]), plain)
    assert bool(given[rows:].isnan().all())
    normed = naive_rms_norm(x, g, 1e-5) @ w.double().T + b.double()
    # In 16 bits the norm's result is rounded once more, over k products.
    loose = torch.bfloat16 if dtype == torch.float16 else dtype
    assert_close(fused_linear(x, weight, norm_weight=g, eps=1e-5, residual=r), normed + r.double(), loose)
    gate, up = normed.chunk(2, dim=-1)
    fused = fused_linear(x, weight, norm_weight=g, eps=1e-5, swiglu=True)
    assert_close(fused, gate * torch.sigmoid(gate) * up, loose)
    wide = torch.randn(rows, 2 * k, device="cuda").to(dtype)
    gate, up = wide.double().chunk(2, dim=-1)
    gated = (gate * torch.sigmoid(gate) * up) @ w.double().T + b.double() + r.double()
    assert_close(fused_linear(wide, weight, residual=r, gated=True), gated, loose)
