"""A progress bar for recording a ladder."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

__all__ = ["track"]


def track(sizes: Sequence[int], description: str, enabled: bool) -> Iterator[int]:
    """Yield `sizes` behind a progress bar on stderr, if `enabled`, on a terminal and with `rich`.

    There is no bar for a single size: it would say nothing, and flash by.
    """
    if not enabled or len(sizes) < 2 or not sys.stderr.isatty():
        yield from sizes
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield from sizes
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=len(sizes))
        for size in sizes:
            bar.update(task, description=f"{description}: {size} {'row' if size == 1 else 'rows'}")
            yield size
            bar.advance(task)
