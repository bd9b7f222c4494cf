"""A recording that does not do what its callable does is told, with the output, and the operation, that differs."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from mainspring.graphs import GraphPool, GraphRunner, Input, Ladder, VerificationError
from mainspring.graphs.trial import random_rows
from mainspring.graphs.verify import bisect_graph, how_they_differ

X = {"x": Input((3,), torch.float32)}


def make(fn: Callable[..., Any], inputs: dict[str, Input] | None = None, **options: Any) -> GraphRunner:
    return GraphRunner(
        fn,
        inputs=inputs or X,
        ladder=options.pop("ladder", Ladder([1, 4])),
        device="cpu",
        verify=options.pop("verify", True),
        **options,
    )


class Drifting:
    """Its Python changes what it computes from one run to the next, as metadata changed by a warm-up run does."""

    def __init__(self, structure: bool = False) -> None:
        self.runs = 0
        self.structure = structure

    def __call__(self, x: Tensor) -> Tensor:
        self.runs += 1
        y = x.sin()
        if self.structure:
            return y.exp() if self.runs > 2 else y.cos()
        return (y * self.runs).cos() + 1


def test_a_sound_step_is_verified_rung_by_rung_and_counted() -> None:
    runner = make(lambda x: torch.softmax(x, -1))
    runner.capture()
    assert runner.counters.verified == 2
    assert runner.verify() == [4, 1]
    assert runner.bisect(4) is None
    x = torch.randn(3, 3)
    assert torch.equal(runner(x=x), torch.softmax(x, -1))


def test_a_frozen_python_value_is_found_at_its_operation() -> None:
    with pytest.raises(VerificationError) as caught:
        make(Drifting()).capture([4])
    (mismatch,) = caught.value.mismatches
    assert (mismatch.rung, mismatch.output) == (4, "step.output")
    assert mismatch.operation is not None
    assert (mismatch.operation.index, mismatch.operation.name) == (1, "aten::mul")
    assert "'step.output' differs in" in str(caught.value) and "operation 1 aten::mul" in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).mismatches == caught.value.mismatches


def test_another_operation_than_recorded_is_found() -> None:
    with pytest.raises(VerificationError, match="operation 1 aten::cos: eager runs aten::exp in its place"):
        make(Drifting(structure=True)).capture([4])


def test_a_runner_that_does_not_verify_replays_what_it_has_and_can_be_asked() -> None:
    runner = make(Drifting(), verify=False)
    runner.capture([4])
    with pytest.raises(VerificationError):
        runner.verify()
    found = runner.bisect(4)
    assert found is not None and (found.index, found.name) == (1, "aten::mul")


def test_bisection_by_recording_again_finds_the_operation_too() -> None:
    """What a GPU does, where intermediates are overwritten."""
    x = torch.randn(4, 3)
    recording = False

    def step() -> Tensor:
        y = x.sin().exp()
        z = y * (3 if recording else 2)
        return (z + 1).cos().sin().tanh()

    def captured() -> Tensor:
        nonlocal recording
        recording = torch._C._len_torch_dispatch_stack() > 1  # the recorder's mode beneath the exporter's
        try:
            return step()
        finally:
            recording = False

    found = bisect_graph(captured, lambda: None, GraphPool("cpu"), "step")
    assert found is not None and (found.index, found.name) == (2, "aten::mul")
    assert "differs in 12 of 12" in found.what
    assert bisect_graph(step, lambda: None, GraphPool("cpu"), "step") is None


def test_state_that_the_step_writes_is_compared_and_put_back() -> None:
    count, total = torch.zeros((), dtype=torch.int64), torch.zeros(3)

    def fn(x: Tensor) -> Tensor:
        count.add_(1)
        total.add_(x.sum(0))
        return x + total

    runner = make(fn)
    runner.capture([4])
    assert count.item() == 2  # warm-up and recording, not the trial
    runs = 0

    def drifting(x: Tensor) -> None:
        nonlocal runs
        runs += 1
        total.add_(runs)

    with pytest.raises(VerificationError, match=r"unnamed tensor float32\[3\]"):
        make(drifting).capture([4])


def test_padded_rows_are_part_of_the_trial() -> None:
    seen: list[Tensor] = []

    def fn(x: Tensor) -> Tensor:
        return x + 1

    runner = make(fn, {"x": Input((3,), torch.float32, pad=7)}, ladder=Ladder([1, 4]))
    runner.capture()
    seen.append(runner.buffers["step.input.x"].clone())
    assert seen[0][3].tolist() == [7.0] * 3


def test_inputs_may_say_what_is_valid() -> None:
    table = torch.randn(5, 3)
    spec = Input((), torch.int64, sample=lambda rows, generator: torch.randint(0, 5, (rows,), generator=generator))
    runner = make(lambda index: table[index], {"index": spec})
    runner.capture()
    assert len(set(runner.buffers["step.input.index"].tolist())) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int32, torch.bool])
def test_random_rows_have_the_inputs_shape_and_type(dtype: torch.dtype) -> None:
    rows = random_rows(Input((2, 3), dtype, pad=1), 4, torch.Generator().manual_seed(0))
    assert rows.shape == (4, 2, 3) and rows.dtype == dtype
    again = random_rows(Input((2, 3), dtype, pad=1), 4, torch.Generator().manual_seed(0))
    assert torch.equal(rows, again)
    if not (dtype.is_floating_point or dtype.is_complex):
        assert bool((rows == 1).all())


def test_a_trial_of_ones_own_prepares_state_and_inputs() -> None:
    table, picked = torch.zeros(6, 3), torch.zeros(6)

    class Seats:
        prepared: list[int] = []

        def state(self, rows: int) -> Mapping[str, Tensor]:
            return {"table": table, "picked": picked}

        def prepare(self, rows: int, generator: torch.Generator) -> Mapping[str, Tensor]:
            self.prepared.append(rows)
            table.normal_(generator=generator)
            return {"rows": torch.randperm(6, generator=generator)[:rows]}

    def fn(rows: Tensor) -> Tensor:
        real = torch.where(rows >= 0, rows, 5)
        picked.index_add_(0, real, (rows >= 0).float())
        return table[real]

    trial = Seats()
    runner = make(fn, {"rows": Input((), torch.int64, pad=-1)}, trial=trial)
    runner.capture()
    assert trial.prepared == [3, 1]
    assert not table.any() and not picked.any()


def test_a_difference_in_bits_is_told_with_its_place_and_values() -> None:
    zero, minus = torch.zeros(2, 2), torch.tensor([[0.0, 0.0], [-0.0, 0.0]])
    assert how_they_differ(minus, zero) == "differs in 1 of 4 elements, first at [1, 0]: -0.0 recorded, 0.0 eager"
    nan = torch.full((2,), float("nan"))
    assert how_they_differ(nan, nan.clone()) is None
    assert "bfloat16[2] recorded" in str(how_they_differ(nan.bfloat16(), nan))
