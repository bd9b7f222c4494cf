"""What an answer costs the processor: microseconds of processor time per token, beside the steps themselves.

    python benchmarks/loop_cpu.py                     # a minute model; in `loop` its steps run in a thread of their own
    python benchmarks/loop_cpu.py qwen3-0.6b loop     # on a GPU
    python benchmarks/loop_cpu.py --step-ms 0.65      # with steps that last so long, and take no processor time
    python benchmarks/loop_cpu.py --profile           # and which functions the time goes to
    python benchmarks/loop_cpu.py --hog               # and how much longer it takes beside a thread that wants the lock

Of the answer's time that of its first token is taken off: prompt, prefill and the first launch. `thread` is the time of
the thread that drives the engine. Where a loop is emulated, its steps run in another, so there it is the engine's own.
`process` is all threads', a GPU's driver's among them. Medians of `--repeats` answers; wall times in milliseconds.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mainspring import LLM, SamplingParams
from mainspring.bench.busy import busy_cpu
from mainspring.bench.latency import drive
from mainspring.bench.shapes import BenchModel, open_model
from mainspring.graphs import CpuGraph
from mainspring.kernels.seats import EXHAUSTED, RUNNING

#: Small enough that a step on a CPU takes about as long as one of a real model on a GPU.
MINUTE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


@dataclass
class Clocks:
    """Seconds of one answer: by the wall's clock, the process's, and each Python thread's, by its name."""

    wall: float
    process: float
    threads: dict[str, float]

    def __sub__(self, other: Clocks) -> Clocks:
        threads = {name: seconds - other.threads.get(name, 0.0) for name, seconds in self.threads.items()}
        return Clocks(self.wall - other.wall, self.process - other.process, threads)

    @property
    def driving(self) -> float:
        """Seconds of the thread that drives the engine."""
        return self.threads[threading.current_thread().name]

    @staticmethod
    def now() -> Clocks:
        """All clocks, read one after the other."""
        alive = [(each.name, each.ident) for each in threading.enumerate() if each.ident is not None]
        threads = {name: time.clock_gettime(time.pthread_getcpuclockid(ident)) for name, ident in alive}
        return Clocks(time.perf_counter(), time.process_time(), threads)


