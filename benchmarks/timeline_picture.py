"""A picture of when the device is busy and when it waits: the same tokens of one request, eager, graph and loop.

    python benchmarks/timeline_picture.py qwen3-0.6b --tokens 20 --out "$OUT"
    python benchmarks/timeline_picture.py --redraw docs/images/timeline.json --out docs/images

Writes timeline.svg and timeline.json, which holds every interval. Each mode has an engine of its own, with the same
weights, and decodes the same tokens; where they are not the same, nothing is written. Eager and recorded steps are
timed by the profiler, on a GPU by its own clock; loops by the stamps that they take on the device. There, steps count
as busy from begin to end.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # before torch is imported: some builds' profiler talks about itself

from mainspring import LLM
from mainspring.bench.latency import engine_options
from mainspring.bench.records import provenance
from mainspring.bench.setting import open_setting
from mainspring.bench.workload import Workload
from mainspring.inspect.picture import figure_text, render_picture
from mainspring.inspect.same_tokens import FIRST_TOKEN, TOKENS_BEHIND, ModeTimeline, watch_tokens

MODES = ("eager", "graph", "loop")


def measure(model: str, tokens: int, prompt_tokens: int, dtype: str, device: str | None) -> dict[str, Any]:
    """What the picture is drawn from, as plain data. Raises `ValueError` where a mode cannot be had, or its tokens are
    others."""
    workload = Workload((1,), prompt_tokens, FIRST_TOKEN + tokens + TOKENS_BEHIND, repeats=1)
    with open_setting(model, dtype, device, workload, measure_bandwidth=False) as setting:
        [prompt] = workload.prompts(1, setting.config.vocab_size)
        with ExitStack() as stack:
            engines = [stack.enter_context(LLM(setting.model.path, **engine_options(setting, mode))) for mode in MODES]
            for mode, llm in zip(MODES, engines, strict=True):
                if llm.stats().launch_mode != mode:
                    raise ValueError(f"launch mode {mode} cannot be had here; the log says why")
            modes = watch_tokens([llm.core for llm in engines], prompt, tokens)
        where = asdict(provenance(setting.device))
        about = {
            "model": setting.model.title,
            "weights": "random" if setting.model.load_format == "dummy" else "from files",
            "dtype": setting.dtype_name,
            "batch": 1,
            "prompt_tokens": prompt_tokens,
            "first_token": FIRST_TOKEN,
        }
    command = shlex.join(["python", f"benchmarks/{Path(__file__).name}", *sys.argv[1:]])
    return {**where, "command": command, **about, "modes": [mode.as_dict() for mode in modes]}


def draw(data: dict[str, Any]) -> str:
    """The picture of what `measure` gave."""
    return render_picture([ModeTimeline.from_dict(mode) for mode in data["modes"]], data)


def table(data: dict[str, Any]) -> str:
    """The figures in Markdown, a column for each mode."""
    figures = [ModeTimeline.from_dict(mode).figures() for mode in data["modes"]]

    def row(name: str, values: list[float | None]) -> str:
        return f"| {name} | " + " | ".join("none" if each is None else figure_text(each) for each in values) + " |"

    return "\n".join(
        [
            "| | " + " | ".join(mode["mode"] for mode in data["modes"]) + " |",
            "|---" * (1 + len(figures)) + "|",
            row("ms per token", [each.ms_per_token for each in figures]),
            row("without the profiler", [each.ms_per_token_unwatched for each in figures]),
            row("busy, %", [100 * each.busy_share for each in figures]),
            row("busy, ms per token", [each.busy_ms_per_token for each in figures]),
            row("gaps per token", [each.gaps / data["modes"][0]["steps"] for each in figures]),
            row("median gap, us", [each.median_gap_us for each in figures]),
            row("largest gap, us", [each.largest_gap_us for each in figures]),
            row("launches by the CPU per token", [each.launches_per_token for each in figures]),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen3-0.6b", help="a shape with random weights, or a folder")
    parser.add_argument("--tokens", type=int, default=20, help="tokens that are watched")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="length of the prompt")
    parser.add_argument("--dtype", default="auto", help="of the weights")
    parser.add_argument("--device", help="cuda or cpu; by default a GPU if there is one")
    parser.add_argument("--out", type=Path, default=Path(), help="folder to write to")
    parser.add_argument("--redraw", type=Path, metavar="FILE", help="draw what a timeline.json holds; measure nothing")
    options = parser.parse_args()
    if options.tokens < 1:
        parser.error(f"--tokens is {options.tokens}; give at least 1")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.redraw is not None:
        data = json.loads(options.redraw.read_text(encoding="utf-8"))
    else:
        data = measure(options.model, options.tokens, options.prompt_tokens, options.dtype, options.device)
        (options.out / "timeline.json").write_text(json.dumps(data, allow_nan=False) + "\n", encoding="utf-8")
    (options.out / "timeline.svg").write_text(draw(data), encoding="utf-8")
    print(table(data))


if __name__ == "__main__":
    main()
