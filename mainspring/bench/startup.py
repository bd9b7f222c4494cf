"""Start-up: from starting Python to the first token, once without and once with compiled kernels in the caches.

Each start is a process of its own. Cold means empty Triton and CUDA kernel caches; the operating system's cache of
files is left as it is, so weights and libraries that were read shortly before come from memory.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mainspring.bench.checkpoint import write_checkpoint
from mainspring.bench.child import run_module
from mainspring.bench.latency import LAUNCH_MODES
from mainspring.bench.shapes import EMBEDDED_MODEL, BenchModel, open_model
from mainspring.engine.limits import choose_device
from mainspring.models.loader import load_config, resolve_dtype
from mainspring.models.source import resolve

if TYPE_CHECKING:
    import torch

#: Environment variables that say where compiled kernels are kept.
CACHES = ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH")


@dataclass(frozen=True)
class StartupRecord:
    """One start; all times in seconds. ``seconds`` is from starting the process to the first token.

    ``stages`` add up to it: Python itself, imports, configuration, weights, sizing the KV cache, recording, the first
    token, and what else the engine does. ``recording_seconds`` is what recording the ladder of ``rungs`` rungs took
    for good, without what was recorded for sizing and dropped; ``recorded_bytes`` is what it holds. ``decode_seconds``
    is the decode step's part of that, without the prefill step's rungs, and ``warm_up_runs`` how often the step ran for
    it. ``audit_seconds`` comes on top: reading and auditing all that was recorded, for sizing too.
    """

    model: str
    dtype: str
    launch_mode: str
    engine: str
    cache: str
    weights_from: str
    seconds: float
    stages: Mapping[str, float]
    rungs: int
    recording_seconds: float
    recorded_bytes: int
    decode_seconds: float
    warm_up_runs: int
    audit_seconds: float


def startups(
    name: str, dtype: str, device: str | None, launch_mode: str, max_num_seqs: int | None, weights: str
) -> Iterator[tuple[torch.device, StartupRecord]]:
    """A cold and a warm start of a model, with the device that each ran on.

    A model without weights is written to disk first, unless ``weights`` is ``dummy``. Raises ``ValueError`` for an
    unknown model, launch mode or kind of weights.
    """
    if weights not in ("disk", "dummy"):
        raise ValueError(f"weights {weights!r} is not known; give disk or dummy")
    if launch_mode not in LAUNCH_MODES:
        raise ValueError(f"launch mode {launch_mode!r} is not known; give {' or '.join(LAUNCH_MODES)}")
    with open_model(name) as model, tempfile.TemporaryDirectory(prefix="mainspring-weights-") as folder:
        where = choose_device(device)
        config = load_config(resolve(model.path, weights=model.load_format != "dummy"))
        chosen = resolve_dtype(dtype, config, where)
        if model.load_format == "dummy" and weights == "disk":
            write_checkpoint(config, Path(model.path) / "config.json", Path(folder), chosen)
            model = BenchModel(model.title, folder, "auto")
        options: dict[str, Any] = {
            "dtype": str(chosen).removeprefix("torch."),
            "device": str(where),
            "load_format": model.load_format,
            "skip_tokenizer_init": not _has_tokenizer(model),
            "max_num_seqs": max_num_seqs,
            "progress": False,
            "launch_mode": launch_mode,
        }
        for record in measure_startup(model, options, options["dtype"], launch_mode):
            yield where, record


def measure_startup(model: BenchModel, options: Mapping[str, Any], dtype: str, mode: str) -> Iterator[StartupRecord]:
    """Start ``LLM(model.path, **options)`` cold, then warm. Raises ``EngineError`` when a start fails."""
    with tempfile.TemporaryDirectory(prefix="mainspring-startup-") as scratch:
        environment = {**os.environ, **{name: str(Path(scratch) / name) for name in CACHES}}
        for name in CACHES:
            (Path(scratch) / name).mkdir()
        for cache in ("cold", "warm"):
            told = _start(model.path, options, environment, Path(scratch))
            yield StartupRecord(
                model=model.title,
                dtype=dtype,
                launch_mode=mode,
                engine="mainspring",
                cache=cache,
                weights_from="random numbers" if options.get("load_format") == "dummy" else "disk",
                seconds=told["seconds"],
                stages=told["stages"],
                rungs=told["rungs"],
                recording_seconds=told["recording_seconds"],
                recorded_bytes=told["recorded_bytes"],
                decode_seconds=told["decode_seconds"],
                warm_up_runs=told["warm_up_runs"],
                audit_seconds=told["audit_seconds"],
            )


def _has_tokenizer(model: BenchModel) -> bool:
    folder = Path(model.path)
    return model.path == EMBEDDED_MODEL or folder.is_file() or any(folder.glob("tokenizer*"))


def _start(model: str, options: Mapping[str, Any], environment: Mapping[str, str], scratch: Path) -> dict[str, Any]:
    job, result = scratch / "job.json", scratch / "result.json"
    job.write_text(json.dumps({"model": model, "options": dict(options)}), encoding="utf-8")
    started = time.time()
    run_module("the start", "mainspring.bench.startup_probe", job, result, environment=environment)
    told: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    told["seconds"] = told["ready"] - started
    told["stages"] = {"start Python": told["seconds"] - sum(told["stages"].values()), **told["stages"]}
    return told
