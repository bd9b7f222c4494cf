"""The process whose start is timed: ``python -m mainspring.bench.startup_probe JOB RESULT``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 128


class Stages:
    """Seconds by stage, each without those of the stages inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = [0.0]

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, with what it takes added to ``stage``."""

        @wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            self._inner.append(0.0)
            try:
                return function(*arguments, **options)
            finally:
                passed = time.perf_counter() - started
                own = passed - self._inner.pop()
                self._inner[-1] += passed
                self.seconds[stage] = self.seconds.get(stage, 0.0) + own

        return run


def main(job: Path, result: Path) -> None:
    """Start an engine as ``job`` says, make its first token, and write what each stage took."""
    asked = json.loads(job.read_text(encoding="utf-8"))
    stages = Stages()
    llm_class, params = stages.timed("import", _import_engine)()
    _watch(stages)
    llm = stages.timed("rest of the engine", llm_class)(asked["model"], **asked["options"])
    length = min(PROMPT_TOKENS, llm.core.limits.max_model_len - 1)
    prompt = {"prompt_token_ids": [index % llm.core.config.vocab_size for index in range(length)]}
    stages.timed("first token", llm.generate)(prompt, params)
    ready = time.time()
    stats = llm.stats()
    recorders = [runner.counters for runner in llm.core.runner.all_runners]
    decode = [runner.counters for runner in llm.core.runner.runners.values()]
    told = {
        "ready": ready,
        "stages": stages.seconds,
        "rungs": len(llm.core.limits.ladder.sizes) + len(llm.core.limits.prefill_ladder or ()),
        "recording_seconds": stats.recording_seconds,
        "recorded_bytes": stats.recorded_bytes,
        "decode_seconds": sum(counters.capture_seconds for counters in decode),
        "warm_up_runs": sum(report.runs for counters in decode for report in counters.captures.values()),
        "audit_seconds": sum(counters.audit_seconds for counters in recorders),
    }
    llm.close()
    result.write_text(json.dumps(told), encoding="utf-8")


def _import_engine() -> tuple[Any, Any]:
    from mainspring import LLM, SamplingParams

    return LLM, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)


def _watch(stages: Stages) -> None:
    """Time the engine's stages where it calls them."""
    from mainspring.engine import core
    from mainspring.engine.model_runner import ModelRunner

    for owner, name, stage in (
        (core, "load_config", "read the configuration"),
        (core, "load_model", "load weights"),
        (core, "plan_memory", "size the KV cache"),
        (ModelRunner, "record", "record"),
    ):
        setattr(owner, name, stages.timed(stage, getattr(owner, name)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
