"""Which rungs are run before they are captured on a GPU, and what is done about those that should have been."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_capture import FakeGpu, fake_gpu, on_the_fake
from torch import Tensor

from mainspring.graphs import CaptureError, CudaGraph, GraphError, GraphPool, GraphRunner, Input, Ladder

LADDER = Ladder([1, 2, 4, 8])


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with fake_gpu() as device:
        yield device


class Step:
    """Notes each run's rows, and whether it was captured; `extra` is what else it does."""

    def __init__(self, gpu: FakeGpu, extra: Any = None) -> None:
        self.gpu = gpu
        self.extra = extra
        self.runs: list[tuple[int, str]] = []
        self.weight = torch.ones(2)

    def __call__(self, x: Tensor) -> Tensor:
        self.runs.append((len(x), "run" if self.gpu.capturing is None else "captured"))
        y = x * self.weight
        if self.extra is not None:
            self.extra(len(x), x)
        return y


def make(step: Step, warm_up: str = "first") -> GraphRunner:
    inputs = {"x": Input((2,), torch.float32)}
    return on_the_fake(step, inputs=inputs, ladder=LADDER, warm_up=warm_up)


def test_every_rung_is_run_once_before_it_is_captured(gpu: FakeGpu) -> None:
    step = Step(gpu)
    reports = make(step, "each").capture()
    assert step.runs == [(rung, how) for rung in (8, 4, 2, 1) for how in ("run", "captured")]
    assert [report.runs for report in reports] == [1, 1, 1, 1]


def test_only_the_first_rung_is_run_where_that_is_enough(gpu: FakeGpu) -> None:
    step = Step(gpu)
    reports = make(step).capture()
    assert step.runs == [(8, "run"), (8, "captured"), (4, "captured"), (2, "captured"), (1, "captured")]
    assert [report.runs for report in reports] == [1, 0, 0, 0]
    assert len(gpu.graphs) == 4


def test_after_a_release_the_first_rung_is_run_again(gpu: FakeGpu) -> None:
    step = Step(gpu)
    runner = make(step)
    runner.capture([2, 1])
    runner.release()
    step.runs.clear()
    runner.capture([4, 1])
    assert step.runs == [(4, "run"), (4, "captured"), (1, "captured")]


def test_a_rung_that_needs_a_kernel_not_loaded_yet_is_run_first(gpu: FakeGpu) -> None:
    step = Step(gpu, lambda rows, x: gpu.launch("even" if rows > 2 else "one" if rows == 1 else "two"))
    runner = make(step)
    reports = {report.size: report for report in runner.capture()}
    assert step.runs == [
        *[(8, "run"), (8, "captured"), (4, "captured")],
        *[(2, "captured"), (2, "run"), (2, "captured")],
        *[(1, "captured"), (1, "run"), (1, "captured")],
    ]
    assert [reports[size].runs for size in (8, 4, 2, 1)] == [1, 0, 1, 1]
    assert "the kernel two" in str(runner.graphs[2].discarded)  # type: ignore[union-attr]
    assert gpu.runtime.jit_cache_hook is None
    assert not gpu.is_broken


def test_a_hook_of_somebody_elses_is_put_back(gpu: FakeGpu) -> None:
    seen = []
    gpu.runtime.jit_cache_hook = hook = lambda **what: seen.append(what)
    make(Step(gpu, lambda rows, x: gpu.launch(f"of {rows}"))).capture()
    assert gpu.runtime.jit_cache_hook is hook
    assert len(seen) == 4  # once for each kernel that was compiled


def test_another_thread_may_load_kernels_meanwhile(gpu: FakeGpu) -> None:
    def elsewhere(rows: int, x: Tensor) -> None:
        if rows == 4:
            with ThreadPoolExecutor(1) as threads:
                threads.submit(gpu.runtime.jit_cache_hook, fn=None, is_manual_warmup=False).result()

    reports = make(Step(gpu, elsewhere)).capture([8, 4])
    assert [report.runs for report in reports] == [1, 0]


def test_a_kernel_compiled_but_not_loaded_is_noticed_too(gpu: FakeGpu) -> None:
    chain: list[Any] = []
    gpu.runtime.kernel_load_start_hook = SimpleNamespace(add=chain.append, remove=chain.remove)
    gpu.runtime.launch_enter_hook = []

    def loads(rows: int, x: Tensor) -> None:
        for hook in chain:
            hook(None, None, "gemv", None, "hash")

    reports = make(Step(gpu, loads)).capture([8, 4])
    assert [report.runs for report in reports] == [1, 1]
    assert not chain


def test_triton_that_does_not_tell_when_it_loads_means_a_run_for_each(gpu: FakeGpu) -> None:
    del gpu.runtime.jit_cache_hook  # an older version
    step = Step(gpu)
    make(step).capture()
    assert step.runs == [(rung, how) for rung in (8, 4, 2, 1) for how in ("run", "captured")]


