"""Where ``mainspring bench`` puts what it measured: records into a file at once, tables to the standard output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mainspring.cli.terminal import note

if TYPE_CHECKING:
    import torch

    from mainspring.bench.latency import Setting
    from mainspring.bench.replay import PausedBatch

#: What a bare ``--json`` means: the file named for the device.
DEFAULT_FILE = "auto"
#: A table cut to a narrow or absent terminal would lose figures.
WIDTH = 156


class Output:
    """Keeps records for the table, and appends each to the file at once, so that a run cut short leaves them."""

    def __init__(self, file: str | None) -> None:
        self._file = file
        self._records: list[Any] = []
        self._origin: Any = None

    def add(self, device: torch.device, kind: str, record: Any) -> None:
        """Take in one record of some ``kind`` of measurement."""
        from mainspring.bench.records import append_records, as_record, default_path, provenance

        self._records.append(record)
        if self._file is None:
            return
        self._origin = self._origin or provenance(device)
        path = default_path(device) if self._file == DEFAULT_FILE else Path(self._file)
        append_records(path, [as_record(self._origin, kind, record)])

    def show(self, table: str) -> None:
        """Write the records as the table of that name in ``mainspring.bench.report``; nothing where there are none."""
        from mainspring.bench import report

        if self._records:
            write_table(getattr(report, table)(self._records))


class Kernels:
    """The kernels of each measured batch, for the record and for a table at the end.

    Raises ``ValueError`` where the setting's device is no GPU.
    """

    def __init__(self, setting: Setting) -> None:
        if setting.device.type != "cuda":
            raise ValueError(f"--profile shows a GPU's kernels, and this would run on {setting.device}; leave it out")
        self._setting = setting
        self._tables: list[Any] = []

    def __call__(self, batch: int, paused: PausedBatch) -> Mapping[str, Any]:
        """Look at one batch's recorded step. Where the profiler fails, that is said, and the measuring goes on."""
        from mainspring.bench.profile import breakdown, record_kernels
        from mainspring.bench.report import kernel_table
        from mainspring.engine.errors import EngineError

        try:
            rows = breakdown(record_kernels(paused), self._setting, batch)
        except EngineError as error:
            note(f"mainspring: no kernels of batch {batch}: {error}")
            return {}
        self._tables.append(kernel_table(rows, f"{self._setting.model.title}, batch {batch}: one step"))
        return {"kernels": [asdict(row) for row in rows]}

    def show(self) -> None:
        """Write the tables."""
        for table in self._tables:
            write_table(table)


def write_table(table: Any) -> None:
    """Write one table to the standard output."""
    from rich.console import Console

    console = Console()
    Console(width=max(console.width, WIDTH)).print(table)