@contextmanager
def model_named(name: str) -> Iterator[BenchModel]:
    """The minute model, or one that `mainspring bench` knows."""
    if name != "minute":
        with open_model(name) as model:
            yield model
        return
    with tempfile.TemporaryDirectory(prefix="mainspring-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MINUTE), encoding="utf-8")
        yield BenchModel("minute", folder, "dummy")


@contextmanager
def paced_steps(llm: LLM, seconds: float) -> Iterator[None]:
    """Inside, decode steps on the CPU sleep instead of computing: each row gets a token, until none is left to it.

    So what the engine does beside them runs undisturbed, at a GPU's pace.
    """
    runner = llm.core.runner
    remaining, record = runner.seats.remaining.numpy(), runner.note.rows.numpy()
    go_on, until = runner.note.go_on.numpy(), runner.note.policy.numpy()
    step, replay = runner.ring.step.numpy(), CpuGraph.replay
    due = [0.0]

    def paced(graph: CpuGraph) -> None:
        now = time.perf_counter()
        due[0] = max(due[0] + seconds, now)  # on time, where a sleep before lasted too long
        time.sleep(due[0] - now)
        remaining[:] -= 1
        step[:] += 1
        record[:, 0] = 7
        record[:, 1] = RUNNING if remaining[0] > 0 else EXHAUSTED
        go_on[:] = remaining[0] > 0 and step[0] < until[0]

    CpuGraph.replay = paced  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        CpuGraph.replay = replay  # type: ignore[method-assign]


def answer(llm: LLM, prompts: Sequence[Sequence[int]], tokens: int) -> Clocks:
    """What `tokens` tokens for each prompt take."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    before = Clocks.now()
    drive(llm.core, prompts, params)
    return Clocks.now() - before


def measure(llm: LLM, prompts: Sequence[Sequence[int]], tokens: int, repeats: int) -> dict[str, Any]:
    """Medians over `repeats` answers: wall milliseconds, and microseconds of processor time per token."""
    firsts, wholes = [], []
    for _ in range(repeats):
        firsts.append(answer(llm, prompts, 1))
        wholes.append(answer(llm, prompts, tokens))
    each = [(whole - first) for whole, first in zip(wholes, firsts, strict=True)]
    count = (tokens - 1) * len(prompts)
    names = [name for name in each[0].threads if name != threading.current_thread().name]
    others = {name: statistics.median(part.threads[name] for part in each) for name in names}
    others["not Python's"] = statistics.median(part.process - sum(part.threads.values()) for part in each)
    return {
        "first_token_ms": round(1e3 * statistics.median(first.wall for first in firsts), 3),
        "answer_ms": round(1e3 * statistics.median(whole.wall for whole in wholes), 3),
        "process_us_per_token": round(1e6 * statistics.median(part.process for part in each) / count, 2),
        "thread_us_per_token": round(1e6 * statistics.median(part.driving for part in each) / count, 2),
        "other_threads_us_per_token": {name: round(1e6 * seconds / count, 2) for name, seconds in others.items()},
    }


def profile(llm: LLM, prompts: Sequence[Sequence[int]], tokens: int) -> None:
    """Print which functions of the driving thread one answer's time goes to, by processor time."""
    profiler = cProfile.Profile(time.thread_time)
    profiler.enable()
    answer(llm, prompts, tokens)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("model", nargs="?", default="minute", help="minute, or as in `mainspring bench`")
    parser.add_argument("mode", nargs="?", default="loop", choices=["loop", "graph", "eager"], help="launch mode")
    parser.add_argument("--batch", type=int, default=1, help="requests at a time")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--repeats", type=int, default=5, help="answers measured")
    parser.add_argument("--step-ms", type=float, help="on a CPU: let each decode step only last, this long")
    parser.add_argument("--profile", action="store_true", help="print a profile of one answer")
    parser.add_argument("--hog", action="store_true", help="measure again beside a thread that wants the interpreter")
    parser.add_argument("--spinners", type=int, default=0, help="with --hog: processes that keep cores busy as well")
    options = parser.parse_args()
    if not cuda:
        torch.set_num_threads(1)
    prompts = [[5 + (7 * row + 3 * at) % 200 for at in range(options.input_len)] for row in range(options.batch)]
    blocks = 2 * options.batch * (-(-(options.input_len + options.output_len) // 16) + 2)
    with ExitStack() as stack:
        model = stack.enter_context(model_named(options.model))
        llm = stack.enter_context(
            LLM(
                model.path,
                load_format=model.load_format,
                device="cuda" if cuda else "cpu",
                launch_mode=options.mode,
                max_model_len=options.input_len + options.output_len + 16,
                max_num_seqs=options.batch,
                num_gpu_blocks_override=blocks,
                skip_tokenizer_init=True,
                enable_prefix_caching=False,
            )
        )
        if options.step_ms is not None:
            if cuda:
                parser.error("--step-ms is for steps on a CPU; a GPU has a pace of its own")
            stack.enter_context(paced_steps(llm, options.step_ms / 1e3))
        answer(llm, prompts, options.output_len)  # nothing is made for the first time below
        result: dict[str, Any] = {
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "model": model.title,
            "launch_mode": llm.stats().launch_mode,
            "batch": options.batch,
            "output_len": options.output_len,
        }
        result.update(measure(llm, prompts, options.output_len, options.repeats))
        if options.hog:
            with busy_cpu(options.spinners):
                result["beside_a_hog"] = measure(llm, prompts, options.output_len, options.repeats)
        print(json.dumps(result, indent=2))
        if options.profile:
            profile(llm, prompts, options.output_len)


if __name__ == "__main__":
    main()
