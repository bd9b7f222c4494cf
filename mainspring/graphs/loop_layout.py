"""The words through which a running loop and the CPU speak: what lies where, in units of 8 bytes.

One block of int64 words in pinned memory, and a ring of records beside it. Each word has one writer. What the two
sides write lies on separate lines of 128 bytes. The kernel in `loop_kernel`, its emulation in `loop_cpu` and the
reader in `mailbox` all count from here.
"""

from __future__ import annotations

__all__ = ["REASONS", "Slot", "State", "Words", "slot_at"]


class Words:
    """Offsets in the pinned block.

    `WRITTEN` (device): records put into the ring since the mailbox was made. `DOORBELL` (CPU): every launch up to
    this number is to end. `READ` (CPU): records taken out of the ring. Then one slot for each of the last
    `LAUNCHES` launches (`Slot`), then the times at which the last `STAMPS` iterations ended.
    """

    WRITTEN = 0
    DOORBELL = 16
    READ = 17
    SLOTS = 32
    LAUNCHES = 16
    SLOT_WORDS = 32
    STAMPS_AT = SLOTS + LAUNCHES * SLOT_WORDS
    STAMPS = 4096
    TOTAL = STAMPS_AT + STAMPS


class Slot:
    """Offsets in the slot of one launch.

    The CPU writes `NUMBER` (of the launch, from 1) and `MAX_STEPS`. The device writes `ITERATIONS` (done so far),
    `REASON` (0 while under way, else an index into `REASONS`; released after all else), `FIRST` (iterations that
    the mailbox had seen before) and `STARTED` (time in nanoseconds).
    """

    NUMBER = 0
    MAX_STEPS = 1
    ITERATIONS = 16
    REASON = 17
    FIRST = 18
    STARTED = 19


class State:
    """Offsets in the block of int64 words that only the device uses.

    `LAUNCH`: number of the launch under way. `ITERATIONS`: of that launch. `TOTAL`: iterations of all launches.
    `WRITTEN`: as above. `MAX_STEPS`: of the launch under way.
    """

    LAUNCH = 0
    ITERATIONS = 1
    TOTAL = 2
    WRITTEN = 3
    MAX_STEPS = 4
    WORDS = 16


REASONS = ("", "flag", "doorbell", "max_steps", "ring_full", "lost", "failed")
"""Why a launch ended, by code. "lost": the device counts launches otherwise than the CPU. "failed": an error."""


def slot_at(launch: int) -> int:
    """First word of the slot of launch number `launch`."""
    return Words.SLOTS + (launch % Words.LAUNCHES) * Words.SLOT_WORDS
