"""Watches an engine make a few decode steps: eager and recorded under the profiler, looping by the device's clock."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mainspring.inspect.timeline import Event, Lane, Timeline

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from mainspring.engine.answers import Answer
    from mainspring.engine.core import EngineCore
    from mainspring.graphs import GraphRunner

__all__ = ["loop_clock", "observe", "profiled", "profiled_lanes", "stamped_loops"]

STEP = "mainspring step "
PROMPT_TOKENS = 16
#: Steps before those that are shown, so that what is made at first use exists.
WARM_STEPS = 2
#: What the CPU asks of the GPU, as the profiler names it.
CALLS = ("Launch", "Memcpy", "Memset")
PROFILER = "torch.profiler"


def observe(core: EngineCore, rows: int, steps: int) -> tuple[list[Timeline], list[str]]:
    """Timelines of `steps` decode steps of a batch of `rows` random requests in every launch mode that the engine has,
    and why one is missing.

    Raises:
        ValueError: the engine cannot hold such a batch, or so many steps.
    """
    needed = PROMPT_TOKENS + 2 * (2 * WARM_STEPS + steps) + steps + 2
    if rows > core.limits.max_num_seqs:
        raise ValueError(f"a batch of {rows} rows > max_num_seqs {core.limits.max_num_seqs}; lower --batch")
    if needed > core.limits.max_model_len:
        raise ValueError(f"{steps} steps need a context of {needed} > max_model_len {core.limits.max_model_len} tokens")
    timelines: list[Timeline] = []
    notes: list[str] = []
    runner = core.runner.runners["plain"]
    loop = _loop_timeline(core, rows, steps)  # before the profiler is there, which may stay in the driver's way
    with core.step_by_step(), _running(core, rows, needed - PROMPT_TOKENS) as answers:
        profiled(core, 1)  # the profiler's own start-up goes into the first
        for mode in ("eager", "graph"):
            with _eager(runner) if mode == "eager" else nullcontext():
                for _ in range(WARM_STEPS):
                    core.step()
                lanes = profiled(core, steps)
            timelines.append(Timeline(mode, rows, runner.ladder.rung_for(rows), steps, PROFILER, lanes))
        if any(answer.finished for answer in answers):
            notes.append("A request ended before the timeline did, which shows fewer rows from there on.")
    if isinstance(loop, str):
        notes.append(loop)
    else:
        timelines.append(loop)
    return timelines, notes


@contextmanager
def _eager(runner: GraphRunner) -> Iterator[None]:
    usual, runner.enforce_eager = runner.enforce_eager, True
    try:
        yield
    finally:
        runner.enforce_eager = usual


@contextmanager
def _running(core: EngineCore, rows: int, tokens: int) -> Iterator[list[Answer]]:
    """A batch of requests that have begun to be decoded; they are aborted in the end."""
    answers = _add(core, rows, tokens)
    try:
        while min(len(answer.choices[0].request.output_token_ids) for answer in answers) < 2:
            core.step()
        yield answers
    finally:
        for answer in answers:
            core.abort(answer)
        while core.has_work():
            core.step()


def _add(core: EngineCore, rows: int, tokens: int) -> list[Answer]:
    from mainspring import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    vocabulary = core.config.vocab_size
    prompts = [[(7919 * (row + 1) + 31 * at) % vocabulary for at in range(PROMPT_TOKENS)] for row in range(rows)]
    return [core.add(f"inspect-{row}", prompt, params) for row, prompt in enumerate(prompts)]


def profiled(core: EngineCore, steps: int) -> tuple[Lane, ...]:
    """What ran where during `steps` calls of `core.step`, by the profiler."""
    from torch.profiler import ProfilerActivity, profile, record_function

    on_gpu = core.limits.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    _synchronize(core.limits.device)
    with profile(activities=activities) as profiler:
        for step in range(steps):
            with record_function(f"{STEP}{step}"):
                core.step()
        _synchronize(core.limits.device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return profiled_lanes(events, on_gpu)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def profiled_lanes(events: Sequence[Mapping[str, Any]], on_gpu: bool) -> tuple[Lane, ...]:
    """What a profiler's trace says of the steps that are marked in it.

    On a GPU: its kernels and copies, each in the step that launched it, and the CPU's calls to it. On a CPU: the
    outermost operations inside the steps.
    """
    done = [event for event in events if event.get("ph") == "X"]
    marks = sorted(
        (
            (event["ts"], event["ts"] + event["dur"], int(event["name"].removeprefix(STEP)), event["tid"])
            for event in done
            if event.get("cat") == "user_annotation" and event["name"].startswith(STEP)
        ),
    )
    if not marks:
        return (Lane("GPU" if on_gpu else "CPU", True, ()),)
    zero, thread = marks[0][0], marks[0][3]

    def step_at(time: float) -> int:
        return next((step for start, end, step, _ in marks if start <= time <= end), -1)

    def event_of(event: Mapping[str, Any], step: int) -> Event:
        return Event(str(event["name"]), event["ts"] - zero, event["dur"], step)

    if not on_gpu:
        inside, end = [], 0.0
        operations = [e for e in done if e.get("cat") == "cpu_op" and e["tid"] == thread]
        for event in sorted(operations, key=lambda each: (each["ts"], -each["dur"])):
            step = step_at(event["ts"])
            if step >= 0 and event["ts"] >= end:
                inside.append(event_of(event, step))
                end = event["ts"] + event["dur"]
        return (Lane("CPU", True, tuple(inside)),)
    calls, launched = [], {}
    for event in done:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            step = step_at(event["ts"])
            if step >= 0 and any(word in event["name"] for word in CALLS):
                calls.append(event_of(event, step))
            launched[event.get("args", {}).get("correlation")] = step
    kernels = [
        event_of(event, launched.get(event.get("args", {}).get("correlation"), -1))
        for event in done
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    mine = sorted((event for event in kernels if event.step >= 0), key=lambda event: event.start)
    calls.sort(key=lambda event: event.start)
    return (Lane("GPU", True, tuple(mine)), Lane("CPU: calls to the GPU", False, tuple(calls)))


@contextmanager
def stamped_loops(core: EngineCore) -> Iterator[list[npt.NDArray[np.int64]]]:
    """A list that gets, for each loop that ends inside, the times of its beginning and of its steps' ends, in
    nanoseconds of the device's clock."""
    stamps: list[npt.NDArray[np.int64]] = []
    core.pipeline.driver.stamps = stamps
    try:
        yield stamps
    finally:
        core.pipeline.driver.stamps = None


