"""An operation may bring the call that a replay makes: `prepare`, which does its views once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from mainspring.graphs import CpuGraph

LIBRARY = torch.library.Library("graphs_prepared", "DEF")
LIBRARY.define("halves(Tensor x, float scale=1.0) -> (Tensor, Tensor)")
LIBRARY.define("tally(Tensor(a!) total, Tensor x) -> ()")
OPS = torch.ops.graphs_prepared
Prepared = tuple[Callable[[], None], tuple[Tensor, ...]]


@pytest.fixture
def prepared() -> Iterator[list[str]]:
    """The operations with a `prepare`; lists what was prepared and run."""
    events: list[str] = []

    def halves(x: Tensor, scale: float = 1.0, out: Sequence[Tensor] | None = None) -> Prepared:
        events.append("prepare halves")
        left, right = x.chunk(2, dim=-1)
        results = tuple(out or (torch.empty_like(left, memory_format=torch.contiguous_format) for _ in range(2)))

        def run() -> None:
            events.append("run halves")
            torch.mul(left, scale, out=results[0])
            torch.mul(right, scale, out=results[1])

        return run, results

    def tally(total: Tensor, x: Tensor, out: Sequence[Tensor] | None = None) -> Prepared:
        events.append("prepare tally")
        return lambda: events.append("run tally") or total.add_(x.sum()) and None, ()  # type: ignore[func-returns-value]

    OPS.halves.default.prepare = halves
    OPS.tally.default.prepare = tally
    yield events
    del OPS.halves.default.prepare, OPS.tally.default.prepare


def _halves(x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    left, right = x.chunk(2, dim=-1)
    return left * scale, right * scale


def _tally(total: Tensor, x: Tensor) -> None:
    total.add_(x.sum())


LIBRARY.impl("halves", _halves, "CPU")
LIBRARY.impl("tally", _tally, "CPU")


def test_a_replay_makes_the_prepared_call_on_what_the_tensors_hold_now(prepared: list[str]) -> None:
    x = torch.arange(8.0).view(2, 4)
    graph = CpuGraph.capture(lambda: [half + 1 for half in OPS.halves(x, 2.0)])
    assert [operation.kind for operation in graph.operations].count("prepared") == 1
    prepared.clear()
    for values in (torch.randn(2, 4), torch.randn(2, 4)):
        x.copy_(values)
        graph.replay()
        for result, expected in zip(graph.outputs, (values[:, :2] * 2 + 1, values[:, 2:] * 2 + 1), strict=True):
            assert torch.equal(result, expected)
    assert prepared == ["run halves"] * 2


def test_results_are_returned_in_memory_that_stays(prepared: list[str]) -> None:
    x = torch.randn(2, 4)
    graph = CpuGraph.capture(lambda: OPS.halves(x))
    addresses = [result.data_ptr() for result in graph.outputs]
    x.fill_(3)
    graph.replay()
    assert [result.data_ptr() for result in graph.outputs] == addresses
    assert all(bool((result == 3).all()) for result in graph.outputs)


def test_one_that_writes_an_argument_is_not_run_an_additional_time_to_try_it(prepared: list[str]) -> None:
    total, x = torch.zeros(()), torch.ones(3)
    graph = CpuGraph.capture(lambda: OPS.tally(total, x), warmup=0)
    assert total.item() == 3
    graph.replay()
    assert total.item() == 6
    assert prepared.count("run tally") == 1


def test_one_that_computes_something_else_is_not_used(prepared: list[str]) -> None:
    def wrong(x: Tensor, scale: float = 1.0, out: Sequence[Tensor] | None = None) -> Prepared:
        results = tuple(out or ())
        return lambda: [result.fill_(7.0) for result in results] and None, results  # type: ignore[func-returns-value]

    OPS.halves.default.prepare = wrong
    x = torch.randn(2, 4)
    graph = CpuGraph.capture(lambda: OPS.halves(x))
    assert "prepared" not in [operation.kind for operation in graph.operations]
    graph.replay()
    assert torch.equal(graph.outputs[0], x[:, :2])


def test_it_is_prepared_anew_when_its_intermediates_move(prepared: list[str]) -> None:
    x = torch.randn(2, 4)
    small = CpuGraph.capture(lambda: [half + 1 for half in OPS.halves(x)])
    prepared.clear()
    large = torch.randn(100, 100)
    CpuGraph.capture(lambda: (large + 1).sum(), pool=small.pool)
    assert "prepare halves" in prepared
    x.fill_(1)
    small.replay()
    assert all(bool((result == 2).all()) for result in small.outputs)
