"""Decode latency: milliseconds per token, step by step, beside the floor measured in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mainspring.bench.floor import StepBytes, step_bytes
from mainspring.bench.records import LatencyRecord
from mainspring.bench.replay import PausedBatch, paused_batch
from mainspring.bench.shapes import BenchModel
from mainspring.bench.workload import SAMPLED, Workload, percentile
from mainspring.inspect.observe import stamped_loops

if TYPE_CHECKING:
    import torch

    from mainspring import LLM
    from mainspring.engine.core import EngineCore
    from mainspring.engine.sampling_params import SamplingParams
    from mainspring.models.config import ModelConfig

#: Launch modes that can be measured.
LAUNCH_MODES = ("loop", "graph", "eager")
BLOCK_SIZE = 16

LookAtStep = Callable[[int, PausedBatch], Mapping[str, Any]]


@dataclass(frozen=True)
class Setting:
    """What all measurements of one command have in common; ``bandwidth`` in bytes per second."""

    model: BenchModel
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    workload: Workload
    bandwidth: float

    @property
    def dtype_name(self) -> str:
        """The dtype as options spell it."""
        return str(self.dtype).removeprefix("torch.")

    def bytes_of(self, batch: int) -> StepBytes:
        """What a step of ``batch`` rows must read, at the mean context."""
        return step_bytes(self.config, self.dtype.itemsize, self.workload.context, batch)

    def record(
        self,
        batch: int,
        *,
        engine: str,
        version: str | None,
        launch_mode: str,
        mean_seconds: float,
        first_seconds: float,
        steps: Sequence[float] = (),
        step_ms: float | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> LatencyRecord:
        """The figures of one batch; ``steps`` are the seconds of single decode steps, where they could be seen."""
        needed = self.bytes_of(batch)
        floor_ms = needed.floor_ms(self.bandwidth)
        tpot_ms = 1e3 * (statistics.median(steps) if steps else mean_seconds)
        return LatencyRecord(
            model=self.model.title,
            batch=batch,
            context=self.workload.context,
            input_len=self.workload.input_len,
            output_len=self.workload.output_len,
            dtype=self.dtype_name,
            launch_mode=launch_mode,
            engine=engine,
            engine_version=version,
            sampled=self.workload.sampled,
            tpot_ms=tpot_ms,
            tpot_p99_ms=1e3 * percentile(steps, 99) if steps else None,
            tpot_mean_ms=1e3 * mean_seconds,
            first_token_ms=1e3 * first_seconds,
            step_ms=step_ms,
            floor_ms=floor_ms,
            ratio=tpot_ms / floor_ms,
            tokens_per_second=batch / (tpot_ms / 1e3),
            step_read_bytes=needed.total,
            read_bandwidth=self.bandwidth,
            extra=extra or {},
        )


@dataclass(frozen=True)
class Timeline:
    """When tokens arrived at the CPU: seconds, and how many answers got one, for each step that was read back."""

    started: float
    arrivals: Sequence[tuple[float, int]]

    @property
    def seconds(self) -> float:
        """From the first request to the last token."""
        return self.arrivals[-1][0] - self.started

    def step_seconds(self, batch: int) -> list[float]:
        """Time between arrivals that follow each other and both have all ``batch`` rows: decode steps of the whole
        batch, none while prompts were still being read."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return [later - earlier for (earlier, before), (later, rows) in pairs if before == rows == batch]


def measure_engine(setting: Setting, launch_mode: str, at_rest: LookAtStep | None = None) -> Iterator[LatencyRecord]:
    """Measure every batch of the workload in one engine, in ``launch_mode``.

    ``at_rest(batch, paused)`` may look at each batch's recorded step, paused in mid-answer, and return figures for the
    record's ``extra``. Raises ``ValueError`` for
    a launch mode that does not exist.
    """
    check_modes(launch_mode)
    import mainspring

    with mainspring.LLM(setting.model.path, **engine_options(setting, launch_mode)) as llm:
        for batch in setting.workload.batches:
            yield _measure_batch(llm, setting, launch_mode, batch, at_rest)


