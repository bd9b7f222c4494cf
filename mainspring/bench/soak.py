"""Soak: requests of random shape and parameters through a pool that forces preemption, checked against a large one.

Nothing is timed here. Random arrivals, lengths, priorities, choices and aborts drive one engine whose KV pool is
much too small for its seats. Then the greedy answers are computed again, by an engine with a large pool. In fp32
they must be equal token for token, except where two logits are so close that the order of a sum decides.
"""

from __future__ import annotations

import random
import resource
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mainspring import LLM, SamplingParams
from mainspring.bench.shapes import BenchModel
from mainspring.engine.answers import Answer

#: Bytes by which memory may grow once everything has run once: allocators round, a rung may be recorded late, and on a
#: CPU oneDNN keeps half a megabyte for each weight's shape and padded number of rows (see ``kernels.linear``).
MEMORY_SLACK = {"cuda": 64 << 20, "cpu": 192 << 20}
#: Two logits closer than this may change places between runs that sum in another order.
TIE = 1e-3


@dataclass(frozen=True)
class Job:
    """One request: what it asks, when it comes (in engine steps) and after how many tokens it is aborted (0: never)."""

    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int
    arrives_at: int
    abort_after: int

    @property
    def is_compared(self) -> bool:
        """Whether the answer depends on the request alone: greedy and carried to its end."""
        return self.params.temperature == 0.0 and not self.abort_after


@dataclass
class SoakReport:
    """What a soak found."""

    model: str = ""
    launch_mode: str = ""
    requests: int = 0
    steps: int = 0
    tokens: int = 0
    aborted: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    compared: int = 0
    ties: int = 0
    different: list[int] = field(default_factory=list)
    blocks: int = 0
    free_blocks: int = 0
    memory_early: int = 0
    memory_late: int = 0
    memory_slack: int = 0
    loop_launches: int = 0
    loop_steps: int = 0

    @property
    def ok(self) -> bool:
        """No answer differed, no block was leaked, memory stayed flat, and the pool was really too small. In loop mode
        some steps were made by loops."""
        flat = self.memory_late <= self.memory_early + self.memory_slack
        looped = self.launch_mode != "loop" or self.loop_steps > 0
        return not self.different and self.free_blocks == self.blocks and flat and self.preemptions > 0 and looped


def random_jobs(count: int, seed: int, vocab_size: int, max_prompt: int, max_tokens: int, spread: int) -> list[Job]:
    """``count`` jobs in order of arrival, over ``spread`` steps; some share the beginning of their prompt."""
    rng = random.Random(seed)
    shared = [[rng.randrange(3, vocab_size) for _ in range(max_prompt)] for _ in range(4)]
    jobs = []
    for arrives_at in sorted(rng.randrange(spread) for _ in range(count)):
        length = rng.randint(1, max_prompt)
        common = rng.choice([0, 0, rng.randint(0, length)])
        prompt = rng.choice(shared)[:common] + [rng.randrange(3, vocab_size) for _ in range(length - common)]
        jobs.append(
            Job(
                prompt_token_ids=prompt,
                params=_random_params(rng, max_tokens, vocab_size),
                priority=rng.choice([0, 0, 0, 1, 2]),
                arrives_at=arrives_at,
                abort_after=rng.choice([0] * 9 + [rng.randint(1, max_tokens)]),
            )
        )
    return jobs


