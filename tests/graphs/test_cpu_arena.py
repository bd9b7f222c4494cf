"""Intermediates share one arena by lifetime, and growing it keeps earlier graphs valid."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from mainspring.graphs import CpuGraph, GraphPool, GraphRunner, Input, Ladder
from mainspring.graphs.cpu_program import ALIGNMENT, Storage, lay_out

STORAGES = st.lists(
    st.tuples(st.integers(0, 500), st.integers(0, 20), st.integers(0, 8)).map(
        lambda t: Storage(t[0], t[1], t[1] + t[2])
    ),
    max_size=40,
)


@given(STORAGES)
def test_storages_that_live_together_never_overlap_and_all_are_aligned(storages: list[Storage]) -> None:
    offsets, total = lay_out(storages)
    placed = [(s, at) for s, at in zip(storages, offsets, strict=True) if s.nbytes]
    for number, (a, start) in enumerate(placed):
        assert start % ALIGNMENT == 0
        assert start + a.nbytes <= total
        for b, other in placed[:number]:
            if a.first <= b.last and b.first <= a.last:
                assert start + a.nbytes <= other or other + b.nbytes <= start
    assert total <= sum(-(-s.nbytes // ALIGNMENT) * ALIGNMENT for s, _ in placed)


def test_a_chain_of_operations_needs_room_for_two_links() -> None:
    storages = [Storage(640, at, at + 1) for at in range(50)]
    assert lay_out(storages)[1] == 2 * 640


def chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(10):
        x = torch.sin(x) * 2.0
    return x


def test_ten_rungs_take_no_more_than_the_top_rung() -> None:
    ladder = Ladder([1, 2, 3, 4, 6, 8, 12, 16, 24, 32])
    top = GraphRunner(chain, inputs={"x": Input((64,), torch.float32)}, ladder=Ladder([32]), device="cpu")
    top.capture()
    runner = GraphRunner(chain, inputs={"x": Input((64,), torch.float32)}, ladder=ladder, device="cpu")
    reports = runner.capture()
    assert [report.size for report in reports] == sorted(ladder.sizes, reverse=True)
    assert runner.pool.nbytes == top.pool.nbytes >= 2 * 32 * 64 * 4
    assert [report.pool_bytes_added for report in reports] == [runner.pool.nbytes] + [0] * 9
    assert sum(report.nbytes for report in reports) > 2 * runner.pool.nbytes


def test_graphs_recorded_before_the_arena_grew_still_replay() -> None:
    pool = GraphPool("cpu")
    inputs = [torch.randn(rows, 16) for rows in (2, 8, 64)]
    graphs = []
    for x in inputs:
        graphs.append(CpuGraph.capture(lambda x=x: chain(x), pool=pool))  # type: ignore[misc]
        assert pool.nbytes == graphs[-1].nbytes
    for x in inputs:
        x.normal_()
    for x, graph in zip(inputs, graphs, strict=True):
        graph.replay()
        assert torch.equal(graph.outputs, chain(x))
        arena = [use for op in graph.operations for use in op.tensors if use.owner == "pool"]
        assert arena
        assert all(use.address is not None and use.address % ALIGNMENT == 0 for use in arena)
    lowest = {
        min(use.address or 0 for op in graph.operations for use in op.tensors if use.owner == "pool")
        for graph in graphs
    }
    assert len(lowest) == 1  # all moved to the one block that is left


def test_outputs_lie_outside_the_arena_so_that_other_graphs_leave_them_alone() -> None:
    pool = GraphPool("cpu")
    x = torch.randn(4, 16)
    first = CpuGraph.capture(lambda: chain(x), pool=pool)
    second = CpuGraph.capture(lambda: chain(x + 1), pool=pool)
    first.replay()
    kept = first.outputs.clone()
    x.fill_(100)
    second.replay()
    assert torch.equal(first.outputs, kept)


def test_the_arena_goes_with_its_last_graph() -> None:
    pool = GraphPool("cpu")
    x = torch.randn(4, 16)
    graphs = [CpuGraph.capture(lambda: chain(x), pool=pool) for _ in range(2)]
    graphs[0].release()
    assert pool.nbytes > 0
    graphs[1].replay()
    graphs[1].release()
    assert pool.nbytes == 0
