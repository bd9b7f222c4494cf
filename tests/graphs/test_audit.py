"""Faults of the kinds that break recorded graphs in the field, each seeded here and found by its name."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import SPLIT_K, FakeDriver, fake_graph, kernel, pointers, segment
from torch import Tensor, nn

from mainspring.graphs import CaptureError, FixedBuffers, GraphPool, GraphRunner, Input, Ladder, StaleAddressError
from mainspring.graphs import audit as audit_module
from mainspring.graphs import reading as reading_module
from mainspring.graphs.audit import Auditor


def make(fn: Callable[..., Any], buffers: FixedBuffers | None = None, **options: Any) -> GraphRunner:
    return GraphRunner(
        fn,
        inputs={"x": Input((4,), torch.float32)},
        ladder=options.pop("ladder", Ladder([1, 4])),
        device="cpu",
        buffers=buffers,
        **options,
    )


def only_finding(runner: GraphRunner) -> Any:
    (finding,) = runner.audit().findings
    return finding


def test_a_sound_runner_has_no_findings_and_is_audited_after_recording() -> None:
    layer = nn.Linear(4, 4)
    runner = make(lambda x: layer(x) + torch.tensor([1.0, 2.0, 3.0, 4.0]))
    runner.capture()
    report = runner.audit()
    assert report.ok and str(report).startswith("0 findings in 2 rungs")
    assert report.rungs == 2
    assert report.owners["tensor"] == 4  # weight and bias have no name here
    assert report.addresses > 8 and report.unresolved == 0
    assert runner.counters.audits == 1 and runner.counters.audit_findings == 0
    report.raise_findings()


def test_a_workspace_that_grows_after_capture_is_found() -> None:
    """vllm#55336, flashinfer#4553: the memory that graphs name is given back when the workspace grows."""
    workspace = torch.zeros(4)
    runner = make(lambda x: x + workspace)
    runner.capture()
    recorded = workspace.data_ptr()
    workspace.resize_(1 << 16)
    finding = only_finding(runner)
    assert finding.what == "moved"
    assert finding.owner == "unnamed tensor float32[4]"
    assert f"{recorded:#x}" in finding.recorded
    assert f"{workspace.data_ptr():#x}" in finding.current
    assert finding.rungs == (4, 1)
    assert "aten::add" in finding.uses[0]


def test_a_workspace_made_anew_in_the_middle_of_a_capture_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """flashinfer#4553: it lies in the graphs' memory from then on, and its old memory is given back."""
    monkeypatch.setenv("MAINSPRING_AUDIT", "0")
    state = SimpleNamespace(workspace=torch.zeros(4), runs=0)

    def fn(x: Tensor) -> Tensor:
        state.runs += 1
        if state.runs == 2:  # the recorded run
            state.workspace = torch.zeros(64)
        return x + state.workspace[:4]

    runner = make(fn, ladder=Ladder([4]), verify=False)
    runner.capture()
    finding = only_finding(runner)
    assert (finding.what, finding.owner) == ("escaped", "graph pool")
    assert "float32[64] made by operation 0 aten::zeros" in finding.recorded
    state.workspace = None
    sound = make(lambda x: x + torch.zeros(64)[:4], ladder=Ladder([4]))
    sound.capture()
    assert sound.audit().ok


def test_a_workspace_resized_in_the_middle_of_a_capture_is_refused() -> None:
    state = SimpleNamespace(workspace=torch.zeros(4), runs=0)

    def fn(x: Tensor) -> Tensor:
        state.runs += 1
        if state.runs == 2:
            state.workspace.resize_(1 << 16)
        return x + state.workspace[:4]

    with pytest.raises(CaptureError, match="resized or re-seated"):
        make(fn, ladder=Ladder([4])).capture()


def test_a_named_workspace_replaced_by_a_larger_one_is_found_by_its_name() -> None:
    state = SimpleNamespace(workspace=torch.zeros(4))
    buffers = FixedBuffers("cpu")
    buffers.adopt("workspace", lambda: state.workspace)
    runner = make(lambda x: x + state.workspace[:4], buffers)
    runner.capture()
    state.workspace = torch.zeros(64)
    finding = only_finding(runner)
    assert (finding.what, finding.owner) == ("moved", "workspace")
    assert any("operation 0 aten::add, parameter 1" in use for use in finding.uses)


