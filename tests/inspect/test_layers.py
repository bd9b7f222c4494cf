"""Layers are found by the names of what operations use, whatever comes before, between and behind them."""

from __future__ import annotations

import pytest
import recordings
from hypothesis import given
from hypothesis import strategies as st

from mainspring.inspect.layers import layer_of, pattern_of, sections


@pytest.mark.parametrize(
    ("owner", "layer", "pattern"),
    [
        ("model.layers.3.mlp.down_proj.weight", ("model.layers.", 3), "model.layers.N.mlp.down_proj.weight"),
        ("model.layers.12.experts.7.w1", ("model.layers.", 12), "model.layers.N.experts.7.w1"),
        ("h.0.attn", ("h.", 0), "h.N.attn"),
        ("kv_cache", None, "kv_cache"),
        ("decode.plain.input.rows", None, "decode.plain.input.rows"),
        ("unnamed tensor float32[1.5, 2]", None, "unnamed tensor float32[1.5, 2]"),
        ("weights.3", None, "weights.3"),
    ],
)
def test_a_buffers_name_tells_its_layer(owner: str, layer: tuple[str, int] | None, pattern: str) -> None:
    assert layer_of(owner) == layer
    assert pattern_of(owner) == pattern


def test_layers_that_are_alike_are_one_section_with_what_uses_no_weight() -> None:
    before, layers, behind = sections(recordings.rung(4).operations)
    assert (before.start, before.stop, before.title) == (0, 1, "")
    assert (layers.title, layers.each, [layer.number for layer in layers.layers]) == (
        "model.layers.0-3",
        4,
        [0, 1, 2, 3],
    )
    assert (behind.start, behind.stop) == (17, 18)  # the last layer ends with its reduce_kernel, as the others do


def test_a_layer_that_differs_is_a_section_of_its_own() -> None:
    listed = list(recordings.rung(4, layers=6).operations)
    odd = recordings.operation(9, "norm_kernel", ["model.layers.2.norm.weight", "graph pool"], 4, grid=(1, 1, 1))
    listed[9] = odd
    assert [part.title for part in sections(listed) if part.layers] == [
        "model.layers.0-1",
        "model.layers.2",
        "model.layers.3-5",
    ]


def test_layers_side_by_side_are_not_folded() -> None:
    owners = ["m.layers.0.a", "m.layers.1.a", "m.layers.0.b", "m.layers.1.b"]
    listed = [recordings.operation(at, "kernel", [owner], 1) for at, owner in enumerate(owners)]
    [section] = sections(listed)
    assert (section.start, section.stop, section.layers) == (0, 4, ())


@given(st.lists(st.sampled_from(["none", "0", "1", "2", "5"]), max_size=30))
def test_every_operation_is_in_one_section_whatever_the_order(labels: list[str]) -> None:
    listed = [
        recordings.operation(at, "kernel", ["pool" if label == "none" else f"model.layers.{label}.w"], 1)
        for at, label in enumerate(labels)
    ]
    found = sections(listed)
    covered = [index for section in found for index in range(section.start, section.stop)]
    assert covered == list(range(len(listed)))
    for section in found:
        inside = [index for layer in section.layers for index in range(layer.start, layer.stop)]
        assert not section.layers or inside == list(range(section.start, section.stop))
