"""Reads and audits every recording of a model's whole ladder: how long that takes, and whose addresses there are.

    python benchmarks/read_recordings.py                      # Qwen3-0.6B's shape with random weights, on a GPU
    python benchmarks/read_recordings.py --model tiny --device cpu

Exits with 1 where an audit finds something, or where a pointer's owner is not known.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from mainspring import LLM, SamplingParams
from mainspring.bench.shapes import open_model
from mainspring.graphs import Recording


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--device", default=None)
    parser.add_argument("--max-num-seqs", type=int, default=None)
    parser.add_argument("--out", type=Path, help="a folder for recording.json and summary.json")
    arguments = parser.parse_args()
    with open_model(arguments.model) as model:
        started = time.perf_counter()
        options: dict[str, Any] = {"max_num_seqs": arguments.max_num_seqs, "device": arguments.device}
        given = {name: value for name, value in options.items() if value is not None}
        with LLM(
            model.path, load_format=model.load_format, skip_tokenizer_init=True, max_model_len=4096, **given
        ) as llm:
            summary = {
                "model": model.title,
                "engine_seconds": time.perf_counter() - started,
                **look(llm, arguments.out),
            }
    print(json.dumps(summary, indent=1))
    if arguments.out:
        (arguments.out / "summary.json").write_text(json.dumps(summary, indent=1))
    faults = [*summary["findings"]]
    if summary["pointers_of_unknown_owner"]:
        faults.append(f"{summary['pointers_of_unknown_owner']} typed pointers whose owner is not known")
    for fault in faults:
        print(fault, file=sys.stderr)
    sys.exit(1 if faults else 0)


class CollectorClock:
    """Seconds that Python's garbage collector took: the objects of a reading may make it look at all there are."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._started = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._started

    def lap(self) -> float:
        """Seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def stop(self) -> None:
        """Count no more."""
        gc.callbacks.remove(self._note)


def look(llm: LLM, out: Path | None) -> dict[str, Any]:
    """Read and audit, three times each: the first reading may import and load what the others find.

    What counts is `read_and_audit_seconds`, of the first time, with what the garbage collector took of it. What each
    recording was read and audited for by itself, right after it was made, is in `audit_after_capture_seconds`.
    """
    # One sampled request records a rung of the full step, so that both variants are looked at.
    llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(temperature=1.0, seed=1, max_tokens=2))
    read, audited, collected = [], [], []
    clock = CollectorClock()
    for _ in range(3):
        clock.lap()
        started = time.perf_counter()
        recording = llm.recording()
        read.append(time.perf_counter() - started)
        started = time.perf_counter()
        reports = llm.audit()
        audited.append(time.perf_counter() - started)
        collected.append(clock.lap())
    clock.stop()
    if out:
        out.mkdir(parents=True, exist_ok=True)
        recording.save(out / "recording.json")
    stats = llm.stats()
    return {
        "rungs": len(recording.rungs),
        "operations": sum(len(rung.operations) for rung in recording.rungs),
        "read_seconds": read,
        "audit_seconds": audited,
        "collector_seconds": collected,
        "read_and_audit_seconds": read[0] + audited[0],
        "audit_after_capture_seconds": sum(runner.counters.audit_seconds for runner in llm.core.runner.all_runners),
        "recording_seconds": stats.recording_seconds,
        "addresses_by_kind_of_owner": dict(recording.owners()),
        "pointers_of_unknown_owner": sum(
            entry.typed and entry.kind in ("unknown", "freed") for rung in recording.rungs for entry in rung.addresses
        ),
        "words_of_unknown_owner": sum(rung.unresolved for rung in recording.rungs),
        "findings": [str(finding) for report in reports.values() for finding in report.findings],
        "programmatic_edges": sum(
            edge.kind == "programmatic"
            for rung in recording.rungs
            for operation in rung.operations
            for edge in operation.dependencies
        ),
        "bytes": dict(recording.totals),
        "expected_and_taken": None if llm.core.recorded is None else vars(llm.core.recorded),
        "largest_rung": describe(recording),
    }


def describe(recording: Recording) -> dict[str, Any]:
    """The largest rung's kernels by name, and what lies in memory that is not named."""
    rung = max(recording.rungs, key=lambda rung: rung.size)
    owners = Counter(entry.owner for entry in rung.addresses if entry.kind not in ("buffer", "opaque"))
    return {
        "size": rung.size,
        "operations": dict(Counter(operation.name for operation in rung.operations).most_common()),
        "unnamed_owners": dict(owners.most_common(20)),
    }


if __name__ == "__main__":
    main()
