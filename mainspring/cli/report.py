"""The small table that closes ``--stats``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from mainspring.engine.stats import EngineStats


def stats_table(stats: EngineStats) -> Table:
    """What the engine did, one line for each figure; with its reason, every step that ran eager and every rung that was
    recorded again."""
    table = Table(box=box.ROUNDED, show_header=False)
    table.add_column("figure", style="bold", no_wrap=True)
    table.add_column("value", justify="right")
    table.add_row("launch mode", stats.launch_mode)
    table.add_row("CPU calls per decoded token", f"{stats.cpu_calls_per_token:.2f}")
    table.add_row("ms per token", f"{stats.ms_per_token:.2f}")
    table.add_row("tokens/s", f"{stats.tokens_per_second:.1f}")
    table.add_row("padding waste", f"{100 * stats.padding_waste:.1f} %")
    table.add_row("padded rows", str(stats.padded_rows))
    table.add_row("rungs used", rungs_used(stats.rungs))
    table.add_row("prefill steps", str(stats.prefill_steps))
    table.add_row("recorded prefill steps", str(stats.recorded_prefill_steps))
    for reason, count in sorted(stats.eager_prefill_steps.items()):
        table.add_row(f"eager prefill: {reason}", str(count))
    table.add_row("decode steps", str(stats.decode_steps))
    table.add_row("decode launches per token", f"{stats.launches_per_token:.3f}")
    if stats.loop_launches:
        ends = ", ".join(f"{reason} x {count}" for reason, count in sorted(stats.loop_ends.items()))
        table.add_row("loops", f"{stats.loop_launches} for {stats.loop_steps} steps")
        table.add_row("loops ended by", ends or "none yet")
        if stats.loop_gap_ms is not None:
            table.add_row("median gap between loops", f"{stats.loop_gap_ms:.2f} ms")
    for reason, count in sorted(stats.single_steps.items()):
        table.add_row(f"step by step: {reason}", str(count))
    for reason, count in sorted(stats.eager_steps.items()):
        table.add_row(f"eager: {reason}", str(count))
    for reason, count in sorted(stats.recaptures.items()):
        table.add_row(f"recorded again: {reason}", str(count))
    if stats.verified_graphs:
        table.add_row("recordings verified", str(stats.verified_graphs))
    return table


def rungs_used(rungs: Mapping[int, int]) -> str:
    """Batch sizes with how often each was replayed, such as ``1 x 63, 8 x 12``; ``none`` where none was."""
    used = [f"{rung} x {replays}" for rung, replays in sorted(rungs.items()) if replays]
    return ", ".join(used) or "none"
