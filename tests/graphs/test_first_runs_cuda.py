"""Rungs captured on a GPU without a run before, and those that needed one after all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mainspring.graphs import GraphRunner, Input, Ladder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LADDER = Ladder([1, 2, 3, 8, 24, 64, 200, 512])


def make(fn: Any, **options: Any) -> GraphRunner:
    inputs = {"x": Input((192,), torch.float32)}
    return GraphRunner(fn, inputs=inputs, ladder=LADDER, device="cuda", progress=False, verify=False, **options)


def assert_each_rung_is_eager(runner: GraphRunner, fn: Any) -> None:
    eager = make(fn, enforce_eager=True, name="eager")
    for rows in LADDER:
        x = torch.randn(rows, 192)
        assert torch.equal(runner(x=x), eager(x=x)), rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_library_kernels_are_captured_on_their_first_run(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(192, 1024), nn.GELU(), nn.Linear(1024, 192, bias=False)).cuda().to(dtype)
    runs = []

    def fn(x: Tensor) -> Tensor:
        runs.append(len(x))
        return torch.softmax(layers(x.to(dtype)).float(), -1)

    runner = make(fn, warm_up="first")
    reports = runner.capture()
    assert [report.runs for report in reports] == [1] + [0] * (len(LADDER) - 1)
    assert len(runs) == len(LADDER) + 1
    assert_each_rung_is_eager(runner, fn)


def test_a_triton_kernel_of_another_kind_is_run_before_it_is_captured() -> None:
    triton = pytest.importorskip("triton")
    from triton_kernels_for_tests import scale_rows

    def fn(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        scale_rows[(x.shape[0],)](x, out, x.shape[1], ROWS=min(x.shape[0], 4), WIDTH=256)
        return out

    runner = make(fn, warm_up="first")
    before = triton.knobs.runtime.jit_cache_hook
    reports = {report.size: report.runs for report in runner.capture()}
    assert triton.knobs.runtime.jit_cache_hook is before
    assert reports == {512: 1, 200: 0, 64: 0, 24: 0, 8: 0, 3: 1, 2: 1, 1: 1}
    assert "scale_rows" in str(runner.graphs[3].discarded)  # type: ignore[union-attr]
    assert_each_rung_is_eager(runner, fn)
    again = make(fn, warm_up="first", name="again")
    assert [report.runs for report in again.capture()] == [1] + [0] * (len(LADDER) - 1)


def test_a_table_made_on_the_first_run_has_its_contents() -> None:
    tables: dict[int, Tensor] = {}

    def fn(x: Tensor) -> Tensor:
        if len(x) not in tables:
            tables[len(x)] = torch.arange(len(x), device="cuda").float()[:, None] + 1
        return x * tables[len(x)]

    runner = make(fn, warm_up="first")
    assert all(report.runs == 1 for report in runner.capture())
    torch.cuda.synchronize()
    for rows in LADDER:
        assert torch.equal(tables[rows].flatten().cpu(), torch.arange(rows) + 1.0)
    assert_each_rung_is_eager(runner, fn)


def test_a_value_read_on_the_first_run_only_is_no_fault() -> None:
    known: dict[int, float] = {}

    def fn(x: Tensor) -> Tensor:
        if len(x) not in known:
            known[len(x)] = float(torch.ones((), device="cuda").item())
        return x * known[len(x)]

    runner = make(fn, warm_up="first")
    assert all(report.runs == 1 for report in runner.capture())
    assert runner.pool.abandoned == set()
    assert_each_rung_is_eager(runner, fn)
