"""Measures a peer in a process of its own, so that neither engine finds the other's memory, threads or hooks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mainspring.bench.child import run_module
from mainspring.bench.latency import Setting
from mainspring.bench.peers.base import PeerSpec, find_peer
from mainspring.bench.records import LatencyRecord, package_version
from mainspring.bench.workload import SAMPLED
from mainspring.engine.errors import EngineError

if TYPE_CHECKING:
    from mainspring.bench.workload import Workload


def peer_spec(setting: Setting, launch_mode: str) -> PeerSpec:
    """How a peer is to load the setting's model."""
    from mainspring.models.source import resolve

    model = setting.model
    return PeerSpec(
        path=str(resolve(model.path, weights=model.load_format != "dummy").path),
        load_format=model.load_format,
        dtype=setting.dtype_name,
        device=str(setting.device),
        launch_mode=launch_mode,
        max_model_len=setting.workload.max_model_len(setting.config),
        max_num_seqs=max(setting.workload.batches),
        sampling=SAMPLED if setting.workload.sampled else {},
        seed=setting.workload.seed,
    )


def measure_peer(setting: Setting, name: str, launch_mode: str) -> Iterator[LatencyRecord]:
    """The figures of each batch of the workload, as far as the peer gets.

    Raises ``EngineError`` when it fails; what it had measured until then has been yielded.
    """
    version = package_version(find_peer(name).package)
    with tempfile.TemporaryDirectory(prefix="mainspring-peer-") as scratch:
        job, results = Path(scratch) / "job.json", Path(scratch) / "results.jsonl"
        job.write_text(json.dumps(_job(setting, name, launch_mode)), encoding="utf-8")
        failure = None
        try:
            run_module(f"peer {name}", "mainspring.bench.peers.worker", job, results)
        except EngineError as error:
            failure = error
        lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
        for line in lines:
            figures = json.loads(line)
            yield setting.record(
                figures["batch"],
                engine=name,
                version=version,
                launch_mode=launch_mode,
                mean_seconds=figures["step_seconds"],
                first_seconds=figures["first_seconds"],
            )
        if failure is not None:
            raise failure


def _job(setting: Setting, name: str, launch_mode: str) -> dict[str, Any]:
    workload: Workload = setting.workload
    return {
        "peer": name,
        "spec": asdict(peer_spec(setting, launch_mode)),
        "workload": asdict(workload),
        "vocab_size": setting.config.vocab_size,
    }
