"""Answers while the CPU has other things to do: end-to-end times beside those of a quiet machine, in the same run.

Busy means as many spinning processes as the machine has cores, and a Python thread in this process that never lets go
of the interpreter's lock by itself.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mainspring.bench.latency import Setting, drive, engine_options

if TYPE_CHECKING:
    from mainspring import LLM, SamplingParams


@dataclass(frozen=True)
class BusyRecord:
    """One launch mode: milliseconds from the request to the last token of its answer, run by run, quiet and busy.

    ``first_quiet_ms`` and ``first_busy_ms`` are of answers of a single token: prompt and all. ``spinners`` is the
    number of processes that kept the CPU busy.
    """

    model: str
    dtype: str
    launch_mode: str
    batch: int
    input_len: int
    output_len: int
    spinners: int
    quiet_ms: Sequence[float]
    busy_ms: Sequence[float]
    first_quiet_ms: float
    first_busy_ms: float

    @property
    def degradation(self) -> float:
        """By what share the median answer takes longer on a busy machine."""
        return statistics.median(self.busy_ms) / statistics.median(self.quiet_ms) - 1


@contextmanager
def busy_cpu(spinners: int) -> Iterator[None]:
    """Keep ``spinners`` cores and this process's interpreter busy."""
    done = threading.Event()
    # Not a loop of sleeps or calls: it gives the lock up only when the interpreter takes it away.
    hog = threading.Thread(target=_spin, args=(done,), daemon=True)
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(spinners)]
    hog.start()
    try:
        yield
    finally:
        done.set()
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        hog.join()


def _spin(done: threading.Event) -> None:
    count = 0
    while not done.is_set():
        for _ in range(1000):
            count += 1


def measure_busy(setting: Setting, modes: Sequence[str]) -> list[BusyRecord]:
    """Measure the workload's first batch in each mode, all engines side by side: quiet, then busy.

    Raises ``ValueError`` where a mode cannot be had here.
    """
    import mainspring

    workload = setting.workload
    batch, spinners = workload.batches[0], os.cpu_count() or 1
    prompts = workload.prompts(batch, setting.config.vocab_size)
    times: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        engines: dict[str, LLM] = {}
        for mode in modes:
            engines[mode] = stack.enter_context(mainspring.LLM(setting.model.path, **engine_options(setting, mode)))
            if engines[mode].stats().launch_mode != mode:
                raise ValueError(f"launch mode {mode} cannot be had here (the log says why); leave it out")
            _answer(engines[mode], prompts, _params(workload.output_len))  # nothing is made for the first time below
        for name in ("quiet", "busy"):
            with busy_cpu(spinners) if name == "busy" else ExitStack():
                for mode in [*modes] * workload.repeats:
                    kept = times.setdefault(mode, {})
                    for what, count in (("", workload.output_len), ("first_", 1)):
                        seconds = _answer(engines[mode], prompts, _params(count))
                        kept.setdefault(what + name, []).append(1e3 * seconds)
    return [
        BusyRecord(
            model=setting.model.title,
            dtype=setting.dtype_name,
            launch_mode=mode,
            batch=batch,
            input_len=workload.input_len,
            output_len=workload.output_len,
            spinners=spinners,
            quiet_ms=times[mode]["quiet"],
            busy_ms=times[mode]["busy"],
            first_quiet_ms=statistics.median(times[mode]["first_quiet"]),
            first_busy_ms=statistics.median(times[mode]["first_busy"]),
        )
        for mode in modes
    ]


def _answer(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> float:
    """Seconds from the request to the last token."""
    return drive(llm.core, prompts, params).seconds


def _params(max_tokens: int) -> SamplingParams:
    import mainspring

    return mainspring.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