def check_modes(text: str) -> list[str]:
    """Launch modes from a text such as ``graph,eager``. Raises ``ValueError`` for one that does not exist."""
    modes = [part.strip() for part in text.split(",")]
    for mode in modes:
        if mode not in LAUNCH_MODES:
            raise ValueError(f"launch mode {mode!r} is not known; give {' or '.join(LAUNCH_MODES)}")
    return modes


def engine_options(setting: Setting, launch_mode: str) -> dict[str, Any]:
    """Options of an engine that is just large enough: the largest batch at its longest takes half of the KV cache, so
    that a loop, which leaves a half of what is free to others, can have all blocks that it needs."""
    workload = setting.workload
    blocks_each = -(-workload.total_len // BLOCK_SIZE) + 2  # one to grow into, one for steps launched ahead
    return {
        "dtype": setting.dtype_name,
        "device": str(setting.device),
        "load_format": setting.model.load_format,
        "max_model_len": workload.max_model_len(setting.config),
        "max_num_seqs": max(workload.batches),
        "cudagraph_capture_sizes": sorted(set(workload.batches)),
        "num_gpu_blocks_override": 2 * blocks_each * max(workload.batches),
        "block_size": BLOCK_SIZE,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "seed": workload.seed,
        "launch_mode": launch_mode,
    }


def drive(core: EngineCore, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Timeline:
    """Answer all prompts together and note when tokens arrive, as `LLM.generate` takes them: from a loop, many at a
    time."""
    started = time.perf_counter()
    arrivals = []
    open_answers = len(prompts)
    with core.brisk():
        for index, prompt in enumerate(prompts):
            core.add(str(index), prompt, params)
        while open_answers:
            touched = core.step(patient=True)
            if touched:
                arrivals.append((time.perf_counter(), len(touched)))
                open_answers -= sum(answer.finished for answer in touched)
    return Timeline(started, arrivals)


def _measure_batch(
    llm: LLM,
    setting: Setting,
    launch_mode: str,
    batch: int,
    at_rest: LookAtStep | None,
) -> LatencyRecord:
    import mainspring

    workload = setting.workload
    prompts = workload.prompts(batch, setting.config.vocab_size)
    long, short = _params(workload, workload.output_len + 1), _params(workload, 1)
    half = max(workload.output_len // 2, 1)
    step_ms = None
    extra: Mapping[str, Any] = {}
    # Warms up as well, so that nothing is compiled or recorded in what follows.
    with paused_batch(llm.core, prompts, _params(workload, half + 2 * BLOCK_SIZE), after=half) as paused:
        if paused is not None:
            step_ms = paused.step_ms()
            if at_rest is not None:
                extra = at_rest(batch, paused)
    steps: list[float] = []
    means, firsts = [], []
    launches = tokens = 0
    busy = 0.0
    for _ in range(workload.repeats):
        began = time.process_time()
        firsts.append(drive(llm.core, prompts, short).seconds)
        before, busy = llm.stats(), busy - (time.process_time() - began)
        began = time.process_time()
        with stamped_loops(llm.core) as stamps:
            timeline = drive(llm.core, prompts, long)
        after, busy = llm.stats(), busy + time.process_time() - began
        launches += after.decode_launches - before.decode_launches
        tokens += after.decoded_tokens - before.decoded_tokens
        if launch_mode == "loop":
            steps += [float(each) * 1e-9 for loop in stamps for each in loop[2:] - loop[1:-1]]
        else:
            steps += timeline.step_seconds(batch)
        means.append((timeline.seconds - firsts[-1]) / workload.output_len)
    found = llm.stats()
    if found.launch_mode != launch_mode:
        raise ValueError(f"launch mode {launch_mode} cannot be had here (the log says why); leave it out")
    return setting.record(
        batch,
        engine="mainspring",
        version=mainspring.__version__,
        launch_mode=launch_mode,
        mean_seconds=statistics.median(means),
        first_seconds=statistics.median(firsts),
        steps=steps,
        step_ms=step_ms,
        extra={
            "launches_per_token": launches / tokens,
            "cpu_us_per_token": 1e6 * busy / tokens,
            "loop_gap_ms": found.loop_gap_ms,
            **extra,
        },
    )


def _params(workload: Workload, max_tokens: int) -> SamplingParams:
    import mainspring

    sampling: dict[str, Any] = SAMPLED if workload.sampled else {"temperature": 0.0}
    return mainspring.SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False, **sampling)
