"""Finds the layers of a model in an operation list, by the names of what the operations use."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mainspring.graphs import RecordedOperation

__all__ = ["Layer", "Section", "layer_of", "pattern_of", "sections"]

_LAYER = re.compile(r"^((?:[^.\s]+\.)+?)(\d+)\.")

Label = tuple[str, int]
"""What layers are called, such as "model.layers.", and the number of one."""


@dataclass(frozen=True, slots=True)
class Layer:
    """The operations `start` to `stop` (exclusive) of one layer."""

    number: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Section:
    """A stretch of an operation list: operations of no layer, or layers that follow each other and are alike.

    Attributes:
        start: index of its first operation.
        stop: index behind its last one.
        prefix: what its layers are called, such as "model.layers."; empty where there are none.
        layers: those that are alike, in order.
    """

    start: int
    stop: int
    prefix: str = ""
    layers: tuple[Layer, ...] = ()

    @property
    def title(self) -> str:
        """Such as "model.layers.1-29", or "model.layers.0"."""
        if not self.layers:
            return ""
        first, last = self.layers[0].number, self.layers[-1].number
        return f"{self.prefix}{first}" if first == last else f"{self.prefix}{first}-{last}"

    @property
    def each(self) -> int:
        """Operations of one layer."""
        return self.layers[0].stop - self.layers[0].start if self.layers else 0


def layer_of(owner: str) -> Label | None:
    """The layer that a buffer belongs to: ("model.layers.", 3) for "model.layers.3.mlp.down_proj.weight"."""
    found = _LAYER.match(owner)
    return (found[1], int(found[2])) if found else None


def pattern_of(owner: str) -> str:
    """The name with N for the number of its layer, so that all layers' buffers of a kind have one name."""
    found = _LAYER.match(owner)
    return f"{found[1]}N{owner[found.end(2) :]}" if found else owner


def sections(operations: Sequence[RecordedOperation]) -> tuple[Section, ...]:
    """Cut an operation list where a layer begins, and put layers together that are alike.

    An operation belongs to the layer whose buffers it uses. One that uses none belongs to the layer before it, as far
    as another layer follows; behind the last layer, as far as it ends like the one before it.
    """
    runs = _runs([_label(operation) for operation in operations], [operation.name for operation in operations])
    labelled = [label for label, _, _ in runs if label is not None]
    if len(labelled) != len(set(labelled)):  # layers side by side, on several streams: no stretch is a layer
        return (Section(0, len(operations)),) if operations else ()
    found: list[Section] = []
    for label, start, stop in runs:
        if label is None:
            found.append(Section(start, stop))
            continue
        prefix, number = label
        layer, before = Layer(number, start, stop), found[-1] if found else None
        if (
            before is not None
            and before.prefix == prefix
            and before.layers[-1].number == number - 1
            and _shape(operations, before.layers[-1]) == _shape(operations, layer)
        ):
            found[-1] = Section(before.start, stop, prefix, (*before.layers, layer))
        else:
            found.append(Section(start, stop, prefix, (layer,)))
    return tuple(found)


def _label(operation: RecordedOperation) -> Label | None:
    labels = Counter(label for use in operation.uses if (label := layer_of(use.owner)) is not None)
    return labels.most_common(1)[0][0] if labels else None


def _runs(labels: Sequence[Label | None], names: Sequence[str]) -> list[tuple[Label | None, int, int]]:
    """Stretches of one layer each, and of none before the first and behind the last."""
    own = [at for at, label in enumerate(labels) if label is not None]
    if not own:
        return [(None, 0, len(labels))] if labels else []
    runs: list[tuple[Label | None, int, int]] = [(None, 0, own[0])] if own[0] else []
    starts = [at for at, before in zip(own, [-1, *own], strict=False) if before < 0 or labels[before] != labels[at]]
    tail: list[str] = []
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        last = max(at for at in own if following is None or at < following)
        if following is not None:
            tail = list(names[last + 1 : following])
            runs.append((labels[start], start, following))
            continue
        stop = last + 1
        for name in tail:
            if stop == len(names) or names[stop] != name:
                break
            stop += 1
        runs.append((labels[start], start, stop))
        if stop < len(names):
            runs.append((None, stop, len(names)))
    return runs


def _shape(operations: Sequence[RecordedOperation], layer: Layer) -> list[tuple[object, ...]]:
    """What two layers must have in common to be alike."""
    return [
        (each.kind, each.name, each.grid, each.block, each.shared_memory, [pattern_of(use.owner) for use in each.uses])
        for each in operations[layer.start : layer.stop]
    ]