def test_weights_moved_are_found_by_their_name_with_operation_and_parameter() -> None:
    """vllm#48941: weights reloaded to new addresses give wrong text and no error."""
    layer = nn.Linear(4, 4)
    buffers = FixedBuffers("cpu")
    for name in ("weight", "bias"):
        buffers.adopt(f"layer.{name}", lambda name=name: getattr(layer, name))
    runner = make(lambda x: layer(x), buffers)
    runner.capture()
    old = layer.weight
    layer.weight = nn.Parameter(torch.zeros(4, 4))
    finding = only_finding(runner)
    assert (finding.what, finding.owner, finding.address) == ("moved", "layer.weight", old.data_ptr())
    assert [use.partition(": ")[2] for use in finding.uses] == ["operation 0 aten::addmm, parameter 2"] * 2
    with pytest.raises(StaleAddressError, match=r"layer\.weight.*aten::addmm"):
        runner.audit().raise_findings()
    layer.weight = old
    assert runner.audit().ok


def test_a_packed_weight_replaced_by_another_is_found_by_its_name() -> None:
    state = SimpleNamespace(weight=torch.randn(4, 4).to_mkldnn())
    buffers = FixedBuffers("cpu")
    buffers.adopt("down_proj.weight", lambda: state.weight)
    runner = make(lambda x: torch.ops.mkldnn._linear_pointwise(x, state.weight, None, "none", [], ""), buffers)
    runner.capture()
    kept, state.weight = state.weight, torch.randn(4, 4).to_mkldnn()
    assert only_finding(runner).owner == "down_proj.weight"
    state.weight = kept
    assert runner.audit().ok


def test_a_graph_output_held_weakly_is_found() -> None:
    """TensorRT-LLM#17010: what a graph writes is held by nobody, and is overwritten."""
    result = torch.zeros(4, 4)
    reference = weakref.ref(result)
    buffers = FixedBuffers("cpu")
    buffers.adopt("result", lambda: reference())
    runner = make(lambda x: result_of(reference)[: x.shape[0]].copy_(x) + 1, buffers)
    runner.capture()
    assert runner.audit().ok
    del result
    gc.collect()
    finding = only_finding(runner)
    assert (finding.what, finding.owner) == ("freed", "result")
    assert "nobody holds it" in finding.current
    with pytest.raises(StaleAddressError, match="'result'.*keep it for as long as the graphs live"):
        runner.check()


def result_of(reference: weakref.ref[Tensor]) -> Tensor:
    tensor = reference()
    if tensor is None:
        raise RuntimeError("the result is gone")
    return tensor


def test_a_runners_own_outputs_are_held_by_its_buffers() -> None:
    runner = make(lambda x: x + 1)
    runner.capture()
    gc.collect()
    churn = [torch.zeros(4, 4) for _ in range(100)]
    out = runner(x=torch.ones(4, 4))
    assert out.data_ptr() == runner.buffers["step.output"].data_ptr()
    assert runner.audit().ok and len(churn) == 100


def test_a_tensor_that_everyone_else_let_go_of_is_found() -> None:
    state = SimpleNamespace(table=torch.randn(4))
    runner = make(lambda x: x * state.table)
    runner.capture()
    assert runner.audit().ok
    state.table = torch.randn(4)
    finding = only_finding(runner)
    assert (finding.what, finding.owner, finding.rungs) == ("freed", "unnamed tensor float32[4]", (4, 1))
    assert "only the recording holds it" in finding.current


