"""A recording tells every operation and every address with its owner, and survives JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from mainspring.graphs import CpuGraph, FixedBuffers, GraphError, GraphPool, GraphRunner, Input, Ladder, Recording, Span
from mainspring.graphs.spans import SpanMap


def make_runner() -> tuple[GraphRunner, nn.Module]:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    buffers = FixedBuffers("cpu")
    buffers.adopt("layer.weight", lambda: layer.weight)
    buffers.adopt("layer.bias", lambda: layer.bias)

    def fn(x: Tensor) -> Tensor:
        return layer(x).relu() + torch.tensor([1.0, 2.0, 3.0, 4.0])

    runner = GraphRunner(
        fn, inputs={"x": Input((4,), torch.float32)}, ladder=Ladder([1, 4]), device="cpu", buffers=buffers
    )
    runner.capture()
    return runner, layer


def test_every_operation_is_listed_with_what_it_reads_and_writes() -> None:
    runner, layer = make_runner()
    rung = runner.recording().rung(4)
    assert [operation.name for operation in rung.operations] == [
        "aten::addmm",
        "aten::relu",
        "aten::lift_fresh",
        "aten::add",
        "aten::copy_",
    ]
    assert [operation.index for operation in rung.operations] == list(range(5))
    first = {use.owner: use for use in rung.operations[0].uses}
    assert first["layer.weight"].address == layer.weight.data_ptr()
    assert first["layer.weight"].role == "read"
    assert first["layer.weight"].nbytes == 64
    assert first["step.input.x"].text == "float32[4, 4]"
    assert first["graph pool"].role == "write"
    assert [[edge.operation for edge in operation.dependencies] for operation in rung.operations] == [
        [],
        [0],
        [],
        [1, 2],
        [3],
    ]


def test_every_address_has_its_owner_and_the_operations_that_use_it() -> None:
    runner, layer = make_runner()
    recording = runner.recording()
    for rung in recording.rungs:
        book = {entry.address: entry for entry in rung.addresses}
        weight = book[layer.weight.data_ptr()]
        assert (weight.owner, weight.kind, weight.offset, weight.operations) == ("layer.weight", "buffer", 0, (0,))
        assert book[runner.buffers["step.output"].data_ptr()].operations == (4,)
        assert {entry.kind for entry in rung.addresses} == {"buffer", "pool", "constant"}
        for entry in rung.addresses:
            if entry.kind == "pool":
                assert entry.address is not None and entry.offset is not None
                assert entry.address - entry.offset == runner.pool.arena.extent[0]
                assert 0 <= entry.offset < runner.pool.nbytes
    assert recording.totals == {"pool": runner.pool.nbytes, "buffers": runner.buffers.nbytes}
    assert {span.owner for span in recording.memory} >= {"layer.weight", "graph pool", "step.input.x"}


def test_an_address_inside_a_buffer_has_its_offset() -> None:
    cache = torch.zeros(8, 16)
    buffers = FixedBuffers("cpu")
    buffers.adopt("kv_cache", cache)
    graph = CpuGraph.capture(lambda: cache[3].add_(1))
    (entry,) = Recording.of(graph, buffers).rungs[0].addresses
    assert (entry.owner, entry.offset, entry.address) == ("kv_cache", 3 * 64, cache.data_ptr() + 3 * 64)


def test_a_graph_of_its_own_tells_tensors_without_a_name_and_results() -> None:
    x = torch.ones(4)
    graph = CpuGraph.capture(lambda: (x * 2).sin())
    kinds = {entry.kind: entry for entry in Recording.of(graph).rungs[0].addresses}
    assert set(kinds) == {"tensor", "pool", "output"}
    assert kinds["tensor"].owner == "unnamed tensor float32[4]"
    assert kinds["output"].address == graph.outputs.data_ptr()


def test_packed_weights_are_opaque_and_have_their_names() -> None:
    x, packed, other = torch.randn(4, 6), torch.randn(6, 6).to_mkldnn(), torch.randn(6, 6).to_mkldnn()
    buffers = FixedBuffers("cpu")
    buffers.adopt("down.weight", packed)

    def fn() -> Tensor:
        y = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise(y, other, None, "none", [], "")

    rung = Recording.of(CpuGraph.capture(fn), buffers).rungs[0]
    opaque = {entry.owner: entry.operations for entry in rung.addresses if entry.kind == "opaque"}
    assert opaque == {"down.weight": (0,), "packed tensor float32[6, 6]": (1,)}
    assert all(entry.address is None for entry in rung.addresses if entry.kind == "opaque")


def test_a_recording_survives_json_and_outlives_its_graphs(tmp_path: Path) -> None:
    runner, _ = make_runner()
    recording = runner.recording()
    runner.release()
    assert Recording.from_json(recording.to_json(indent=1)) == recording
    recording.save(tmp_path / "recording.json")
    assert Recording.load(tmp_path / "recording.json") == recording
    data = json.loads(recording.to_json())
    assert data["schema"] == 1
    assert set(data["rungs"][0]) >= {"size", "operations", "addresses", "pool_bytes", "capture_seconds"}
    assert set(data["rungs"][0]["addresses"][0]) >= {"address", "owner", "offset", "operations"}
    assert runner.recording().rungs == ()


def test_the_short_form_of_a_rung_is_read_and_unknown_keys_are_passed_over() -> None:
    operation = {"index": 0, "kind": "kernel", "name": "k", "later": 1}
    address = {"address": 64, "owner": "w", "offset": 0, "operations": [0]}
    rung = {"size": 2, "operations": [operation], "addresses": [address], "pool_bytes": 1, "capture_seconds": 0.5}
    recording = Recording.from_dict({"rungs": [rung]})
    assert recording.rung(2).operations[0].name == "k"
    assert recording.rung(2).addresses[0].operations == (0,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "it is a list"),
        ('{"schema": 99, "rungs": []}', "99"),
        ('{"schema": true, "rungs": []}', "True"),
        ('{"schema": 0, "rungs": []}', "schema 0"),
        ('{"rungs": [{}]}', "no recording"),
        ('{"rungs": {"a": 1}}', "no recording"),
        ('{"rungs": [], "name": null}', "Recording.name is None"),
    ],
)
def test_what_is_no_recording_is_refused(text: str, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        Recording.from_json(text)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"size": "x"}, "RungRecording.size is 'x'"),
        ({"size": True}, "RungRecording.size is True"),
        ({"pool_bytes": None}, "RungRecording.pool_bytes is None"),
        ({"capture_seconds": []}, "RungRecording.capture_seconds"),
        ({"operations": [{"index": 0, "kind": "kernel", "name": "k", "grid": [1, 1]}]}, "RecordedOperation.grid"),
        ({"operations": [{"index": 0, "kind": "kernel", "name": "k", "uses": [3]}]}, "3 stands where a Use must"),
        ({"addresses": [{"address": 1, "owner": None, "offset": 0, "operations": []}]}, "AddressEntry.owner is None"),
        ({"addresses": [{"address": 1, "owner": "w", "offset": 0, "operations": ["a"]}]}, "AddressEntry.operations"),
    ],
)
def test_a_field_that_holds_something_else_is_named(changed: dict[str, Any], told: str) -> None:
    rung = {"size": 2, "operations": [], "addresses": [], "pool_bytes": 1, "capture_seconds": 1}
    assert Recording.from_dict({"rungs": [rung]}).rung(2).capture_seconds == 1
    with pytest.raises(GraphError, match=told):
        Recording.from_dict({"rungs": [{**rung, **changed}]})


def test_a_rung_that_was_not_recorded_is_named() -> None:
    runner, _ = make_runner()
    with pytest.raises(GraphError, match=r"step\[4\], step\[1\]"):
        runner.recording().rung(3)


def test_several_runners_make_one_recording() -> None:
    buffers, pool = FixedBuffers("cpu"), GraphPool("cpu")
    runners = [
        GraphRunner(
            lambda x: x.sin().cos(),
            inputs={"x": Input((3,), torch.float32)},
            ladder=Ladder([2]),
            device="cpu",
            buffers=buffers,
            pool=pool,
            name=name,
        )
        for name in ("a", "b")
    ]
    for runner in runners:
        runner.capture()
    merged = Recording.merge([runner.recording() for runner in runners])
    assert [(rung.name, rung.size) for rung in merged.rungs] == [("a", 2), ("b", 2)]
    assert merged.rung(2, "b").operations[0].uses[0].owner == "b.input.x"
    assert merged.totals["pool"] == pool.nbytes
    assert [span.owner for span in merged.memory].count("graph pool") == 1


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30), st.sampled_from(["buffer", "pool"])), max_size=12),
    st.lists(st.integers(0, 99), min_size=1, max_size=8),
)
def test_an_address_belongs_to_the_innermost_span_of_the_highest_rank(
    given_spans: list[tuple[int, int, str]], addresses: list[int]
) -> None:
    spans = [Span(str(at), kind, start, size) for at, (start, size, kind) in enumerate(given_spans)]
    ranks = {"buffer": 1}
    lookup = SpanMap(spans, ranks)
    together = lookup.find_all(addresses)
    for address, index in zip(addresses, together.tolist(), strict=True):
        found = lookup.find(address)
        assert found == (None if index < 0 else lookup.spans[index])
        holders = [span for span in spans if span.address <= address < span.end]
        if holders:
            best = max(holders, key=lambda span: (ranks.get(span.kind, 0), span.address, -span.nbytes))
            assert found is not None
            assert (found.kind, found.address, found.nbytes) == (best.kind, best.address, best.nbytes)
        else:
            assert found is None
