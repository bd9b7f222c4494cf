"""Is the fast path right, and is it fast? The GPU tests of its kernels, then decode latency with it and without it.

    python benchmarks/check_fast_path.py --out "$OUT" --budget 200

Every part is a process of its own with its own log and time limit, so that one that fails or hangs hides no other.
Parts that no time is left for are named as such. Tests and warm-ups (which fill Triton's cache on disk) run together,
what is timed runs alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b")
BATCHES = "1,16,64"
TESTS = {
    "products": ["tests/kernels/test_gemv.py", "tests/kernels/test_linear_kernels.py"],
    "step": ["tests/kernels/test_triton_kernels.py"],
    "engine": ["tests/engine/test_recorded_step.py"],
}
RACES = ["tests/kernels/test_step_pdl.py", "tests/kernels/test_gemv_pdl.py"]


@dataclass
class Part:
    """A command with a log of its own."""

    name: str
    command: list[str]
    limit: float
    environment: dict[str, str] = field(default_factory=dict)
    outcome: str = "no time left"
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0

    def start(self, out: Path) -> None:
        """Begin, in a session of its own."""
        self.started = time.monotonic()
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"} | self.environment
        with (out / f"{self.name}.log").open("wb") as log:
            self.process = subprocess.Popen(
                self.command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def finish(self, deadline: float) -> None:
        """Wait, and stop what takes too long."""
        if self.process is None:
            return
        try:
            code = self.process.wait(max(1.0, min(self.started + self.limit, deadline) - time.monotonic()))
            self.outcome = "passed" if code == 0 else f"FAILED ({code})"
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.outcome = "STOPPED"
        self.outcome += f" after {time.monotonic() - self.started:.0f} s"


def pytest_part(name: str, files: list[str], workers: int, limit: float) -> Part:
    """Tests that need a GPU, spread over ``workers`` processes where pytest-xdist is there."""
    spread = ["-n", str(workers)] if importlib.util.find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short", *spread]
    return Part(f"test-{name}", [*command, *files], limit)


def bench_part(name: str, model: str, out: Path, fast: bool, extra: list[str], limit: float) -> Part:
    """``mainspring bench latency`` of one model."""
    command = [sys.executable, "-m", "mainspring", "bench", "latency", "--model", model, "--dtype", "bfloat16"]
    json_file = str(out / f"{name}.json")
    environment = {"MAINSPRING_FAST": "1" if fast else "0"}
    return Part(name, [*command, *extra, "--json", json_file], limit, environment)


def last_lines(out: Path, part: Part, count: int) -> str:
    """The end of a part's log."""
    path = out / f"{part.name}.log"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n".join("    " + line[:200] for line in lines[-count:])


def figures(out: Path, name: str) -> dict[int, dict[str, float]]:
    """Records of one bench, by batch."""
    path = out / f"{name}.json"
    if not path.exists():
        return {}
    return {record["batch"]: record for record in json.loads(path.read_text())}


def show(out: Path) -> None:
    """TPOT and the recorded step alone, with the fast path and without."""
    print(f"\n{'model':14}{'batch':>6}{'tpot':>9}{'step':>9}{'plain':>9}{'step':>9}{'floor':>9}   ms")
    for model in MODELS:
        fast, plain = figures(out, f"fast-{model}"), figures(out, f"plain-{model}")
        for batch in sorted({*fast, *plain}):
            row = [(fast.get(batch) or {}).get(key) for key in ("tpot_ms", "step_ms")]
            row += [(plain.get(batch) or {}).get(key) for key in ("tpot_ms", "step_ms")]
            row.append((fast.get(batch) or plain[batch]).get("floor_ms"))
            cells = "".join(f"{'-':>9}" if value is None else f"{value:9.3f}" for value in row)
            print(f"{model:14}{batch:6}{cells}")
    for name in ("long-fast", "long-plain"):
        for batch, record in figures(out, name).items():
            print(f"{name}, 8,192 tokens of context, batch {batch}: {record['tpot_ms']:.3f} ms")


def main() -> None:
    """Run the parts and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="folder for logs")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds in all")
    parser.add_argument("--no-tests", action="store_true", help="only measure")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    options = parser.parse_args()
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.json"):
        if old.stem.startswith(("fast-", "plain-", "warm-", "long-")):
            old.unlink()
    deadline = time.monotonic() + options.budget
    shape = ["--batch", BATCHES, "--input-len", "128", "--output-len", "256"]
    warm = [bench_part(f"warm-{m}", m, out, True, [*shape, "--repeats", "1"], 80) for m in options.models]
    tests = [] if options.no_tests else [pytest_part(name, files, 4, 80) for name, files in TESTS.items()]
    alone = [] if options.no_tests else [pytest_part("races", RACES, 8, 60)]
    for model in options.models:
        alone.append(bench_part(f"fast-{model}", model, out, True, [*shape, "--repeats", "2"], 40))
    for model in options.models:
        alone.append(bench_part(f"plain-{model}", model, out, False, [*shape, "--repeats", "1"], 40))
    if "llama-3.1-8b" in options.models:
        long = ["--batch", "1", "--context", "8192", "--output-len", "64", "--repeats", "1"]
        alone.append(bench_part("long-fast", "llama-3.1-8b", out, True, long, 40))
    for part in [*tests, *warm]:
        part.start(out)
    for part in [*tests, *warm]:
        part.finish(deadline)
        print(f"{part.name:20} {part.outcome}", flush=True)
    for part in alone:
        if deadline - time.monotonic() > 8:
            part.start(out)
            part.finish(deadline)
        print(f"{part.name:20} {part.outcome}", flush=True)
    show(out)
    for part in [*tests, *warm, *alone]:
        if not part.outcome.startswith("passed"):
            print(f"\n== {part.name}: {part.outcome}\n{last_lines(out, part, 25)}")


if __name__ == "__main__":
    main()
