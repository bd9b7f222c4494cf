"""What is fed to a runner is what its step sees, however it is given and whatever was given before."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from mainspring.graphs import CaptureError, GraphError, GraphRunner, Input, Ladder, StaleAddressError


def doubling(shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float32, **options: Any) -> GraphRunner:
    spec = {"x": Input(shape, dtype)}
    return GraphRunner(lambda x: x * 2, inputs=spec, ladder=Ladder([1, 2, 4]), device="cpu", **options)


@pytest.mark.filterwarnings("ignore:Creating a tensor from a list of numpy")
def test_rows_changed_in_place_are_seen() -> None:
    arrays = [np.array([1.0, 2.0]), np.array([3.0, 4.0])]
    runner = doubling((2,))
    runner(x=arrays)
    arrays[0][0] = 100.0
    assert runner(x=arrays).tolist() == [[200.0, 4.0], [6.0, 8.0]]
    scalars = [torch.tensor(1.0), torch.tensor(2.0)]
    runner = doubling()
    runner(x=scalars)
    scalars[0].fill_(100.0)
    assert runner(x=scalars).tolist() == [200.0, 4.0]
    nested = [[1, 2], [3, 4]]
    runner = doubling((2,), torch.int32)
    runner(x=nested)
    nested[1][0] = 30
    assert runner(x=nested).tolist() == [[2, 4], [60, 8]]


def test_minus_zero_after_zero_is_seen() -> None:
    runner = GraphRunner(
        lambda x: 1 / x, inputs={"x": Input((), torch.float32)}, ladder=Ladder([1]), device="cpu", progress=False
    )
    for zero in (torch.zeros(1), [0.0]):
        assert runner(x=zero).tolist() == [float("inf")]
        negative = -zero if isinstance(zero, torch.Tensor) else [-0.0]
        assert runner(x=negative).tolist() == [-float("inf")]


def test_the_same_rows_again_are_not_copied_again() -> None:
    for values in ([1, 2, 3], torch.tensor([1.0, 2.0, float("nan")])):
        runner = doubling()
        runner(x=values)
        runner(x=values)
        assert (runner.counters.uploads, runner.counters.uploads_skipped) == (1, 1)


@pytest.mark.parametrize("values", [5, None, "abc", {"a": 1}, {1, 2}, [[1.0], [1.0, 2.0]], ["a"]])
def test_what_is_no_batch_is_refused(values: Any) -> None:
    with pytest.raises(GraphError):
        doubling()(x=values)


@pytest.mark.parametrize("values", [torch.zeros(2, 4).to_sparse(), torch.zeros(2, 4, device="meta")])
def test_a_tensor_without_dense_data_is_refused(values: torch.Tensor) -> None:
    runner = GraphRunner(
        lambda x: x + 1, inputs={"x": Input((4,), torch.float32)}, ladder=Ladder([2]), device="cpu", progress=False
    )
    with pytest.raises(GraphError, match=r"'step.input.x' is .*; give a dense tensor with data"):
        runner(x=values)


UNUSUAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "mkldnn": lambda x: x.to_mkldnn(),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
    "jagged": lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
    "meta": lambda x: x.to("meta"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "recorded"])
@pytest.mark.parametrize("kind", UNUSUAL)
def test_an_output_without_plain_rows_is_refused(kind: str, eager: bool) -> None:
    made, specs = UNUSUAL[kind], {"x": Input((3,), torch.float32)}
    wanted = "to_dense" if eager else "dense|opaque|strided|plain"
    for fn in (made, lambda x: (x, made(x)), lambda x: {"y": made(x)}):
        runner = GraphRunner(fn, inputs=specs, ladder=Ladder([1, 2]), device="cpu", enforce_eager=eager)
        with pytest.raises(CaptureError, match=wanted):
            runner(x=torch.ones(2, 3))


def test_views_that_torch_negates_or_conjugates_lazily_are_served_every_time() -> None:
    rows = torch.randn(2, 4, dtype=torch.complex64)
    for values in (rows.conj().imag, rows.conj(), torch._neg_view(rows)):
        runner = GraphRunner(
            lambda x: x * 2, inputs={"x": Input((4,), values.dtype)}, ladder=Ladder([2]), device="cpu", progress=False
        )
        for _ in range(2):
            assert torch.equal(runner(x=values), values * 2)


@pytest.mark.parametrize(
    ("dtype", "values"), [(torch.int32, [1 << 40]), (torch.uint8, [-1]), (torch.int64, [1 << 70]), (torch.int8, [128])]
)
def test_numbers_that_do_not_fit_are_refused_not_wrapped(dtype: torch.dtype, values: list[int]) -> None:
    with pytest.raises(GraphError):
        doubling(dtype=dtype)(x=values)
    assert doubling(dtype=dtype)(x=[3]).tolist() == [6]


@pytest.fixture
def meta_by_default() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def test_a_default_device_does_not_matter(meta_by_default: None) -> None:
    runner = doubling((2,), enforce_eager=False)
    assert runner(x=[[1.0, 2.0]] * 3).tolist() == [[2.0, 4.0]] * 3
    assert runner(x=torch.ones(5, 2, device="cpu")).tolist() == [[2.0, 2.0]] * 5


def test_errors_cross_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(StaleAddressError("w", "there", "here")))
    assert (error.buffer, error.recorded, error.current) == ("w", "there", "here")
    assert "accept" in str(error)


def test_what_the_warm_up_changes_is_not_what_is_recorded() -> None:
    state = torch.tensor([10, 20, 30, 0])  # the last row is for padding

    def step(row: torch.Tensor) -> torch.Tensor:
        found = state[row] + 1
        state[row] = found
        return found

    rows = {"row": Input((), torch.int64, pad=3)}
    runner = GraphRunner(step, inputs=rows, ladder=Ladder([1, 2]), device="cpu", progress=False)
    runner.capture()
    assert state[:3].tolist() == [10, 20, 30]
    assert [runner(row=[0]).tolist() for _ in range(3)] == [[11], [12], [13]]
    assert runner(row=[0, 2]).tolist() == [14, 31]
    assert state[:3].tolist() == [14, 20, 31]
