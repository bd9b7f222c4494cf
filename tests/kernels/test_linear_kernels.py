from __future__ import annotations

import pytest
import torch
from naive_formulas import assert_close

from mainspring.kernels import LinearWeight, linear, pack_linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
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
