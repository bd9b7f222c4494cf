"""Measurements as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from mainspring.bench.records import LatencyRecord


def latency_table(records: Sequence[LatencyRecord]) -> Table:
    """One line for each batch, mode and engine; times in milliseconds."""
    first = records[0]
    title = (
        f"{first.model}, {first.dtype}, {first.input_len} tokens in, {first.output_len} out; "
        f"memory reads at {first.read_bandwidth / 1e12:.3f} TB/s"
    )
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    for name in ("engine", "mode"):
        table.add_column(name, no_wrap=True)
    for name in ("batch", "context", "TPOT", "p99", "mean", "step", "floor", "x floor", "TB/s", "tokens/s", "first"):
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
        )
    return table


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
