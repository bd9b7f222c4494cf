"""Measurements as tables for people."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from mainspring.bench.records import LatencyRecord

if TYPE_CHECKING:
    from mainspring.bench.busy import BusyRecord
    from mainspring.bench.compare import Comparison
    from mainspring.bench.profile import KernelRow
    from mainspring.bench.serve import ServeRecord
    from mainspring.bench.startup import StartupRecord


def latency_table(records: Sequence[LatencyRecord]) -> Table:
    """One line for each batch, mode and engine; times in milliseconds, launches and processor time for each token."""
    first = records[0]
    title = (
        f"{first.model}, {first.dtype}, {first.input_len} tokens in, {first.output_len} out; "
        f"memory reads at {first.read_bandwidth / 1e12:.3f} TB/s"
    )
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    for name in ("engine", "mode"):
        table.add_column(name, no_wrap=True)
    for name in ("batch", "context", "TPOT", "p99", "mean", "step", "floor", "x floor", "TB/s", "tokens/s", "first",
                 "launches", "CPU us"):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    for record in records:
        table.add_row(
            record.engine,
            record.launch_mode,
            str(record.batch),
            str(record.context),
            _ms(record.tpot_ms),
            _ms(record.tpot_p99_ms),
            _ms(record.tpot_mean_ms),
            _ms(record.step_ms),
            _ms(record.floor_ms),
            f"{record.ratio:.2f}",
            f"{record.achieved_bandwidth / 1e12:.3f}",
            f"{record.tokens_per_second:.1f}",
            _ms(record.first_token_ms),
            _ms(record.extra.get("launches_per_token")),
            f"{record.extra['cpu_us_per_token']:.1f}" if "cpu_us_per_token" in record.extra else "-",
        )
    return table


def kernel_table(rows: Sequence[KernelRow], title: str) -> Table:
    """One line for each kernel and part of a step; times in microseconds."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    table.add_column("kernel", no_wrap=True, max_width=60)
    table.add_column("part", no_wrap=True)
    for name in ("count", "us each", "us in all", "share", "floor", "x floor"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            short_name(row.name),
            row.part,
            str(row.count),
            f"{row.total_us / row.count:.2f}",
            f"{row.total_us:.1f}",
            f"{100 * row.share:.1f} %",
            "-" if row.floor_us is None else f"{row.floor_us:.1f}",
            "-" if row.ratio is None else f"{row.ratio:.2f}",
        )
    total = sum(row.total_us for row in rows)
    table.add_row("all kernels", "", str(sum(row.count for row in rows)), "", f"{total:.1f}", "", "", "")
    return table


def comparison_table(results: Sequence[Comparison]) -> Table:
    """One line for each batch; speeds in tokens per second."""
    first = results[0]
    title = f"{first.model}, {first.dtype}, {first.input_len} tokens in, {first.output_len} out; tokens/s"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    for name in ("batch", first.engine, first.peer, "ratio of each pair", "median ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            str(result.batch),
            f"{result.tokens_per_second:.1f}",
            f"{result.peer_tokens_per_second:.1f}",
            " ".join(f"{ratio:.2f}" for ratio in result.ratios),
            f"{result.ratio:.2f}",
        )
    return table


def busy_table(records: Sequence[BusyRecord]) -> Table:
    """One line for each launch mode; milliseconds from the request to the last token, medians."""
    first = records[0]
    title = (
        f"{first.model}, {first.dtype}, batch {first.batch}, {first.input_len} tokens in, {first.output_len} out; "
        f"busy: {first.spinners} spinning processes and a thread that holds the interpreter"
    )
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    table.add_column("mode", no_wrap=True)
    for name in ("quiet", "busy", "slower by", "first token, quiet", "busy"):
        table.add_column(name, justify="right", no_wrap=True)
    for record in records:
        table.add_row(
            record.launch_mode,
            _ms(statistics.median(record.quiet_ms)),
            _ms(statistics.median(record.busy_ms)),
            f"{100 * record.degradation:.1f} %",
            _ms(record.first_quiet_ms),
            _ms(record.first_busy_ms),
        )
    return table


def serve_table(records: Sequence[ServeRecord]) -> Table:
    """One line for each rate and mode; times in milliseconds."""
    first = records[0]
    title = f"{first.model}, {first.dtype}, {first.input_len} tokens in, {first.output_len} out, over HTTP"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    for name in ("engine", "mode"):
        table.add_column(name, no_wrap=True)
    for name in ("req/s", "requests", "failed", "peak", "TTFT", "p99", "ITL", "p99", "whole", "p99", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for record in records:
        table.add_row(
            record.engine,
            record.launch_mode,
            f"{record.request_rate:g}",
            str(record.requests),
            str(record.failed),
            str(record.peak),
            *map(_ms, (record.ttft_ms, record.ttft_p99_ms, record.itl_ms, record.itl_p99_ms)),
            *map(_ms, (record.e2e_ms, record.e2e_p99_ms)),
            f"{record.tokens_per_second:.1f}",
        )
    return table


def startup_table(records: Sequence[StartupRecord]) -> Table:
    """One line for each stage, one column for each start; times in seconds."""
    first = records[0]
    title = f"{first.model}, {first.dtype}, {first.launch_mode}, weights from {first.weights_from}; seconds"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    table.add_column("stage", no_wrap=True)
    for record in records:
        table.add_column(record.cache, justify="right", no_wrap=True)
    for stage in dict.fromkeys(stage for record in records for stage in record.stages):
        table.add_row(stage, *(f"{record.stages.get(stage, 0.0):.2f}" for record in records))
    table.add_section()
    table.add_row("to the first token", *(f"{record.seconds:.2f}" for record in records))
    table.add_row("recording, for good", *(f"{record.recording_seconds:.2f}" for record in records))
    table.add_row("of that the decode step", *(f"{record.decode_seconds:.2f}" for record in records))
    table.add_row("its warm-up runs", *(str(record.warm_up_runs) for record in records))
    table.add_row("auditing all of it", *(f"{record.audit_seconds:.2f}" for record in records))
    table.add_row("rungs", *(str(record.rungs) for record in records))
    table.add_row("recorded MiB", *(f"{record.recorded_bytes / 2**20:.1f}" for record in records))
    return table


def short_name(kernel: str) -> str:
    """A kernel's name without return type, arguments and template arguments."""
    name = kernel.removeprefix("void ")
    for bracket in ("<", "("):
        name = name.split(bracket)[0] if not name.startswith(bracket) else name
    return name or kernel


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
