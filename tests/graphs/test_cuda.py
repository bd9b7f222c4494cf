"""The same rules on a GPU, where the recording is a CUDA graph."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mainspring.graphs import (
    CaptureError,
    CudaGraph,
    GraphPool,
    GraphRunner,
    Input,
    Ladder,
    Staging,
    StaleAddressError,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LADDER = Ladder([1, 2, 4, 8])


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda().eval()


def make(fn: Any, **options: Any) -> GraphRunner:
    inputs = options.pop("inputs", {"x": Input((64,), torch.float32)})
    ladder = options.pop("ladder", LADDER)
    return GraphRunner(fn, inputs=inputs, ladder=ladder, device="cuda", progress=False, **options)


def test_a_graph_replays_on_new_contents_and_its_output_is_held() -> None:
    x = torch.randn(4, 64, device="cuda")
    pool = GraphPool("cuda")
    graph = CudaGraph.capture(lambda: (x * 2).sin(), pool=pool)
    other = CudaGraph.capture(lambda: (x + 1).cos().exp(), pool=pool)
    x.normal_()
    graph.replay()
    kept = graph.outputs.clone()
    other.replay()
    torch.cuda.synchronize()
    assert torch.equal(graph.outputs, (x * 2).sin())
    assert torch.equal(graph.outputs, kept)
    assert graph.raw != 0
    assert pool.nbytes > 0


def test_every_rung_replays_the_bits_of_eager() -> None:
    module = mlp()
    graph, eager = make(lambda x: module(x)), make(lambda x: module(x), enforce_eager=True)
    reports = graph.capture()
    assert [report.size for report in reports] == [8, 4, 2, 1]
    for rows in (1, 2, 3, 4, 5, 8, 21):
        x = torch.randn(rows, 64)
        assert torch.equal(graph(x=x), eager(x=x))
        assert torch.equal(graph(x=x.cuda()), eager(x=x))
    assert not graph.counters.eager_steps


def test_rows_are_padded_and_state_is_reached_by_closure() -> None:
    count = torch.zeros(11, dtype=torch.int64, device="cuda")

    def step(rows: Tensor) -> None:
        real = rows >= 0
        count.index_add_(0, torch.where(real, rows, 10), real.long())

    runner = make(step, inputs={"rows": Input((), torch.int32, pad=-1)})
    runner.capture()
    assert count.tolist() == [0] * 11
    for rows in ([3, 1, 7], [3, 1, 7], [3], [0, 1, 2, 3, 4, 5, 6, 7, 8]):
        runner(rows=rows)
    assert count.tolist() == [1, 3, 1, 4, 1, 1, 1, 3, 1, 0, 0]
    assert runner.counters.uploads_skipped == 1


def test_ten_rungs_share_the_pool_of_the_top_rung() -> None:
    def chain(x: Tensor) -> Tensor:
        for _ in range(10):
            x = x.sin() * 2
        return x

    inputs = {"x": Input((1 << 18,), torch.float32)}
    top = make(chain, inputs=inputs, ladder=Ladder([64]))
    top.capture()
    ten = make(chain, inputs=inputs, ladder=Ladder([1, 2, 4, 8, 16, 24, 32, 40, 48, 64]))
    ten.capture()
    assert top.pool.nbytes <= ten.pool.nbytes <= 1.2 * top.pool.nbytes


@pytest.mark.parametrize("fault", ["python", "item", "synchronize", "random", "fresh stream"])
def test_a_capture_that_fails_midway_leaves_the_next_one_working(fault: str) -> None:
    broken = True
    x = torch.ones(4, 64, device="cuda")
    pool = GraphPool("cuda")

    def fn() -> Tensor:
        y = x * 2
        if broken and torch.cuda.is_current_stream_capturing():
            if fault == "python":
                raise KeyError("half way")
            if fault == "item":
                y = y + y.sum().item()
            if fault == "synchronize":
                torch.cuda.synchronize()
            if fault == "fresh stream":
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    y = y + 1  # never joined
        if broken and fault == "random":
            y = y + torch.rand(64, device="cuda")
        return y.sin()

    with pytest.raises(CaptureError):
        CudaGraph.capture(fn, pool=pool)
    assert gc.isenabled()
    broken = False
    graph = CudaGraph.capture(fn, pool=pool)
    x.fill_(3)
    graph.replay()
    assert torch.equal(graph.outputs, (x * 2).sin())


def test_a_moved_input_stops_the_step() -> None:
    runner = make(lambda x: x + 1)
    runner(x=torch.zeros(2, 64))
    runner.buffers["step.input.x"].set_(torch.zeros(8, 64, device="cuda"))
    with pytest.raises(StaleAddressError, match=r"step\.input\.x"):
        runner(x=torch.zeros(2, 64))


def test_uploads_behind_a_busy_device_all_arrive() -> None:
    staging = Staging("cuda", slot_bytes=1 << 20, depth=2)
    targets = [torch.zeros(1 << 17, dtype=torch.int64, device="cuda") for _ in range(8)]
    torch.cuda._sleep(200_000_000)
    for value, target in enumerate(targets):
        staging.upload(target, torch.full((1 << 17,), value))
    assert staging.waits > 0
    for value, target in enumerate(targets):
        assert bool((target == value).all())


def test_graphs_dropped_without_release_leave_the_pool_usable() -> None:
    module = mlp()
    runner = make(lambda x: module(x))
    runner.capture()
    handle = runner.pool.handle
    runner.graphs.clear()
    assert runner.pool.handle != handle
    x = torch.randn(3, 64)
    with torch.no_grad():
        assert torch.equal(runner(x=x), module(x.cuda()))


def test_a_released_runner_gives_its_pool_back() -> None:
    module = mlp()
    runner = make(lambda x: module(x))
    runner.capture()
    runner.release()
    torch.cuda.empty_cache()
    assert runner.pool.nbytes == 0
    x = torch.randn(3, 64)
    with torch.no_grad():
        assert runner(x=x).shape == module(x.cuda()).shape
