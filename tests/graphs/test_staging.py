"""The staging ring never rewrites a slot that a copy still reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mainspring.graphs import GraphError, Staging


class SlowEvent:
    """Done once its copy has been made."""

    def __init__(self, copy: Callable[[], object]) -> None:
        self._copy: Callable[[], object] | None = copy

    def query(self) -> bool:
        return self._copy is None

    def synchronize(self) -> None:
        if self._copy is not None:
            self._copy()
            self._copy = None


class SlowDevice:
    """Copies nothing until someone waits for it, as a busy GPU would."""

    def __init__(self) -> None:
        self.pending: list[SlowEvent] = []

    def allocate(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def copy(self, destination: Tensor, source: Tensor) -> SlowEvent:
        event = SlowEvent(lambda: destination.copy_(source))
        self.pending.append(event)
        return event

    def finish(self) -> None:
        for event in self.pending:
            event.synchronize()


class HastyStaging(Staging):
    """The fault: slots are rewritten without waiting."""

    def _wait_for(self, at: int) -> None:
        return


def run(kind: type[Staging], depth: int, batches: list[list[int]]) -> list[list[int]]:
    """What arrives when `batches` are uploaded to a device that copies late."""
    device = SlowDevice()
    staging = kind("cpu", slot_bytes=64, depth=depth, backend=device)
    targets = [torch.zeros(len(batch), dtype=torch.int64) for batch in batches]
    for target, batch in zip(targets, batches, strict=True):
        staging.upload(target, batch)
    device.finish()
    return [target.tolist() for target in targets]


BATCHES = st.lists(st.lists(st.integers(-5, 5), min_size=1, max_size=8), min_size=1, max_size=12)


@given(BATCHES, st.integers(1, 4))
def test_every_upload_arrives_however_late_the_device_copies(batches: list[list[int]], depth: int) -> None:
    assert run(Staging, depth, batches) == batches


def test_a_ring_that_does_not_wait_delivers_wrong_values() -> None:
    batches = [[1, 2], [3, 4], [5, 6]]
    assert run(HastyStaging, 2, batches) != batches
    assert run(Staging, 2, batches) == batches


def test_only_a_slot_that_is_still_read_makes_the_upload_wait() -> None:
    device = SlowDevice()
    staging = Staging("cpu", slot_bytes=16, depth=2, backend=device)
    target = torch.zeros(2, dtype=torch.int64)
    staging.upload(target, [1, 1])
    staging.upload(target, [2, 2])
    assert staging.waits == 0
    staging.upload(target, [3, 3])
    assert staging.waits == 1
    device.finish()
    staging.upload(target, [4, 4])
    assert staging.waits == 1


def test_the_caller_may_change_the_values_after_the_upload() -> None:
    device = SlowDevice()
    staging = Staging("cpu", slot_bytes=16, depth=2, backend=device)
    target, values = torch.zeros(2, dtype=torch.int64), torch.tensor([1, 2])
    staging.upload(target, values)
    values.fill_(9)
    staging.synchronize()
    assert target.tolist() == [1, 2]


def test_rows_past_the_values_get_the_fill() -> None:
    staging = Staging("cpu", slot_bytes=64)
    target = torch.full((5, 2), 7, dtype=torch.int32)
    staging.upload(target, [[1, 2], [3, 4]], fill=-1)
    assert target.tolist() == [[1, 2], [3, 4], [-1, -1], [-1, -1], [-1, -1]]


@pytest.mark.parametrize(
    ("target", "values"),
    [
        (torch.zeros(3), [1.0, 2.0]),
        (torch.zeros(3), [[1.0], [2.0], [3.0]]),
        (torch.zeros(100), [0.0] * 100),
        (torch.zeros(4, 2)[:, 0], [0.0] * 4),
        (torch.zeros(2, dtype=torch.int32), [1.5, 2.0]),
        (torch.zeros(2, dtype=torch.int32), torch.tensor([[1, 2]])),
    ],
    ids=["too few", "other shape", "over a slot", "strided", "fractions", "other tensor shape"],
)
def test_an_upload_that_does_not_fit_is_refused_before_anything_is_copied(target: Tensor, values: object) -> None:
    staging = Staging("cpu", slot_bytes=64)
    with pytest.raises(GraphError):
        staging.upload(target, values)  # type: ignore[arg-type]
    assert not target.any()


@pytest.mark.parametrize(("slot_bytes", "depth"), [(0, 1), (8, 0)])
def test_a_ring_without_room_is_refused(slot_bytes: int, depth: int) -> None:
    with pytest.raises(GraphError):
        Staging("cpu", slot_bytes, depth)