@pytest.mark.parametrize("change", ["stride", "dtype", "shape"])
def test_an_input_with_another_layout_stops_the_step_and_both_are_named(change: str) -> None:
    runner = make(lambda x: x + 1)
    runner(x=torch.zeros(2, 4))
    buffer = runner.buffers["step.input.x"]
    if change == "stride":
        buffer.as_strided_((4, 4), (1, 4))
    elif change == "shape":
        buffer.unsqueeze_(0)
    else:
        buffer.data = buffer.view(torch.int32)
    said = {"stride": r"stride \[4, 1\].*stride \[1, 4\]", "shape": r"\[4, 4\].*\[1, 4, 4\]", "dtype": "float32.*int32"}
    with pytest.raises(StaleAddressError, match=said[change]):
        runner(x=torch.zeros(2, 4))
    finding = only_finding(runner)
    assert (finding.what, finding.owner) == ("moved", "step.input.x")


def test_before_a_replay_only_what_the_rung_uses_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAINSPRING_AUDIT", "1")
    small, large = torch.zeros(4), torch.zeros(4)
    buffers = FixedBuffers("cpu")
    state = {"small": small, "large": large}
    for name in state:
        buffers.adopt(name, lambda name=name: state[name])
    runner = make(lambda x: x + (state["small"] if x.shape[0] == 1 else state["large"]), buffers)
    runner.capture()
    state["small"] = torch.zeros(4)
    runner(x=torch.zeros(4, 4))
    with pytest.raises(StaleAddressError, match="'small'.*rung 1: operation 0 aten::add, parameter 1"):
        runner(x=torch.zeros(1, 4))


def test_before_a_replay_tensors_without_a_name_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAINSPRING_AUDIT", "1")
    state = SimpleNamespace(table=torch.randn(4))
    runner = make(lambda x: x * state.table)
    runner(x=torch.zeros(1, 4))
    state.table = None
    with pytest.raises(StaleAddressError, match=r"unnamed tensor float32\[4\].*let go.*aten::mul"):
        runner(x=torch.zeros(1, 4))