def test_what_the_first_run_made_and_kept_is_computed_before_it_is_thrown_away(gpu: FakeGpu) -> None:
    tables: set[int] = set()

    def table(rows: int, x: Tensor) -> None:
        if rows == 2 and rows not in tables:
            tables.add(rows)
            gpu.keep()

    step = Step(gpu, table)
    make(step).capture()
    assert step.runs[3:6] == [(2, "captured"), (2, "run"), (2, "captured")]
    assert len(step.runs) == 7
    assert [graph.done for graph in gpu.graphs][2] == ["captured", "instantiated", "replayed", "reset"]


def test_a_capture_cut_short_by_a_kernel_is_replayed_as_far_as_it_came(gpu: FakeGpu) -> None:
    make(Step(gpu, lambda rows, x: gpu.launch(f"of {min(rows, 2)}"))).capture([2, 1])
    assert [graph.done for graph in gpu.graphs] == [
        ["captured", "instantiated"],
        ["captured", "instantiated", "replayed", "reset"],
        ["captured", "instantiated"],
    ]


def test_a_rung_that_fails_on_its_first_run_only_is_recorded_after_it(gpu: FakeGpu) -> None:
    def counters(rows: int, x: Tensor) -> None:
        if rows == 1 and (1, "run") not in step.runs:
            raise RuntimeError("recorded before it ever ran")

    step = Step(gpu, counters)
    runner = make(step)
    runner.capture()
    assert step.runs[-3:] == [(1, "captured"), (1, "run"), (1, "captured")]
    assert "before it ever ran" in str(runner.graphs[1].discarded)  # type: ignore[union-attr]


def test_a_rung_that_always_fails_is_told_with_its_line(gpu: FakeGpu) -> None:
    def fails(rows: int, x: Tensor) -> None:
        if rows == 1:
            raise KeyError("half way")

    runner = make(Step(gpu, fails))
    with pytest.raises(CaptureError, match=r"step\[1\].*test_first_runs.py.*half way"):
        runner.capture()
    assert sorted(runner.graphs) == [2, 4, 8]


def test_a_rung_that_draws_random_numbers_is_refused(gpu: FakeGpu) -> None:
    runner = make(Step(gpu, lambda rows, x: torch.rand(2) if rows == 1 else None))
    with pytest.raises(CaptureError, match="random generator"):
        runner.capture()


def test_after_a_capture_that_cuda_broke_each_rung_is_run(gpu: FakeGpu) -> None:
    def breaks(rows: int, x: Tensor) -> None:
        if rows == 4 and (4, "run") not in step.runs:
            gpu.is_broken = True

    step = Step(gpu, breaks)
    runner = make(step)
    handle = runner.pool.handle
    runner.capture()
    assert step.runs[2:5] == [(4, "captured"), (4, "run"), (4, "captured")]
    assert step.runs[5:] == [(2, "run"), (2, "captured"), (1, "run"), (1, "captured")]
    assert runner.pool.handle != handle


def test_what_a_broken_first_run_kept_is_refused_since_it_was_never_computed(gpu: FakeGpu) -> None:
    def breaks(rows: int, x: Tensor) -> None:
        if rows == 4:
            gpu.keep()
            gpu.is_broken = gpu.capturing is not None

    with pytest.raises(CaptureError, match="never computed"):
        make(Step(gpu, breaks)).capture()


def test_memory_from_outside_is_known_of_a_first_run(gpu: FakeGpu) -> None:
    count = torch.zeros(1)
    step = Step(gpu, lambda rows, x: count.add_(1))
    runner = make(step)
    runner.capture()
    for graph in runner.graphs.values():
        found = {outside.address: outside.written for outside in graph.outside}
        assert found[step.weight.data_ptr()] is False
        assert found[count.data_ptr()] is True


def test_an_input_that_a_first_run_writes_is_always_uploaded(gpu: FakeGpu) -> None:
    runner = make(Step(gpu, lambda rows, x: x.add_(0) if rows == 1 else None))
    runner.capture([8, 4])
    assert not runner._inputs["x"].always_upload
    runner.capture([1])
    assert runner._inputs["x"].always_upload


def test_garbage_is_collected_for_a_ladder_and_not_for_a_rung_that_is_needed_now(gpu: FakeGpu) -> None:
    collected = []

    def note(phase: str, what: dict[str, int]) -> None:
        if phase == "start" and what["generation"] == 2:
            collected.append(what)

    runner = make(Step(gpu))
    gc.callbacks.append(note)
    try:
        runner.capture([2])
        assert not collected
        runner.capture()
        assert len(collected) == 1
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled()


def test_one_graph_can_be_captured_without_a_run(gpu: FakeGpu) -> None:
    runs = []
    graph = CudaGraph.capture(lambda: runs.append(gpu.capturing), pool=GraphPool("cuda:0"), warmup=0)
    assert runs == [gpu.graphs[0]]
    assert graph.runs == 0
    assert graph.discarded is None


def test_a_warm_up_that_is_not_known_is_refused(gpu: FakeGpu) -> None:
    with pytest.raises(GraphError, match="'never'.*'each' or 'first'"):
        make(Step(gpu), "never")
