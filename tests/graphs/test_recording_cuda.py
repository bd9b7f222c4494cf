"""Recordings of CUDA graphs: read, audited and verified on a GPU, with the same faults seeded as on the CPU."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mainspring.graphs import (
    CaptureError,
    CudaGraph,
    FixedBuffers,
    GraphRunner,
    Input,
    Ladder,
    Recording,
    StaleAddressError,
    VerificationError,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def bindings() -> None:
    pytest.importorskip("cuda.bindings")


def make(fn: Callable[..., Any], buffers: FixedBuffers | None = None, **options: Any) -> GraphRunner:
    options.setdefault("ladder", Ladder([1, 4]))
    inputs = {"x": Input((64,), torch.float32)}
    return GraphRunner(fn, inputs=inputs, device="cuda", buffers=buffers, progress=False, **options)


def mlp() -> tuple[nn.Module, FixedBuffers]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda().eval()
    buffers = FixedBuffers("cuda")
    for prefix, layer in module.named_modules():
        for name, _ in layer.named_parameters(recurse=False):
            buffers.adopt(f"{prefix}.{name}", lambda layer=layer, name=name: getattr(layer, name))
    return module, buffers


def test_kernels_their_launch_and_their_addresses_are_read() -> None:
    module, buffers = mlp()
    runner = make(lambda x: module(x), buffers)
    runner.capture()
    recording = runner.recording()
    for rung in recording.rungs:
        kernels = [operation for operation in rung.operations if operation.kind == "kernel"]
        assert len(kernels) >= 3
        for kernel in kernels:
            assert kernel.grid is not None and min(kernel.grid) >= 1
            assert kernel.block is not None and min(kernel.block) >= 1
            assert kernel.parameters and kernel.name and "::" not in kernel.name
        owners = {entry.owner for entry in rung.addresses}
        assert owners >= {"0.weight", "0.bias", "2.weight", "2.bias", "step.input.x", "step.output", "graph pool"}
        assert not [entry for entry in rung.addresses if entry.typed and entry.kind in ("freed", "unknown")]
        assert [edge.operation for edge in rung.operations[1].dependencies] == [0]
    assert Recording.from_json(recording.to_json()) == recording
    report = runner.audit()
    assert report.ok, str(report)
    assert report.struct_addresses > 0


def test_copies_and_sets_of_memory_are_read() -> None:
    x, y = torch.zeros(64, device="cuda"), torch.ones(64, device="cuda")
    buffers = FixedBuffers("cuda")
    buffers.adopt("x", x)
    buffers.adopt("y", y)

    def fn() -> None:
        x.copy_(y)
        y.zero_()

    rung = Recording.of(CudaGraph.capture(fn), buffers).rungs[0]
    uses = {(use.owner, use.role) for operation in rung.operations for use in operation.uses}
    assert {"x", "y"} == {owner for owner, _ in uses}


def test_a_workspace_that_grows_after_capture_is_found() -> None:
    workspace = torch.zeros(64, device="cuda")
    runner = make(lambda x: x + workspace)
    runner.capture()
    assert runner.audit().ok
    workspace.resize_(1 << 22)
    findings = runner.audit().findings
    assert ("moved", "unnamed tensor float32[64]") in [(finding.what, finding.owner) for finding in findings]


def test_a_weight_that_moved_is_found_by_its_name_with_its_kernel() -> None:
    module, buffers = mlp()
    runner = make(lambda x: module(x), buffers)
    runner.capture()
    old = module[0].weight  # type: ignore[index]
    module[0].weight = nn.Parameter(old.detach().clone())  # type: ignore[index]
    (finding,) = runner.audit().findings
    assert (finding.what, finding.owner) == ("moved", "0.weight")
    assert finding.uses and "operation" in finding.uses[0]
    assert f"{old.data_ptr():#x}" in finding.recorded


def test_a_graph_output_held_weakly_is_found() -> None:
    result = torch.zeros(4, 64, device="cuda")
    reference = weakref.ref(result)
    buffers = FixedBuffers("cuda")
    buffers.adopt("result", lambda: reference())

    def fn(x: Tensor) -> Tensor:
        held = reference()
        if held is not None:
            held[: x.shape[0]].copy_(x)
        return x + 1

    runner = make(fn, buffers)
    runner.capture()
    assert runner.audit().ok
    del result
    gc.collect()
    assert ("freed", "result") in [(finding.what, finding.owner) for finding in runner.audit().findings]


def test_a_tensor_that_was_freed_and_its_memory_given_to_another_is_found() -> None:
    state = SimpleNamespace(table=torch.randn(1 << 20, device="cuda"))
    address = state.table.data_ptr()
    runner = make(lambda x: x * state.table[:64])
    runner.capture()
    assert runner.audit().ok
    state.table = None
    gc.collect()
    found = [(finding.what, finding.owner) for finding in runner.audit().findings]
    assert ("freed", "unnamed tensor float32[1048576]") in found
    other = torch.zeros(1 << 20, device="cuda")
    found = [(finding.what, finding.owner) for finding in runner.audit().findings]
    assert ("freed", "unnamed tensor float32[1048576]") in found, (other.data_ptr() == address, found)


def test_an_input_with_another_stride_stops_the_step() -> None:
    runner = make(lambda x: x + 1)
    runner(x=torch.zeros(2, 64))
    runner.buffers["step.input.x"].as_strided_((4, 64), (1, 4))
    with pytest.raises(StaleAddressError, match=r"stride \[64, 1\].*stride \[1, 4\]"):
        runner(x=torch.zeros(2, 64))


def reads_a_value(x: Tensor) -> Tensor:
    return x * x.max().item()


def waits(x: Tensor) -> Tensor:
    y = x + 1
    torch.cuda.synchronize()
    return y


SIDE: list[torch.cuda.Stream] = []


def never_joins(x: Tensor) -> Tensor:
    SIDE[0].wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(SIDE[0]):
        y = x + 1
    return y


@pytest.mark.parametrize(
    ("fn", "source", "advice"),
    [
        (reads_a_value, "return x * x.max().item()", "keep values in tensors"),
        (waits, "torch.cuda.synchronize()", "keep values in tensors"),
        (never_joins, "with torch.cuda.stream(SIDE[0]):", "wait_stream(side)"),
    ],
)
def test_the_line_that_cannot_be_recorded_is_told_with_the_way_out(
    fn: Callable[[Tensor], Tensor], source: str, advice: str
) -> None:
    SIDE[:] = [torch.cuda.Stream()]  # type: ignore[no-untyped-call]
    x = torch.ones(4, 64, device="cuda")
    step = fn
    with pytest.raises(CaptureError) as caught:
        CudaGraph.capture(lambda: step(x) if torch.cuda.is_current_stream_capturing() else x + 1)
    message = str(caught.value)
    assert (
        f"test_recording_cuda.py:{message.split('test_recording_cuda.py:')[1].split()[0]} in {fn.__name__}" in message
    )
    assert f"(`{source}`)" in message and advice in message
    graph = CudaGraph.capture(lambda: x + 2)
    graph.replay()
    assert torch.equal(graph.outputs, x + 2)


def test_a_recording_that_does_something_else_is_found_and_its_operation_by_bisection() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.sin().exp()
        y = y * (3 if torch.cuda.is_current_stream_capturing() else 2)
        return (y + 1).cos()

    runner = make(fn, verify=False)
    runner.capture()
    with pytest.raises(VerificationError, match=r"'step\.output' differs.*runner\.bisect"):
        runner.verify()
    found = runner.bisect(4)
    assert found is not None and (found.index, found.name) == (2, "aten::mul")
    sound = make(lambda x: x.sin(), verify=True)
    sound.capture()
    assert sound.counters.verified == 2


def test_what_recording_took_is_accounted_for() -> None:
    module, buffers = mlp()
    runner = make(lambda x: module(x), buffers, ladder=Ladder([1, 64]))
    reports = runner.capture()
    assert all(report.operations >= 3 and report.seconds > 0 and report.executable_bytes >= 0 for report in reports)
    rung = runner.recording().rung(64)
    assert rung.pool_bytes == reports[0].pool_bytes_added and rung.executable_bytes == reports[0].executable_bytes


def test_destroying_one_graph_leaves_the_others_of_its_pool_right() -> None:
    """pytorch#193402: a cuBLAS workspace shared by graphs went with the first of them."""
    module, buffers = mlp()
    runner = make(lambda x: module(x), buffers)
    runner.capture()
    runner.graphs.pop(4).release()
    torch.cuda.empty_cache()
    x = torch.randn(1, 64)
    with torch.no_grad():
        assert torch.allclose(runner(x=x), module(x.cuda()), atol=1e-5)
    assert runner.audit().ok
    assert runner.verify() == [1]


def test_a_capture_on_a_device_that_is_not_the_current_one() -> None:
    """pytorch#87794."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    layer = nn.Linear(64, 64).to("cuda:1").eval()
    inputs = {"x": Input((64,), torch.float32)}
    runner = GraphRunner(lambda x: layer(x), inputs=inputs, ladder=Ladder([2]), device="cuda:1", progress=False)
    x = torch.randn(2, 64)
    with torch.no_grad(), torch.cuda.device(0):
        assert torch.allclose(runner(x=x), layer(x.to("cuda:1")), atol=1e-5)
    assert runner.audit().ok