def test_what_is_wrong_from_the_start_is_told_after_recording(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fn(x: Tensor) -> Tensor:
        return x + torch.frombuffer(bytearray(16), dtype=torch.float32)  # its memory is gone after each run

    monkeypatch.setenv("MAINSPRING_AUDIT", "0")
    runner = make(fn)
    runner.capture()
    assert runner.counters.audit_findings == 2  # each rung has its own
    assert "audit of step" in caplog.text and "let go" in caplog.text
    monkeypatch.setenv("MAINSPRING_AUDIT", "1")
    with pytest.raises(StaleAddressError, match="let go"):
        make(fn).capture()


def test_a_buffer_that_was_removed_is_found() -> None:
    buffers = FixedBuffers("cpu")
    buffers.adopt("weight", torch.zeros(4))
    weight = buffers["weight"]
    runner = make(lambda x: x + weight, buffers)
    runner.capture()
    buffers.remove("weight")
    finding = only_finding(runner)
    assert (finding.what, finding.owner) == ("freed", "weight")


def test_findings_are_plain_data() -> None:
    state = SimpleNamespace(table=torch.randn(4))
    runner = make(lambda x: x * state.table)
    runner.capture()
    state.table = None
    (finding,) = runner.audit().as_dict()["findings"]
    assert finding["owner"] == "unnamed tensor float32[4]"


# On a GPU the allocator tells what is live; here it is told by hand.

BASE = 0x7F10_0000_0000
POOL_AT = BASE + 0x10_0000


class Device:
    """A runner whose only graph is one kernel with a pointer to `address`, on a device of plain data."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, address: int, segments: list[dict[str, Any]], symbol: str = "gemv"
    ) -> None:
        self.segments = segments
        self.name, self.device = "step", torch.device("cuda", 0)
        self.buffers, self.pool = FixedBuffers("cpu"), GraphPool("cuda")
        self.pool._handles.append((0, 3))
        node = kernel(symbol, pointers(address), pointers(POOL_AT))
        self.driver = FakeDriver({1: ([10], [])}, {10: ("kernel", node)})
        self.graphs: Any = {4: fake_graph(self.pool, 1)}
        for module in (reading_module,):
            monkeypatch.setattr(module, "cuda_driver", lambda: self.driver)
            monkeypatch.setattr(module, "snapshot", lambda device: self.segments)
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: self.segments)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        assert audit_module.cuda_spans is reading_module.cuda_spans


def pool_segment() -> dict[str, Any]:
    return segment(POOL_AT, (0x1000, "inactive"), pool=(0, 3))


def test_memory_freed_after_capture_is_found_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, BASE + 0x40, [segment(BASE, (0x1000, "active_allocated")), pool_segment()])
    auditor = Auditor(device)
    auditor.take([4])
    assert auditor.audit().ok
    device.segments = [segment(BASE, (0x1000, "inactive")), pool_segment()]
    (finding,) = auditor.audit().findings
    assert (finding.what, finding.owner, finding.address) == ("freed", "torch workspace", BASE + 0x40)
    assert finding.uses == ("rung 4: operation 0 gemv, parameter 0",)
    device.segments = [pool_segment()]
    assert [finding.what for finding in auditor.audit().findings] == ["freed"]


def test_a_word_within_a_struct_that_pointed_into_some_workspace_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, BASE, [segment(BASE, (0x1000, "active_allocated")), pool_segment()])
    device.driver.held[10] = ("kernel", kernel("aten", pointers(BASE + 0x40, 3), pointers(POOL_AT)))
    auditor = Auditor(device)
    auditor.take([4])
    assert auditor.audit().struct_addresses == 1
    device.segments = [segment(BASE, (0x1000, "inactive")), pool_segment()]
    assert auditor.audit().ok


def test_a_pool_given_back_under_its_graphs_is_found_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch#193402: destroying one graph took memory that others still used."""
    device = Device(monkeypatch, BASE, [segment(BASE, (0x1000, "active_allocated")), pool_segment()])
    auditor = Auditor(device)
    auditor.take([4])
    device.segments = [segment(BASE, (0x1000, "active_allocated"))]
    (finding,) = auditor.audit().findings
    assert (finding.what, finding.owner) == ("freed", "graph pool")


def test_a_pointer_into_freed_memory_is_found_right_after_capture_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    auditor = Auditor(Device(monkeypatch, BASE, [segment(BASE, (0x1000, "inactive")), pool_segment()]))
    (finding,) = auditor.audit().findings
    assert (finding.what, finding.owner) == ("freed", "freed memory")


def test_a_pointer_into_nothing_known_is_found_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    auditor = Auditor(Device(monkeypatch, BASE + 0x9000_0000, [pool_segment()], "_Z4fillPfS_"))
    (finding,) = auditor.audit().findings
    assert (finding.what, finding.owner, finding.address) == ("unknown", "unknown", BASE + 0x9000_0000)
    assert finding.uses == ("rung 4: operation 0 fill, parameter 0",)


def test_what_a_librarys_kernel_was_left_with_is_counted_and_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, BASE + 0x50_422C_F7A0, [pool_segment()], "sgemm_largek_lds64")
    report = Auditor(device).audit()
    assert report.ok
    assert (report.addresses, report.struct_addresses, report.unresolved) == (1, 0, 1)


def test_memory_freed_after_capture_that_cublas_reads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, BASE, [segment(BASE, (0x1000, "active_allocated")), pool_segment()])
    node = kernel(SPLIT_K, pointers(1, 2, 3, 4), pointers(BASE + 0x40), *(pointers(0) for _ in range(11)))
    device.driver.held[10] = ("kernel", node)
    auditor = Auditor(device)
    auditor.take([4])
    assert auditor.audit().ok
    device.segments = [pool_segment()]  # given back to the driver, which does not know it any more
    (finding,) = auditor.audit().findings
    assert (finding.what, finding.address) == ("freed", BASE + 0x40)
    assert finding.uses == ("rung 4: operation 0 splitKreduce_kernel<32, 16, int>, parameter 1",)


def test_a_moved_weight_that_cublas_reads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(16)
    state = SimpleNamespace(weight=weight)
    device = Device(monkeypatch, weight.data_ptr(), [pool_segment()], "nvjet_tst_64x8_64x16_4x1_v_bz_TNT")
    device.buffers.adopt("layer.weight", lambda: state.weight)
    auditor = Auditor(device)
    auditor.take([4])
    assert auditor.audit().ok
    state.weight = torch.zeros(16)
    (finding,) = auditor.audit().findings
    assert (finding.what, finding.owner) == ("moved", "layer.weight")
    assert finding.uses == ("rung 4: operation 0 nvjet_tst_64x8_64x16_4x1_v_bz_TNT, parameter 0",)


