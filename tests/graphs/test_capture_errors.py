"""A callable that cannot be recorded is told which of its lines did it, and what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mainspring.graphs import CaptureError, CpuGraph, GraphRunner, Input, Ladder
from mainspring.graphs.capture import capture_error, watched_streams, way_out

X = {"x": Input((3,), torch.float32)}


def reads_a_value(x: Tensor) -> Tensor:
    return x * x.max().item()


def branches(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x + 1
    return x


def indexes(x: Tensor) -> Tensor:
    return x[x > 0]


def draws(x: Tensor) -> Tensor:
    return x + torch.rand(3)


def through_numpy(x: Tensor) -> Tensor:
    return x + float(x.numpy().sum())


LINES: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "item": (reads_a_value, "return x * x.max().item()", "keep the value in a tensor"),
    "branch": (branches, "if x.sum() > 0:", "torch.where"),
    "boolean index": (indexes, "return x[x > 0]", "use torch.where or masked_fill"),
    "random": (draws, "return x + torch.rand(3)", "from a seed and a counter"),
    "numpy": (through_numpy, "return x + float(x.numpy().sum())", "use torch operations"),
}


@pytest.mark.parametrize("what", LINES)
def test_the_line_its_source_and_the_way_out_are_told(what: str) -> None:
    fn, source, advice = LINES[what]
    with pytest.raises(CaptureError) as caught:
        CpuGraph.capture(lambda: fn(torch.ones(3)), name="probe", warmup=0)
    message = str(caught.value)
    assert f"test_capture_errors.py:{fn.__code__.co_firstlineno + 1} in {fn.__name__} (`{source}`)" in message
    assert advice in message


def test_of_a_call_into_the_project_the_users_line_is_told() -> None:
    from mainspring.kernels.norm import rms_norm

    def layer() -> Tensor:
        return rms_norm(torch.ones(1, 4), torch.ones(5), 1e-6)

    with pytest.raises(CaptureError, match=r"test_capture_errors\.py:\d+ in layer \(`return rms_norm"):
        CpuGraph.capture(layer)


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("called a synchronizing CUDA operation", "keep values in tensors"),
        ("CUDA error: operation not permitted when stream is capturing", "allocates around torch"),
        ("CUDA error: capturing stream has unjoined work", "current_stream().wait_stream(side)"),
        ("dependency created on uncaptured work in another stream", "side.wait_stream"),
        ("cudaErrorStreamCaptureInvalidated", "on the callable's own stream"),
        ("Offset increment outside graph capture encountered unexpectedly.", "a seed and a counter"),
        ("sizes do not match", ""),
    ],
)
def test_cudas_messages_are_given_a_way_out(message: str, advice: str) -> None:
    assert advice in way_out(message)
    assert bool(way_out(message)) == bool(advice)
    assert message in str(capture_error("step", RuntimeError(message)))


def test_a_side_stream_is_known_by_the_line_that_entered_it(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_stream", current.append)
    own, side = SimpleNamespace(stream_id=1), SimpleNamespace(stream_id=2)

    def forward() -> None:
        torch.cuda.set_stream(side)
        torch.cuda.set_stream(own)

    with watched_streams(own) as entered:
        forward()
    assert current == [side, own]
    assert list(entered) == [2]
    assert "in forward (`torch.cuda.set_stream(side)`)" in entered[2]
    assert "test_capture_errors.py" in entered[2]
    error = capture_error("step", RuntimeError("capturing stream has unjoined work"), entered[2])
    assert "set_stream(side)" in str(error) and "wait_stream(side)" in str(error)
    torch.cuda.set_stream(side)
    assert list(entered) == [2] and current[-1] is side


def test_a_runner_within_a_recording_is_refused_and_both_are_named() -> None:
    inner = GraphRunner(lambda x: x + 1, inputs=X, ladder=Ladder([2]), device="cpu", name="inner")

    def fn(x: Tensor) -> Tensor:
        result: Tensor = inner(x=x)
        return result

    outer = GraphRunner(fn, inputs=X, ladder=Ladder([2]), device="cpu", name="outer")
    with pytest.raises(CaptureError, match=r"'inner' was called while 'outer\[2\]' is being recorded.*Call the module"):
        outer(x=torch.zeros(2, 3))
    assert inner(x=torch.zeros(2, 3)).tolist() == [[1.0] * 3] * 2  # on its own it works
    eager = GraphRunner(fn, inputs=X, ladder=Ladder([2]), device="cpu", name="eager", enforce_eager=True)
    assert eager(x=torch.zeros(2, 3)).tolist() == [[1.0] * 3] * 2
