"""``mainspring bench``: measure this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Option, Typer
from typer.core import TyperGroup

from mainspring.cli.command import command
from mainspring.cli.options import parse_sizes

#: What a bare ``--json`` means: the file named for the device.
DEFAULT_FILE = "auto"


class _BareJson(TyperGroup):
    """Lets ``--json`` stand without a file name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default in where the next word is another option, or none."""
        words = []
        for word, following in zip(args, [*args[1:], "--"], strict=True):
            words.append(word)
            if word == "--json" and following.startswith("-"):
                words.append(DEFAULT_FILE)
        return super().parse_args(ctx, words)


bench = Typer(cls=_BareJson, no_args_is_help=True, help="Measure this machine: latency beside its floor, and start-up.")

Model = Annotated[
    str, Option(help="qwen3-0.6b, llama-3.2-1b, llama-3.1-8b (random weights), smollm2, or a model folder.")
]
Device = Annotated[str | None, Option(help="cuda, cuda:1, cpu ...")]
Dtype = Annotated[str, Option(help="auto, float32, bfloat16 or float16.")]
Batch = Annotated[str, Option(metavar="1,16", help="Batch sizes.")]
InputLen = Annotated[int, Option(help="Tokens in a prompt.")]
OutputLen = Annotated[int, Option(help="Decode steps that are measured.")]
Json = Annotated[
    str | None,
    Option(
        "--json",
        metavar="[FILE]",
        help="Append records to the list in this file; without a name, to one in benchmarks/results for the device.",
    ),
]


@command(bench)
def latency(
    model: Model = "qwen3-0.6b",
    batch: Batch = "1",
    input_len: InputLen = 128,
    output_len: OutputLen = 256,
    context: Annotated[
        int | None, Option(help="Mean context of the measured steps, in tokens; sets --input-len.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = None,
    launch_mode: Annotated[str, Option(metavar="MODE,MODE", help="graph, eager, or both with a comma.")] = "graph",
    sampled: Annotated[
        bool, Option("--sampled", help="Sample with temperature and top-p instead of taking the likeliest token.")
    ] = False,
    repeats: Annotated[int, Option(help="Times that each batch is measured.")] = 3,
    json: Json = None,
) -> None:
    """Milliseconds per token of the decode step, beside the floor that this device's memory sets.

    The floor is what the step must read, at the read bandwidth measured in the same run. ``step`` is the recorded
    step alone, replayed in a row: what TPOT has above it is the CPU's.
    """
    from mainspring.bench.latency import measure_engine
    from mainspring.bench.setting import open_setting
    from mainspring.bench.workload import Workload

    if context is not None:
        input_len = context - output_len // 2
    workload = Workload(tuple(parse_sizes(batch)), input_len, output_len, repeats=repeats, sampled=sampled)
    modes = _modes(launch_mode)
    output = _Output(json)
    with open_setting(model, dtype, device, workload) as setting:
        for mode in modes:
            for record in measure_engine(setting, mode):
                output.add(setting.device, "latency", record)
    output.show_latency()


class _Output:
    """Keeps records for the table, and appends each to the file at once, so that a run cut short leaves them."""

    def __init__(self, file: str | None) -> None:
        self._file = file
        self._records: list[Any] = []
        self._origin: Any = None

    def add(self, device: Any, kind: str, record: Any) -> None:
        """Take in one record."""
        from mainspring.bench.records import append_records, as_record, default_path, provenance

        self._records.append(record)
        if self._file is None:
            return
        self._origin = self._origin or provenance(device)
        path = default_path(device) if self._file == DEFAULT_FILE else Path(self._file)
        append_records(path, [as_record(self._origin, kind, record)])

    def show_latency(self) -> None:
        """Write the table to the standard output."""
        from mainspring.bench.report import latency_table

        _print(latency_table(self._records))


def _modes(text: str) -> list[str]:
    from mainspring.bench.latency import LAUNCH_MODES

    modes = [part.strip() for part in text.split(",")]
    for mode in modes:
        if mode not in LAUNCH_MODES:
            raise ValueError(f"launch mode {mode!r} is not known; give {' or '.join(LAUNCH_MODES)}")
    return modes


def _print(table: Any) -> None:
    from rich.console import Console

    console = Console()
    # A table cut to a narrow or absent terminal would lose figures.
    Console(width=max(console.width, 132)).print(table)
