"""A CPU recording does what the callable did, at the same addresses, or refuses to be made."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mainspring.graphs import CaptureError, CpuGraph, GraphError

LIBRARY = torch.library.Library("graphs_test", "DEF")
LIBRARY.define("put(Tensor(a!) cache, Tensor slots, Tensor value) -> ()")
LIBRARY.define("count_and_scale(Tensor(a!) counter, Tensor x) -> Tensor")
LIBRARY.define("product(Tensor x, Tensor w) -> Tensor")
LIBRARY.define("positive(Tensor x) -> Tensor")
LIBRARY.define("liar(Tensor x) -> Tensor")
LIBRARY.define("noisy(Tensor x) -> Tensor")
LIBRARY.define("through_numpy(Tensor x) -> Tensor")


def _put(cache: Tensor, slots: Tensor, value: Tensor) -> None:
    kept = slots >= 0
    cache[slots[kept]] = value[kept]


def _count_and_scale(counter: Tensor, x: Tensor) -> Tensor:
    counter += 1
    return x * counter


def _positive(x: Tensor) -> Tensor:
    return x[x > 0].clone()


def _liar(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


LIBRARY.impl("product", lambda x, w: (x @ w).float(), "CPU")
LIBRARY.impl("put", _put, "CPU")
LIBRARY.impl("count_and_scale", _count_and_scale, "CPU")
LIBRARY.impl("positive", _positive, "CPU")
LIBRARY.impl("liar", _liar, "CPU")
LIBRARY.impl("noisy", lambda x: x + torch.rand(3), "CPU")
LIBRARY.impl("through_numpy", lambda x: torch.from_numpy(x.numpy() * 2), "CPU")
OPS = torch.ops.graphs_test

W = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))


def heads(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*[x.view(4, 1, 2, 3)] * 3)


REPLAYABLE: dict[str, Callable[[Tensor], Any]] = {
    "matrix products": lambda x: F.relu(x @ W) @ W.t(),
    "cast and back": lambda x: x.to(torch.bfloat16).float() + 1,
    "cast of a view": lambda x: x[:, 1:4].to(torch.float64),
    "arange and scalar_tensor": lambda x: torch.where(x > 0, x, 0.5) + torch.arange(6),
    "literal": lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
    "attention": heads,
    "views of views": lambda x: x.t().reshape(2, 12).unsqueeze(1).expand(2, 3, 12).transpose(0, 2).contiguous(),
    "unsafe view": lambda x: torch.ops.aten._unsafe_view(x @ W, [2, 12]) + 1,
    "split and cat": lambda x: torch.cat(list(reversed(x.split([1, 2, 3], dim=1))), dim=1),
    "several results": lambda x: tuple(x.topk(2, dim=1)),
    "sort": lambda x: x.sort(dim=1, descending=True),
    "layer norm": lambda x: F.layer_norm(x, (6,)),
    "integer indexing": lambda x: x[torch.tensor([3, 0, 0])],
    "masked write of one value": lambda x: x.clone().index_put_((x > 0,), torch.tensor(9.0)),
    "masked fill": lambda x: x.masked_fill(x > 0, -1.0),
    "in-place on an intermediate": lambda x: (x + 1).mul_(2).add_(x),
    "write through a view": lambda x: torch.zeros(4, 8).index_copy_(1, torch.arange(6), x),
    "zeros_like written": lambda x: torch.zeros_like(x).copy_(x[:, :1]),
    "literal written": lambda x: torch.tensor([0.0]).add_(x.sum()),
    "full written": lambda x: torch.full((4, 6), 2.0).mul_(x),
    "user out=": lambda x: torch.mm(x, W, out=torch.empty(4, 6)),
    "in-place transpose": lambda x: (x + 1).t_().mul(2),
    "in-place squeeze then use": lambda x: (x + 1).unsqueeze_(0).squeeze_(0).sum(0),
    "bits": lambda x: (x + 1).view(torch.int32).bitwise_and(255),
    "complex with conjugate": lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2) + 0).conj() * 2),
    "empty tensors": lambda x: torch.cat([x[:0] + 1, x]),
    "zero-dimensional": lambda x: x.sum() * 2,
    "dict of outputs": lambda x: {"a": x + 1, "b": (x * 2).t()},
    "view as output": lambda x: (x + 1)[1:],
    "input as output": lambda x: x,
    "custom operation": lambda x: OPS.through_numpy(x) + 1,
    "nan and signed zero": lambda x: torch.where(x > 0, x / 0 * 0, -0.0),
    "softmax and cumsum": lambda x: torch.softmax(x, -1).cumsum(-1),
    "dropout in eval": lambda x: F.dropout(x, 0.5, training=False) + 1,
}


def leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [leaf for item in (value.values() if isinstance(value, dict) else value) for leaf in leaves(item)]


def bits(value: Any) -> list[tuple[torch.dtype, tuple[int, ...], bytes]]:
    return [
        (t.dtype, tuple(t.shape), bytes(t.contiguous().flatten().view(torch.uint8).tolist())) for t in leaves(value)
    ]


@pytest.mark.parametrize("what", REPLAYABLE)
def test_replay_gives_the_bits_of_an_eager_run_on_new_contents(what: str) -> None:
    fn = REPLAYABLE[what]
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    graph = CpuGraph.capture(lambda: fn(x))
    for seed in (2, 3):
        x.copy_(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)))
        with torch.no_grad():
            expected = bits(fn(x))
        graph.replay()
        assert bits(graph.outputs) == expected


def test_replay_runs_none_of_the_callables_python() -> None:
    calls = []
    x = torch.ones(3)

    def fn() -> Tensor:
        calls.append(1)
        return x + 1

    graph = CpuGraph.capture(fn, warmup=2)
    assert len(calls) == 3
    graph.replay()
    assert len(calls) == 3


def test_state_outside_is_read_and_written_where_it_lies() -> None:
    counter, total, step = torch.zeros(()), torch.zeros(4), torch.ones(4)

    def fn() -> None:
        counter.add_(1)
        total.copy_(total + step * counter)

    graph = CpuGraph.capture(fn, warmup=0)
    assert counter.item() == 1
    for _ in range(3):
        graph.replay()
    assert counter.item() == 4
    assert total.tolist() == [10.0] * 4


def test_a_custom_operation_that_writes_is_run_again_on_the_same_tensors() -> None:
    cache, slots, value = torch.zeros(5), torch.tensor([0, -1, 3]), torch.tensor([1.0, 2.0, 3.0])
    graph = CpuGraph.capture(lambda: OPS.put(cache, slots, value * 10))
    cache.zero_()
    slots.copy_(torch.tensor([-1, 4, 1]))
    value.add_(1)
    graph.replay()
    assert cache.tolist() == [0.0, 40.0, 0.0, 0.0, 30.0]


def test_a_custom_operation_may_write_and_return_at_once() -> None:
    counter, x = torch.zeros(()), torch.ones(3)
    graph = CpuGraph.capture(lambda: OPS.count_and_scale(counter, x) + 0, warmup=0)
    graph.replay()
    assert graph.outputs.tolist() == [2.0] * 3
    graph.replay()
    assert graph.outputs.tolist() == [3.0] * 3


def test_a_custom_operation_whose_result_changes_shape_stops_the_replay() -> None:
    x = torch.tensor([1.0, -1.0, 2.0])
    graph = CpuGraph.capture(lambda: OPS.positive(x))
    assert graph.outputs.tolist() == [1.0, 2.0]
    graph.replay()
    x.fill_(1)
    with pytest.raises(GraphError, match=r"graphs_test::positive made shape \[3\]"):
        graph.replay()


SHARED = torch.ones(3)


def write_through_old_alias(x: Tensor) -> Tensor:
    doubled = x * 2
    ALIAS[0] += 1
    return doubled + SHARED


def write_after_last_use(x: Tensor) -> Tensor:
    result = x + SHARED
    ALIAS[0] += 1
    return result


ALIAS = SHARED.numpy()

REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "item": (lambda x: x * x.sum().item(), "item()"),
    "if on a tensor": (lambda x: x + 1 if x.sum() > 0 else x, "torch.where"),
    "int of a tensor": (lambda x: x[: int(x[0])], "item()"),
    "print": (lambda x: str(x), "recording"),
    "equal": (lambda x: torch.equal(x, x), "aten::equal"),
    "tolist": (lambda x: x.tolist(), r"tolist\(\)"),
    "numpy read": (lambda x: x + float(x.numpy().sum()), r"numpy\(\)"),
    "numpy write": (lambda x: (x + 1).numpy().fill(3), r"numpy\(\)"),
    "address taken": (lambda x: x.data_ptr(), r"data_ptr\(\)"),
    "write through an alias made before": (write_through_old_alias, "changed without an operation"),
    "write through an alias after the last use": (write_after_last_use, "the callable changed without"),
    "boolean index": (lambda x: x[x > 0], "shape depends on data"),
    "boolean index with several values": (
        lambda x: x.clone().index_put_((x > 0,), x[:2] * 1),
        "depends on data",
    ),
    "nonzero": (lambda x: x.nonzero(), "aten::nonzero"),
    "unique": (lambda x: x.unique(), "depends on data"),
    "masked_select": (lambda x: x.masked_select(x > 0), "masked_select"),
    "rand": (lambda x: x + torch.rand(3), "random generator"),
    "in-place random": (lambda x: torch.empty(3).normal_() + x, "random generator"),
    "dropout": (lambda x: F.dropout(x, 0.5, training=True), "random generator"),
    "multinomial": (lambda x: torch.multinomial(x.abs(), 1), "random generator"),
    "own generator": (lambda x: x + torch.rand(3, generator=torch.Generator()), "generator"),
    "random in a custom operation": (lambda x: OPS.noisy(x), "graphs_test::noisy draws"),
    "undeclared write": (lambda x: OPS.liar(x), "graphs_test::liar wrote"),
    "resized output": (lambda x: torch.add(x, x, out=torch.empty(0)), "resized"),
    "resize": (lambda x: (x + 1).resize_(500), "resized"),
    "packing": (lambda x: x.view(1, 3).to_mkldnn().to_dense(), "opaque"),
    "other device": (lambda x: x.to("meta"), "meta"),
    "own error": (lambda x: x @ torch.ones(4, 4), "mat1|size|shape"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_replayed_is_refused_with_its_line(what: str) -> None:
    fn, message = REFUSED[what]
    x = torch.tensor([1.0, -2.0, 3.0])
    with pytest.raises(CaptureError, match=message) as caught:
        CpuGraph.capture(lambda: fn(x), name="probe", watch=[x])
    assert "'probe'" in str(caught.value)
    graph = CpuGraph.capture(lambda: x * 2)  # the next capture works
    graph.replay()
    assert torch.equal(graph.outputs, x * 2)
    assert x.numpy().shape == (3,)  # and the tensor's methods are back


def test_the_error_names_the_line_of_user_code() -> None:
    x = torch.ones(3)

    def offending() -> Tensor:
        return x + x.max().item()

    with pytest.raises(CaptureError, match=r"test_cpu_graph\.py:\d+ in offending"):
        CpuGraph.capture(offending)


def test_an_exception_in_the_callable_is_the_cause() -> None:
    def fails() -> None:
        raise KeyError("weights")

    with pytest.raises(CaptureError, match="KeyError") as caught:
        CpuGraph.capture(fails)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_capture_that_fails_midway_leaves_the_collector_and_the_arena_as_they_were() -> None:
    x = torch.ones(3)
    good = CpuGraph.capture(lambda: (x + 1) * 2)
    before = good.pool.nbytes
    with pytest.raises(CaptureError):
        CpuGraph.capture(lambda: (x + 1).sum().item(), pool=good.pool, warmup=0)
    assert gc.isenabled()
    assert good.pool.nbytes == before
    good.replay()
    assert good.outputs.tolist() == [4.0] * 3


def test_the_collector_is_held_during_capture() -> None:
    states = []
    CpuGraph.capture(lambda: states.append(gc.isenabled()))
    assert states == [False, False]
    assert gc.isenabled()


def test_packed_weights_are_constants_that_the_address_book_calls_opaque() -> None:
    x, weight = torch.randn(4, 6), W.to_mkldnn()
    graph = CpuGraph.capture(lambda: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "") + 1)
    x.normal_()
    graph.replay()
    assert torch.equal(graph.outputs, torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "") + 1)
    opaque = [address for address in graph.addresses if address.owner == "opaque"]
    assert len(opaque) == 1
    assert opaque[0].address is None
    assert opaque[0].operations == (0,)


def test_operation_list_and_address_book_tell_what_is_read_and_written_where() -> None:
    x, y = torch.randn(4), torch.zeros(4)
    graph = CpuGraph.capture(lambda: y.copy_(torch.sin(x) * 2))
    operations = graph.operations
    assert [(op.index, op.name) for op in operations] == [
        (0, "aten::sin"),
        (1, "aten::mul"),
        (2, "aten::copy_"),
    ]
    assert [(use.role, use.address) for use in operations[0].tensors if use.owner is None] == [("read", x.data_ptr())]
    last = {use.role: use for use in operations[2].tensors}
    assert last["write"].address == y.data_ptr()
    assert last["read"].owner == "pool"
    assert operations[0].as_dict()["tensors"][0]["shape"] == (4,)
    users = {entry.address: entry.operations for entry in graph.addresses}
    assert users[x.data_ptr()] == (0,)
    assert users[y.data_ptr()] == (2,)
    assert graph.num_operations == 3


def test_views_cost_no_operation() -> None:
    x = torch.randn(2, 6)
    graph = CpuGraph.capture(lambda: x.view(3, 4).t().unsqueeze(0).expand(2, 4, 3)[1] + 1)
    assert [op.name for op in graph.operations] == ["aten::add"]


def test_inference_mode_and_autocast_around_capture_or_replay_change_nothing() -> None:
    x = torch.randn(4, 6)
    with torch.inference_mode():
        graph = CpuGraph.capture(lambda: heads(x @ W))
    expected = heads(x @ W)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        graph.replay()
    assert torch.equal(graph.outputs, expected)


def test_a_custom_operation_replays_without_the_callers_autocast() -> None:
    x = torch.randn(4, 6)
    graph = CpuGraph.capture(lambda: OPS.product(x, W))
    expected = OPS.product(x, W)
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.equal(OPS.product(x, W), expected)
        graph.replay()
    assert torch.equal(graph.outputs, expected)


def test_an_outside_tensor_is_used_with_the_shape_it_had_at_each_operation() -> None:
    y = torch.randn(2, 3)

    def fn() -> tuple[Tensor, Tensor]:
        first = y * 2
        y.t_()
        second = y * 2
        y.t_()
        return first, second

    graph = CpuGraph.capture(fn)
    y.normal_()
    graph.replay()
    assert torch.equal(graph.outputs[0], y * 2)
    assert torch.equal(graph.outputs[1], y.t() * 2)


def test_a_released_graph_says_so() -> None:
    x = torch.ones(2)
    graph = CpuGraph.capture(lambda: x + 1)
    graph.release()
    with pytest.raises(GraphError, match="released"):
        graph.replay()
    assert graph.operations == ()


def test_a_thousand_operations_replay_no_slower_than_eager_runs_them() -> None:
    x = torch.randn(64)

    def fn() -> Tensor:
        y = x
        for _ in range(500):
            y = torch.sin(y.view(8, 8)).view(64) + 1
        return y

    def best(run: Callable[[], object]) -> float:
        times = []
        for _ in range(15):
            start = time.thread_time()  # other programs do not lengthen it
            run()
            times.append(time.thread_time() - start)
        return min(times)

    graph = CpuGraph.capture(fn)
    assert graph.num_operations == 1000
    with torch.no_grad():
        eager = best(fn)
    assert best(graph.replay) < 1.3 * eager
