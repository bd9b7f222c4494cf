"""A runner pads, copies, replays and slices; it says what it did and refuses what it cannot do."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mainspring.graphs import (
    CaptureError,
    CudaGraph,
    FixedBuffers,
    GraphError,
    GraphPool,
    GraphRunner,
    Input,
    Ladder,
    LadderError,
    StaleAddressError,
)
from mainspring.graphs.progress import track

LADDER = Ladder([1, 2, 4, 8])
X = {"x": Input((3,), torch.float32)}
ROWS = {"rows": Input((), torch.int32, pad=-1)}


def make(fn: Callable[..., Any], inputs: dict[str, Input] | None = None, **options: Any) -> GraphRunner:
    return GraphRunner(fn, inputs=inputs or X, ladder=options.pop("ladder", LADDER), device="cpu", **options)


class Seats:
    """State with one seat per request: each step adds 1 to the seats that its rows serve."""

    def __init__(self, seats: int = 10) -> None:
        self.count = torch.zeros(seats + 1, dtype=torch.int64)  # the last one takes what padded rows write
        self.seen = torch.full((8,), 99, dtype=torch.int32)
        self.seats = seats

    def __call__(self, rows: Tensor) -> None:
        self.seen[: rows.shape[0]].copy_(rows)
        real = rows >= 0
        self.count.index_add_(0, torch.where(real, rows, self.seats), real.long())


@pytest.mark.parametrize("enforce_eager", [False, True])
@given(batches=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=8), min_size=1, max_size=6))
@settings(deadline=None, max_examples=25)
def test_rows_of_an_earlier_larger_batch_are_never_seen(enforce_eager: bool, batches: list[list[int]]) -> None:
    seats = Seats()
    runner = make(seats, ROWS, enforce_eager=enforce_eager)
    expected = torch.zeros(11, dtype=torch.int64)
    for batch in batches:
        assert runner(rows=batch) is None
        rung = LADDER.rung_for(len(batch))
        assert seats.seen[:rung].tolist() == batch + [-1] * (rung - len(batch))
        for seat in batch:
            expected[seat] += 1
        assert torch.equal(seats.count, expected)


def test_capture_runs_on_padding_only_and_leaves_state_alone() -> None:
    seats = Seats()
    runner = make(seats, ROWS)
    runner.capture()
    assert seats.count.tolist() == [0] * 11
    assert seats.seen.tolist() == [-1] * 8
    runner(rows=[3, 1, 7])
    assert seats.count.nonzero().flatten().tolist() == [1, 3, 7]


def test_more_rows_than_the_top_rung_are_split_over_replays_and_counted() -> None:
    runner = make(lambda x: (x * 2, {}.get("none", x.sum(1))))
    x = torch.randn(21, 3)
    doubled, sums = runner(x=x)
    assert torch.equal(doubled, x * 2)
    assert torch.equal(sums, x.sum(1))
    assert runner.counters.replays == {8: 3}
    assert runner.counters.split_batches == 1
    assert runner.counters.rows == 21
    assert runner.counters.padded_rows == 3
    assert not runner.counters.eager_steps
    runner(x=x[:8].tolist() * 2)
    assert runner.counters.replays == {8: 5}


def test_a_split_batch_without_outputs_gives_none() -> None:
    seats = Seats()
    runner = make(seats, ROWS, ladder=Ladder([2]))
    assert runner(rows=[0, 1, 2, 3, 4]) is None
    assert seats.count.tolist() == [1] * 5 + [0] * 6


def test_eager_steps_are_counted_with_their_reason_and_run_python_each_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fn(x: Tensor) -> Tensor:
        print("in the layer", x[0, 0].item())
        return x + 1

    runner = make(fn, enforce_eager=True)
    assert runner.capture() == []
    for value in (1.0, 2.0):
        out = runner(x=torch.full((3, 3), value))
        assert out.tolist() == [[value + 1] * 3] * 3
    assert capsys.readouterr().out.splitlines() == ["in the layer 1.0", "in the layer 2.0"]
    assert runner.counters.eager_steps == {"enforce_eager": 2}
    assert not runner.counters.replays
    assert runner.counters.padded_rows == 2


def test_an_error_in_an_eager_step_is_the_users_own() -> None:
    def fn(x: Tensor) -> Tensor:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        make(fn, enforce_eager=True)(x=torch.zeros(1, 3))


def test_rungs_are_recorded_largest_first_and_reported() -> None:
    order: list[int] = []

    def fn(x: Tensor) -> Tensor:
        order.append(x.shape[0])
        return (x * 2).sin()

    runner = make(fn, verify=False)
    reports = runner.capture()
    assert [report.size for report in reports] == [8, 4, 2, 1]
    assert order == [8, 8, 4, 4, 2, 2, 1, 1]  # one warm-up and one recording each
    assert all(report.seconds > 0 and report.operations == 3 for report in reports)
    assert [report.pool_bytes_added > 0 for report in reports] == [True, False, False, False]
    assert runner.counters.captures == {report.size: report for report in reports}
    assert runner.capture() == []


def test_a_rung_is_recorded_when_it_is_first_needed() -> None:
    runner = make(lambda x: x + 1)
    assert runner.graphs == {}
    runner(x=torch.zeros(3, 3))
    assert list(runner.graphs) == [4]
    runner.capture([2, 1])
    assert list(runner.graphs) == [4, 2, 1]
    with pytest.raises(LadderError, match="3"):
        runner.capture([3])


def test_recording_another_rung_leaves_the_inputs_of_the_next_step_right() -> None:
    runner = make(lambda x: x + 1)
    x = torch.randn(3, 3)
    assert torch.equal(runner(x=x), x + 1)
    runner.capture()
    assert torch.equal(runner(x=x), x + 1)


def test_outputs_are_held_buffers_with_names_outside_the_pool() -> None:
    buffers = FixedBuffers("cpu")
    runner = make(lambda x: {"sum": x.sum(1), "twice": x * 2}, buffers=buffers, name="net")
    out = runner(x=torch.ones(3, 3))
    assert list(buffers) == ["net.input.x", "net.output.sum", "net.output.twice"]
    assert out["twice"].data_ptr() == buffers["net.output.twice"].data_ptr()
    assert buffers["net.output.twice"].shape == (8, 3)
    kept = out["sum"].clone()
    address = out["sum"].data_ptr()
    runner.capture()
    churn = [torch.full((8, 3), 5.0) for _ in range(50)]
    assert runner(x=torch.ones(3, 3))["sum"].data_ptr() == address
    assert torch.equal(out["sum"], kept)
    assert len(churn) == 50


def test_two_runners_may_share_buffers_and_pool() -> None:
    buffers, pool = FixedBuffers("cpu"), GraphPool("cpu")
    first = make(lambda x: (x * 2).sin(), buffers=buffers, pool=pool, name="a")
    second = make(lambda x: (x + 1).cos(), buffers=buffers, pool=pool, name="b")
    x = torch.randn(5, 3)
    one = first(x=x)
    assert torch.equal(second(x=x), (x + 1).cos())
    assert torch.equal(one, (x * 2).sin())
    assert pool.nbytes == first.graphs[8].nbytes
    with pytest.raises(GraphError, match=r"a\.input\.x"):
        make(lambda x: x, buffers=buffers, name="a")


# Uploads


def test_the_same_rows_again_are_not_uploaded_again() -> None:
    seats = Seats()
    runner = make(seats, ROWS)
    for _ in range(3):
        runner(rows=[4, 2])
    assert (runner.counters.uploads, runner.counters.uploads_skipped) == (1, 2)
    runner(rows=[4, 2, 0])
    runner(rows=[4, 2])
    runner(rows=(4, 2))
    assert (runner.counters.uploads, runner.counters.uploads_skipped) == (3, 3)
    assert seats.count.tolist() == [1, 0, 6, 0, 6, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("values", [[1.0, 2.0, 3.0], torch.tensor([1.0, 2.0, 3.0])], ids=["list", "tensor"])
def test_values_changed_in_place_by_the_caller_are_uploaded(values: Any) -> None:
    runner = make(lambda x: x * 1, {"x": Input((), torch.float32)})
    runner(x=values)
    values[1] = 9.0
    assert runner(x=values).tolist() == [1.0, 9.0, 3.0]


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_an_input_that_the_step_writes_is_uploaded_every_time(enforce_eager: bool) -> None:
    runner = make(lambda x: x.add_(1) * 1, enforce_eager=enforce_eager)
    for _ in range(3):
        assert runner(x=[[1.0, 2.0, 3.0]]).tolist() == [[2.0, 3.0, 4.0]]


def test_a_write_to_the_buffer_from_outside_is_noticed() -> None:
    runner = make(lambda x: x * 1)
    runner(x=[[1.0, 2.0, 3.0]])
    runner.buffers["step.input.x"].zero_()
    assert runner(x=[[1.0, 2.0, 3.0]]).tolist() == [[1.0, 2.0, 3.0]]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "missing"),
        ({"x": torch.zeros(1, 3), "y": [1]}, "unknown"),
        ({"x": torch.zeros(1, 4)}, "shape"),
        ({"x": torch.zeros(())}, "shape"),
        ({"x": torch.zeros(1, 3, dtype=torch.complex64)}, "complex"),
        ({"x": torch.zeros(0, 3)}, "0"),
        ({"x": []}, "0"),
        ({"x": [[1.0, 2.0]]}, "shape"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        make(lambda x: x + 1)(**inputs)


def test_inputs_with_different_numbers_of_rows_are_refused() -> None:
    runner = make(lambda x, rows: x + rows[:, None], X | ROWS)
    with pytest.raises(GraphError, match="different numbers"):
        runner(x=torch.zeros(2, 3), rows=[1])
    with pytest.raises(GraphError, match="no inputs"):
        GraphRunner(lambda: None, inputs={}, ladder=LADDER, device="cpu")


# Recording


def test_a_recording_that_fails_midway_can_be_made_again() -> None:
    broken = True

    def fn(x: Tensor) -> Tensor:
        y = x * 2
        if broken and x.shape[0] == 2:
            raise KeyError("half way")
        return y.sin()

    runner = make(fn)
    with pytest.raises(CaptureError, match=r"step\[2\].*KeyError") as caught:
        runner.capture()
    assert isinstance(caught.value.__cause__, KeyError)
    assert list(runner.graphs) == [8, 4]
    x = torch.randn(7, 3)
    assert torch.equal(runner(x=x), (x * 2).sin())
    broken = False
    runner.capture()
    assert torch.equal(runner(x=x[:2]), (x[:2] * 2).sin())


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: x.sum(), "first dimension"),
        (lambda x: x[:1], "first dimension"),
        (lambda x: 3, "int"),
        (lambda x: (x, 3), "int"),
        (lambda x: x.new_zeros(x.shape[0], x.shape[0]), "only the batch may differ"),
        (lambda x: x if x.shape[0] > 1 else (x, x), "first"),
        (lambda x: x + torch.rand(3), "random"),
        (lambda x: x * x.max().item(), "item"),
    ],
)
def test_a_step_that_cannot_be_recorded_is_refused(fn: Callable[..., Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        make(fn).capture()


def test_a_generators_seed_is_never_frozen_into_a_recording() -> None:
    torch.manual_seed(0)
    eager = make(lambda x: x + torch.rand(x.shape), enforce_eager=True)
    assert not torch.equal(eager(x=torch.zeros(1, 3)).clone(), eager(x=torch.zeros(1, 3)))
    with pytest.raises(CaptureError, match="random generator"):
        make(lambda x: x + torch.rand(x.shape))(x=torch.zeros(1, 3))


def test_a_process_forked_after_cuda_came_up_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(CaptureError, match="spawn"):
        CudaGraph.capture(lambda: None)
    with pytest.raises(CaptureError, match="spawn"):
        GraphRunner(lambda x: x, inputs=X, ladder=LADDER, device="cuda")


def test_the_progress_bar_passes_every_rung_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert list(track([8, 4, 1], "recording", enabled=True)) == [8, 4, 1]
    assert list(track([8, 4, 1], "recording", enabled=False)) == [8, 4, 1]


def test_the_progress_bar_counts_in_words_and_is_not_shown_for_a_single_rung(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert list(track([1], "recording", enabled=True)) == [1]
    assert capsys.readouterr().err == ""
    assert list(track([2, 1], "recording", enabled=True)) == [2, 1]
    shown = capsys.readouterr().err
    assert "1 row " in shown and "1 rows" not in shown


# Addresses


@pytest.mark.parametrize("which", ["step.input.x", "step.output"])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_an_input_or_output_that_moved_stops_the_step_before_it_runs(which: str, enforce_eager: bool) -> None:
    done = torch.zeros(())

    def fn(x: Tensor) -> Tensor:
        done.add_(1)
        return x + 1

    runner = make(fn, enforce_eager=enforce_eager)
    runner(x=torch.zeros(2, 3))
    steps = done.item()
    old = runner.buffers[which].data_ptr()
    kept = runner.buffers[which].untyped_storage()
    runner.buffers[which].set_(torch.zeros(8, 3))
    with pytest.raises(StaleAddressError, match=which) as caught:
        runner(x=torch.zeros(2, 3))
    assert f"{old:#x}" in str(caught.value)
    assert f"{runner.buffers[which].data_ptr():#x}" in str(caught.value)
    assert done.item() == steps
    assert kept.nbytes() == 96


def test_auditing_checks_every_named_buffer_before_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(3, 3)
    buffers = FixedBuffers("cpu")
    buffers.adopt("layer.weight", lambda: layer.weight)
    runner = make(lambda x: layer(x), buffers=buffers)
    runner(x=torch.zeros(2, 3))
    old = layer.weight
    layer.weight = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(StaleAddressError, match=r"layer\.weight"):
        runner.check()
    monkeypatch.setenv("MAINSPRING_AUDIT", "1")
    with pytest.raises(StaleAddressError, match=r"layer\.weight"):
        runner(x=torch.zeros(2, 3))
    layer.weight = old
    runner(x=torch.zeros(2, 3))


def test_accepting_a_moved_weight_records_again_and_counts_it() -> None:
    layer = nn.Linear(3, 3, bias=False)
    buffers = FixedBuffers("cpu")
    buffers.adopt("layer.weight", lambda: layer.weight)
    runner = make(lambda x: layer(x), buffers=buffers)
    x = torch.randn(2, 3)
    runner.capture([2, 4])
    with torch.no_grad():
        layer.weight.mul_(2)  # in place: served at once
        assert torch.equal(runner(x=x), layer(x))
    assert not runner.counters.recaptures
    layer.weight = nn.Parameter(torch.randn(3, 3))
    assert buffers.accept() == ["layer.weight"]
    with torch.no_grad():
        assert torch.equal(runner(x=x), layer(x))
    assert runner.counters.recaptures == {"a buffer was accepted at a new address": 2}
    assert sorted(runner.graphs) == [2, 4]


def test_recapture_uses_a_moved_input_and_output() -> None:
    runner = make(lambda x: x + 1)
    x = torch.randn(2, 3)
    runner(x=x)
    for name in ("step.input.x", "step.output"):
        runner.buffers[name].set_(torch.full((8, 3), 7.0))
    runner.recapture("moved")
    assert torch.equal(runner(x=x), x + 1)
    assert torch.equal(runner.buffers["step.output"][:2], x + 1)
    assert runner.counters.recaptures == {"moved": 1}


def test_release_gives_the_memory_back_and_the_next_call_records_anew() -> None:
    runner = make(lambda x: (x + 1) * 2)
    x = torch.randn(2, 3)
    runner(x=x)
    assert runner.pool.nbytes > 0
    runner.release()
    assert runner.pool.nbytes == 0
    assert torch.equal(runner(x=x), (x + 1) * 2)


# Counting


def test_counters_are_plain_data_and_can_be_reset() -> None:
    runner = make(lambda x: x + 1)
    for rows in (1, 3, 3, 8):
        runner(x=torch.zeros(rows, 3))
    told = json.loads(json.dumps(runner.counters.as_dict()))
    assert told["replays"] == {"1": 1, "4": 2, "8": 1}
    assert told["padding_waste"] == 2 / 17
    assert told["captures"]["4"]["operations"] == 2
    assert runner.counters.steps == 4
    runner.counters.reset()
    assert runner.counters.steps == runner.counters.rows == 0
    assert sorted(runner.counters.captures) == [1, 4, 8]


def test_a_call_inside_inference_mode_records_and_replays() -> None:
    runner = make(lambda x: x + 1)
    with torch.inference_mode():
        first = runner(x=torch.zeros(2, 3)).clone()
    assert torch.equal(first, runner(x=torch.zeros(2, 3)))