def test_rungs_are_read_again_once_however_much_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, BASE, [segment(BASE, *[(0x1000, "active_allocated")] * 8), pool_segment()])
    values = [pointers(BASE + 0x1000 * at) for at in range(8)]
    device.driver.graphs = {1: ([10], []), 2: ([11], [])}
    device.driver.held = {node: ("kernel", kernel("gemv", *values)) for node in (10, 11)}
    device.graphs[8] = fake_graph(device.pool, 2)
    auditor = Auditor(device)
    auditor.take([4, 8])
    device.segments = [pool_segment()]
    read: list[int] = []
    nodes = device.driver.nodes
    monkeypatch.setattr(device.driver, "nodes", lambda graph: (read.append(graph), nodes(graph))[1])
    assert auditor.audit([4]).ok is False and read == [1]
    read.clear()
    (finding,) = auditor.audit().findings
    assert len(finding.uses) == 16 and finding.rungs == (4, 8)
    assert sorted(read) == [1, 2]


def test_a_rung_recorded_later_counts_among_who_holds_a_tensor() -> None:
    """Both hold the table then; once everyone else has let go of it, both must be told."""
    state = SimpleNamespace(table=torch.zeros(4))
    runner = make(lambda x: x + state.table)
    runner.capture([4])
    assert runner.audit().ok
    runner.capture([1])
    assert runner.audit().ok
    state.table = None
    (finding,) = runner.audit().findings
    assert (finding.what, sorted(finding.rungs)) == ("freed", [1, 4])


def test_a_named_buffer_that_moved_is_found_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(16)
    state = SimpleNamespace(weight=weight)
    device = Device(monkeypatch, weight.data_ptr(), [pool_segment()])
    device.buffers.adopt("layer.weight", lambda: state.weight)
    auditor = Auditor(device)
    auditor.take([4])
    assert auditor.audit().owners == {"buffer": 1, "pool": 1}
    state.weight = torch.zeros(16)
    (finding,) = auditor.audit().findings
    assert (finding.what, finding.owner) == ("moved", "layer.weight")
    with pytest.raises(StaleAddressError, match=r"layer\.weight.*gemv"):
        auditor.check(4)


def test_a_tensor_whose_memory_was_given_to_another_is_found_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block is live again, as another tensor: the allocator sees nothing, the lost tensor does."""
    from mainspring.graphs.outside import OutsideTensor

    table = torch.zeros(16)
    device = Device(monkeypatch, BASE, [segment(BASE, (0x1000, "active_allocated")), pool_segment()])
    outside = OutsideTensor.of(table, "aten::mul")
    outside.address, outside.nbytes = BASE, 0x1000
    monkeypatch.setattr(OutsideTensor, "change", lambda self, held=None: ("freed", "given back") if gone else None)
    gone = False
    device.graphs[4].outside = (outside,)
    auditor = Auditor(device)
    auditor.take([4])
    assert auditor.audit().owners == {"tensor": 1, "pool": 1}
    gone = True
    (finding,) = auditor.audit().findings
    assert (finding.what, finding.owner) == ("freed", "unnamed tensor float32[16]")


def test_what_a_run_takes_from_outside_is_observed_without_being_held() -> None:
    from mainspring.graphs.outside import OutsideObserver

    table, made = torch.randn(4), []
    with OutsideObserver() as observer:
        made.append((table * 2).sin())
    (outside,) = observer.found()
    assert (outside.text, outside.operation, outside.address) == ("float32[4]", "aten.mul.Tensor", table.data_ptr())
    assert outside.change() is None
    table.resize_(1 << 16)
    assert outside.change() == ("moved", f"address {table.data_ptr():#x}, {4 << 16} bytes")
    del table
    change = outside.change()
    assert change is not None and change[0] == "freed"
    assert observer.found() == []