def _random_params(rng: random.Random, max_tokens: int, vocab_size: int) -> SamplingParams:
    greedy = rng.random() < 0.6
    length = rng.randint(1, max_tokens)
    return SamplingParams(
        temperature=0.0 if greedy else rng.uniform(0.2, 1.5),
        top_k=rng.choice([0, 0, 1, 20]),
        top_p=rng.choice([1.0, 0.9, 0.5]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        seed=rng.getrandbits(32),
        n=1 if greedy else rng.choice([1, 1, 1, 3]),
        max_tokens=length,
        min_tokens=rng.choice([0, 0, length // 2]),
        stop_token_ids=rng.sample(range(3, vocab_size), rng.choice([0, 0, 2])),
        ignore_eos=rng.choice([True, False]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.0, 0.7]),
        frequency_penalty=rng.choice([0.0, 0.0, -0.4]),
        logit_bias=rng.choice([None, None, {rng.randrange(3, vocab_size): 5.0}]),
        logprobs=rng.choice([None, None, None, 3]),
    )


def drive(llm: LLM, jobs: Sequence[Job], report: SoakReport) -> list[Answer]:
    """Run the jobs to their end, each from its step on; counts go to ``report``."""
    core, step = llm.core, 0
    answers: list[Answer] = []
    live: dict[str, Job] = {}
    waiting = list(reversed(jobs))
    while waiting or core.has_work():
        while waiting and (waiting[-1].arrives_at <= step or not core.has_work()):
            job = waiting.pop()
            name = str(len(answers))
            live[name] = job
            answers.append(core.add(name, job.prompt_token_ids, job.params, priority=job.priority))
        for answer in core.step():
            job = live[answer.request_id]
            if job.abort_after and not answer.finished and _generated(answer) >= job.abort_after:
                core.abort(answer)
                report.aborted += 1
        step += 1
    report.requests += len(answers)
    report.steps += step
    report.tokens += sum(map(_generated, answers))
    report.cached_tokens += sum(choice.request.num_cached_tokens for answer in answers for choice in answer.choices)
    return answers


def soak(small: LLM, large: LLM, jobs: Sequence[Job]) -> SoakReport:
    """Drive ``jobs`` through ``small`` and compare its greedy answers with those of ``large``.

    A fifth of them runs once beforehand, so that what is recorded or cached at first use is there when memory is read.
    """
    device = small.core.limits.device
    drive(small, jobs[: len(jobs) // 5], SoakReport())
    report = SoakReport(memory_early=memory_in_use(device), memory_slack=MEMORY_SLACK[device.type])
    answers = drive(small, jobs, report)
    report.memory_late = memory_in_use(device)
    stats = small.stats()
    report.launch_mode, report.preemptions = stats.launch_mode, stats.preemptions
    report.loop_launches, report.loop_steps = stats.loop_launches, stats.loop_steps
    report.blocks, report.free_blocks = small.core.memory.num_blocks, small.core.scheduler.pool.num_free
    compared = [index for index, job in enumerate(jobs) if job.is_compared]
    expected = large.generate(
        [{"prompt_token_ids": jobs[index].prompt_token_ids} for index in compared],
        [jobs[index].params for index in compared],
    )
    for index, output in zip(compared, expected, strict=True):
        report.compared += 1
        actual = answers[index].choices[0].request.output_token_ids
        wanted = list(output.outputs[0].token_ids)
        if actual == wanted:
            continue
        same = next((i for i, (a, b) in enumerate(zip(actual, wanted, strict=False)) if a != b), len(wanted))
        if is_near_tie(large, jobs[index], wanted[:same]):
            report.ties += 1
        else:
            report.different.append(index)
    return report


def soak_model(
    model: BenchModel,
    device: str | None,
    dtype: str,
    *,
    requests: int,
    seats: int,
    blocks: int,
    seed: int,
    launch_mode: str | None = None,
) -> tuple[torch.device, SoakReport]:
    """Make both engines, soak, and say on which device it was. The large pool is what the device has room for.

    The engine with the small pool runs in ``launch_mode``, the one that it is compared with in graph mode.
    """
    options: dict[str, Any] = {
        "load_format": model.load_format,
        "skip_tokenizer_init": True,
        "device": device,
        "dtype": dtype,
        "max_model_len": 1024,
        "max_num_seqs": seats,
        "max_num_batched_tokens": 512,
        "gpu_memory_utilization": 0.4,
    }
    with LLM(model.path, **options, num_gpu_blocks_override=blocks, launch_mode=launch_mode) as small:
        jobs = random_jobs(requests, seed, small.core.config.vocab_size, 60, 200, spread=requests // 2)
        with LLM(model.path, **{**options, "gpu_memory_utilization": 0.8, "launch_mode": "graph"}) as large:
            report = soak(small, large, jobs)
            report.model = model.title
        return small.core.limits.device, report


def is_near_tie(llm: LLM, job: Job, output: list[int]) -> bool:
    """Whether the two tokens that ``job`` would likeliest go on with after ``output`` are closer than ``TIE``."""
    token_ids, params = [*job.prompt_token_ids, *output], job.params
    llm.generate({"prompt_token_ids": token_ids}, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    logits = llm.core.runner.logits[0].double().cpu()
    for token in set(token_ids):
        logits[token] *= params.repetition_penalty if logits[token] < 0 else 1 / params.repetition_penalty
    for token, count in Counter(output).items():
        logits[token] -= params.presence_penalty + count * params.frequency_penalty
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    if len(output) < params.min_tokens:
        eos = () if params.ignore_eos else llm.core.config.eos_token_ids
        logits[[*(params.stop_token_ids or ()), *eos]] = -torch.inf
    best = logits.topk(2).values
    return bool(best[0] - best[1] < TIE)


def memory_in_use(device: torch.device) -> int:
    """Bytes that torch holds on a GPU; on a CPU the process's resident size."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _generated(answer: Answer) -> int:
    return sum(len(choice.request.output_token_ids) for choice in answer.choices)
