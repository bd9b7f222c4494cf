"""What a measurement leaves behind: one record per batch, mode and engine, in a list in a JSON file."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

RESULTS = Path("benchmarks") / "results"
COMMIT_VARIABLE = "MAINSPRING_COMMIT"


@dataclass(frozen=True)
class Provenance:
    """Where, when and with what something was measured; the same for all records of one run.

    ``date`` is UTC in ISO 8601; ``commit`` ends in ``-dirty`` where files had been changed, and is ``unknown`` where
    neither git nor ``MAINSPRING_COMMIT`` tells.
    """

    device: str
    date: str
    commit: str
    command: str
    versions: Mapping[str, str | None]


@dataclass(frozen=True)
class LatencyRecord:
    """One measured batch of one engine in one launch mode. Times are in milliseconds, contexts in tokens.

    ``tpot_ms`` and ``tpot_p99_ms`` are over single decode steps where the engine can be watched step by step;
    ``tpot_mean_ms`` is (time of output_len + 1 tokens - time of 1 token) / output_len, which every engine has; where
    steps cannot be watched, ``tpot_ms`` is that and the p99 is missing. ``first_token_ms`` is the time until every
    answer has its first token, prefill included. ``step_ms`` is the recorded step alone, replayed in a row.
    ``extra`` has, for mainspring, the launches and the microseconds of processor time that a token took (the latter of
    the whole process, less what the prompts took), and the median gap between two loops; in loop mode single steps are
    timed by the GPU's clock. ``floor_ms`` is ``step_read_bytes`` over ``read_bandwidth`` (bytes per second, measured in
    the same run); ``ratio`` is ``tpot_ms`` over it.
    """

    model: str
    batch: int
    context: int
    input_len: int
    output_len: int
    dtype: str
    launch_mode: str
    engine: str
    sampled: bool
    tpot_ms: float
    tpot_p99_ms: float | None
    tpot_mean_ms: float
    first_token_ms: float
    step_ms: float | None
    floor_ms: float
    ratio: float
    tokens_per_second: float
    step_read_bytes: int
    read_bandwidth: float
    engine_version: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def achieved_bandwidth(self) -> float:
        """Bytes per second that the step's reads come to."""
        return self.step_read_bytes / (self.tpot_ms / 1e3)


def provenance(device: torch.device) -> Provenance:
    """What is to be known of this process and machine."""
    return Provenance(
        device=device_name(device),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit(),
        command=f"mainspring {shlex.join(sys.argv[1:])}",
        versions=versions(device),
    )


def as_record(origin: Provenance, kind: str, measured: Any) -> dict[str, Any]:
    """One flat record: ``kind`` of measurement, provenance, and the figures of ``measured``.

    Those are what its ``figures()`` gives, or else its dataclass fields; ``extra`` is laid out beside them.
    """
    figures = measured.figures() if hasattr(measured, "figures") else asdict(measured)
    extra = figures.pop("extra", {})
    return {"kind": kind, **asdict(origin), **figures, **extra}


def append_records(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Add records to the list in ``path``, which is made where it is missing and never left half written.

    Raises ``ValueError`` when the file holds something else than a list.
    """
    before: Any = []
    if path.exists():
        try:
            before = json.loads(path.read_text(encoding="utf-8") or "[]")
        except ValueError as error:
            raise ValueError(f"{path} is not JSON ({error}); move it away or name another file") from error
        if not isinstance(before, list):
            raise ValueError(f"{path} holds a {type(before).__name__}, not a list of records; name another file")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([*before, *records], indent=1, allow_nan=False) + "\n"
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def default_path(device: torch.device) -> Path:
    """``benchmarks/results/h200.json`` on an H200, else a file named for the device."""
    name = device_name(device)
    if "H200" in name:
        return RESULTS / "h200.json"
    return RESULTS / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"


def device_name(device: torch.device) -> str:
    """The GPU's name, or ``CPU`` with its model name and the threads in use."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    model = "unknown"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(encoding="utf-8", errors="replace"), re.M)
        model = found[1].strip() if found else model
    threads = torch.get_num_threads()
    return f"CPU {model}, {threads} thread{'s' if threads > 1 else ''}"


def commit() -> str:
    """The commit of the running code; see ``Provenance``."""
    given = os.environ.get(COMMIT_VARIABLE)
    if given:
        return given
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return "unknown"
    head = _output_of("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    if head is None:
        return "unknown"
    changed = _output_of("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return f"{head}-dirty" if changed else head


def versions(device: torch.device) -> dict[str, str | None]:
    """Versions of what a figure depends on; None for what is not installed or does not apply."""
    import torch

    import mainspring

    return {
        "mainspring": mainspring.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "transformers": package_version("transformers"),
        "cuda": torch.version.cuda,
        "driver": _driver_version() if device.type == "cuda" else None,
    }


def package_version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver_version() -> str | None:
    output = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return output.splitlines()[0] if output else None


def _output_of(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