def loop_clock(device: torch.device) -> str:
    """What times the steps of a loop."""
    return "the GPU's clock (%globaltimer)" if device.type == "cuda" else "time.perf_counter"


def _loop_timeline(core: EngineCore, rows: int, steps: int) -> Timeline | str:
    """The first steps of a loop by the device's time stamps, or why there is none."""
    if core.launch_mode != "loop":
        return f"No timeline of a loop: the engine runs in {core.launch_mode} mode."
    for _ in range(2):  # what is made at first use exists in the second run
        with stamped_loops(core) as stamps:
            _add(core, rows, steps + 2)
            while core.has_work():
                core.step()
    longest: Any = max(stamps, key=len, default=[])
    count = min(len(longest) - 1, steps)
    if count < 1:
        return "No timeline of a loop: none made a step."
    times = [(int(stamp) - int(longest[0])) / 1e3 for stamp in longest[: count + 1]]
    events = tuple(
        Event(f"step {at + 1}", start, end - start, at)
        for at, (start, end) in enumerate(zip(times, times[1:], strict=False))
    )
    on_gpu = core.limits.device.type == "cuda"
    return Timeline(
        mode="loop",
        rows=rows,
        rung=core.limits.ladder.rung_for(rows),
        steps=count,
        clock=loop_clock(core.limits.device),
        lanes=(Lane("GPU" if on_gpu else "CPU", True, events),),
        note="Stamps at the ends of whole steps: the profiler does not see inside of a loop. One launch made them all.",
        whole_steps=True,
    )
