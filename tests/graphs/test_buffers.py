"""Named buffers: owners of addresses, and notice of anything that moved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from mainspring.graphs import FixedBuffers, GraphError, StaleAddressError


def test_allocated_memory_is_filled_held_and_counted() -> None:
    buffers = FixedBuffers("cpu")
    rows = buffers.allocate("rows", (4,), torch.int32, fill=-1)
    assert rows.tolist() == [-1] * 4
    assert buffers["rows"] is rows
    assert buffers.nbytes == 16
    assert list(buffers) == ["rows"]


def test_adopted_memory_is_watched_but_not_counted() -> None:
    buffers = FixedBuffers("cpu")
    buffers.adopt("weight", torch.zeros(8))
    assert buffers.nbytes == 0
    buffers.check()


def test_a_name_is_taken_once() -> None:
    buffers = FixedBuffers("cpu")
    buffers.allocate("x", (1,), torch.int32)
    with pytest.raises(GraphError, match="'x'"):
        buffers.adopt("x", torch.zeros(1))


def test_new_contents_are_not_a_change() -> None:
    buffers = FixedBuffers("cpu")
    buffers.allocate("x", (3,), torch.float32)
    buffers["x"].fill_(7)
    buffers.check()


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "address": lambda t: t.set_(torch.zeros(6, 4)),
    "shape": lambda t: t.unsqueeze_(0),
    "stride": lambda t: t.as_strided_((6, 4), (1, 6)),
    "dtype": lambda t: setattr(t, "data", t.view(torch.int32)),
    "growth": lambda t: t.resize_(600, 4),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_buffer_is_an_error_naming_it_and_both_states(what: str) -> None:
    buffers = FixedBuffers("cpu")
    workspace = buffers.allocate("workspace", (6, 4), torch.float32)
    other = buffers.allocate("other", (6, 4), torch.float32)
    before = workspace.data_ptr()
    CHANGES[what](workspace)
    with pytest.raises(StaleAddressError, match="'workspace'") as caught:
        buffers.check()
    assert f"{before:#x}" in caught.value.recorded
    assert f"{workspace.data_ptr():#x}" in caught.value.current
    assert caught.value.recorded != caught.value.current
    buffers.check(["other"])
    assert other.shape == (6, 4)


def test_a_parameter_put_in_a_weights_place_is_noticed_through_its_getter() -> None:
    layer = nn.Linear(4, 4)
    buffers = FixedBuffers("cpu")
    buffers.adopt("layer.weight", lambda: layer.weight)
    with torch.no_grad():
        layer.weight.fill_(1)
    buffers.check()
    kept = layer.weight
    layer.weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(StaleAddressError, match=r"layer\.weight"):
        buffers.check()
    assert kept is not layer.weight


def test_accepting_a_new_address_ends_the_error_and_starts_a_generation() -> None:
    buffers = FixedBuffers("cpu")
    x = buffers.allocate("x", (4,), torch.float32)
    assert buffers.accept() == []
    assert buffers.generation == 0
    kept = x.untyped_storage()
    x.set_(torch.zeros(4))
    assert buffers.accept() == ["x"]
    assert buffers.generation == 1
    buffers.check()
    assert kept.data_ptr() != x.data_ptr()


def test_packed_weights_are_watched_by_identity_and_own_no_address() -> None:
    packed = torch.randn(8, 8).to_mkldnn()
    current = {"weight": packed}
    buffers = FixedBuffers("cpu")
    buffers.adopt("weight", lambda: current["weight"])
    buffers.check()
    assert buffers.owner_of(0) is None
    current["weight"] = torch.randn(8, 8).to_mkldnn()
    with pytest.raises(StaleAddressError, match="weight"):
        buffers.check()
    assert packed.shape == (8, 8)


def test_the_owner_of_an_address_is_the_innermost_buffer() -> None:
    buffers = FixedBuffers("cpu")
    cache = buffers.allocate("cache", (10, 8), torch.float32)
    buffers.adopt("cache.layer3", cache[3])
    start = cache.data_ptr()
    assert buffers.owner_of(start) == ("cache", 0)
    assert buffers.owner_of(start + 3 * 32) == ("cache.layer3", 0)
    assert buffers.owner_of(start + 3 * 32 + 31) == ("cache.layer3", 31)
    assert buffers.owner_of(start + 4 * 32) == ("cache", 128)
    assert buffers.owner_of(start + 320) is None
    assert buffers.owner_of(start - 1) is None
    buffers.remove("cache.layer3")
    assert buffers.owner_of(start + 3 * 32) == ("cache", 96)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), min_size=1, max_size=12), st.integers(0, 99))
def test_an_address_has_an_owner_exactly_when_a_buffer_holds_it(spans: list[tuple[int, int]], at: int) -> None:
    memory = torch.zeros(100, dtype=torch.uint8)
    buffers = FixedBuffers("cpu")
    for number, (start, size) in enumerate(spans):
        buffers.adopt(str(number), memory[start : start + size])
    holders = [start for start, size in spans if start <= at < start + size]
    owner = buffers.owner_of(memory.data_ptr() + at)
    if not holders:
        assert owner is None
    else:
        assert owner is not None
        start, size = spans[int(owner[0])]
        assert start <= at < start + size
        assert owner[1] == at - start
        assert start == max(holders)
