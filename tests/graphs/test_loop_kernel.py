"""The loop's PTX, run instruction by instruction, does what its emulation in Python does."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx_interpreter import Machine, parse

from mainspring.graphs.loop_cpu import begin, end_iteration
from mainspring.graphs.loop_kernel import BEGIN, END_ITERATION, PTX
from mainspring.graphs.loop_layout import REASONS, Slot, State, Words, slot_at
from mainspring.graphs.mailbox import LoopMemory

ENTRIES = parse(PTX)
WORDS, STATE, RING, RECORD, FLAG, HANDLE = 0x10000, 0x40000, 0x50000, 0x60000, 0x70000, 77


class Device:
    """The kernels' side: the words of a `LoopMemory` and a device's own memory, under made-up addresses."""

    def __init__(self, memory: LoopMemory, record_words: int) -> None:
        self.record = np.zeros(max(1, record_words), dtype=np.int32)
        self.flag = np.ones(1, dtype=np.int32)
        self.parts = {
            WORDS: memory.block.numpy().view(np.uint8),
            STATE: memory.state.numpy().view(np.uint8),
            RING: memory.ring_array.reshape(-1).view(np.uint8),
            RECORD: self.record.view(np.uint8),
            FLAG: self.flag.view(np.uint8),
        }
        self.count = record_words
        self.machine = Machine(self._read, self._write)

    def _part(self, address: int, size: int) -> memoryview:
        base = max(start for start in self.parts if start <= address)
        at = address - base
        assert address % size == 0
        assert at + size <= self.parts[base].size
        return self.parts[base][at : at + size].data

    def _read(self, address: int, size: int) -> int:
        return int.from_bytes(self._part(address, size), "little")

    def _write(self, address: int, value: int, size: int) -> None:
        self._part(address, size)[:] = value.to_bytes(size, "little")

    def begin(self, depth: int, now: int) -> int:
        self.machine.clock = lambda: now
        self.machine.launch(ENTRIES[BEGIN], [WORDS, STATE, HANDLE, depth], 1)
        return self._go()

    def end_iteration(self, depth: int, now: int, threads: int = 32) -> int:
        self.machine.clock = lambda: now
        arguments = [WORDS, STATE, HANDLE, depth, RING, RECORD, self.count, FLAG]
        self.machine.launch(ENTRIES[END_ITERATION], arguments, threads)
        return self._go()

    def _go(self) -> int:
        [(handle, value)] = self.machine.conditions
        assert handle == HANDLE
        self.machine.conditions.clear()
        return value


def words_of(memory: LoopMemory, state: list[int]) -> Iterator[object]:
    yield memory.block.tolist()
    yield memory.ring.tolist()
    yield state[: State.MAX_STEPS + 1]


@settings(max_examples=60)
@given(data=st.data())
def test_the_kernels_and_their_emulation_leave_the_same_words(data: st.DataObject) -> None:
    depth, count = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 70))
    records = data.draw(st.booleans())
    threads = 32 * data.draw(st.integers(1, 3))
    ours, theirs = (LoopMemory(torch.device("cpu"), count, depth) for _ in range(2))
    device, state = Device(ours, count), [0] * State.WORDS
    now = 1000
    for _ in range(data.draw(st.integers(1, 20))):
        steps = data.draw(st.integers(1, 6))
        launches = {memory.number_launch(steps) for memory in (ours, theirs)}
        assert len(launches) == 1
        launch = launches.pop()
        if data.draw(st.integers(0, 5)) == 0:
            both(ours, theirs, Words.DOORBELL, launch - data.draw(st.integers(0, 1)))
        now += 1
        reason = begin(theirs, state, records, now)
        publish(theirs, launch, reason)
        assert device.begin(depth if records else 0, now) == (reason == 0)
        while not reason:
            assert list(words_of(ours, ours.state.tolist())) == list(words_of(theirs, state))
            if data.draw(st.integers(0, 4)) == 0:
                both(ours, theirs, Words.DOORBELL, launch - data.draw(st.integers(0, 1)))
            if data.draw(st.integers(0, 2)) == 0:
                both(ours, theirs, Words.READ, data.draw(st.integers(ours.words[Words.READ], ours.words[0])))
            device.flag[0] = flag = data.draw(st.sampled_from([1, 1, 1, -1, 2**31 - 1, 0]))
            device.record[:count] = np.arange(count) - now
            now += 1
            record = device.record[:count] if records else None
            reason = end_iteration(theirs, state, int(flag), record, now)
            publish(theirs, launch, reason)
            assert device.end_iteration(depth if records else 0, now, threads) == (reason == 0)
        assert list(words_of(ours, ours.state.tolist())) == list(words_of(theirs, state))


def both(ours: LoopMemory, theirs: LoopMemory, at: int, value: int) -> None:
    ours.store(at, value)
    theirs.store(at, value)


def publish(memory: LoopMemory, launch: int, reason: int) -> None:
    if reason:
        memory.store(slot_at(launch) + Slot.REASON, reason)


def test_a_launch_that_the_cpu_counted_otherwise_runs_nothing() -> None:
    memory = LoopMemory(torch.device("cpu"), 1, 4)
    device = Device(memory, 1)
    memory.number_launch(5)
    memory.number_launch(5)
    memory.words[slot_at(1) + Slot.NUMBER] = 17
    assert device.begin(4, 1) == 0
    assert REASONS[memory.reason(1)] == "lost"


def test_no_counter_is_written_before_the_fence_and_no_record_after_it() -> None:
    memory = LoopMemory(torch.device("cpu"), 40, 4)
    device = Device(memory, 40)
    memory.number_launch(1)
    device.begin(4, 1)
    device.machine.trace.clear()
    device.end_iteration(4, 2)
    trace = device.machine.trace
    assert trace.count("fence") == 1
    fence = trace.index("fence")
    before = [event[1] for event in trace[:fence] if isinstance(event, tuple)]
    after = [event for event in trace[fence + 1 :] if isinstance(event, tuple)]
    assert set(range(RING, RING + 160, 4)) <= set(before)
    assert WORDS + 8 * Words.STAMPS_AT in before
    slot = WORDS + 8 * slot_at(1)
    assert after == [
        ("relaxed.sys", WORDS + 8 * Words.WRITTEN, 1),
        ("relaxed.sys", slot + 8 * Slot.ITERATIONS, 1),
        ("release.sys", slot + 8 * Slot.REASON, REASONS.index("max_steps")),
    ]


def ptxas() -> str | None:
    spec = find_spec("triton")
    places = (
        [Path(place) / "backends/nvidia/bin/ptxas" for place in (spec.submodule_search_locations or [])] if spec else []
    )
    return next((str(place) for place in places if place.is_file()), shutil.which("ptxas"))


@pytest.mark.skipif(ptxas() is None, reason="needs ptxas")
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_the_ptx_assembles(arch: str, tmp_path: Path) -> None:
    source = tmp_path / "loop.ptx"
    source.write_text(PTX)
    command = [str(ptxas()), "-c", "-arch", arch, str(source), "-o", str(tmp_path / "loop.cubin")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
