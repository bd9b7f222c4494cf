"""Figures and names as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["bytes_text", "plain", "seconds_text", "sparkline", "us_text"]

_BARS = "▁▂▃▄▅▆▇█"


def bytes_text(count: float | None) -> str:
    """Such as "1.5 MiB"; a dash where it is not known."""
    if count is None:
        return "–"
    size, sign = abs(float(count)), "-" if count < 0 else ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{sign}{size:.0f} {unit}" if unit == "B" else f"{sign}{size:.1f} {unit}"
        size /= 1024
    return ""


def seconds_text(seconds: float) -> str:
    """Such as "3.1 ms" or "2.50 s"."""
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def us_text(microseconds: float | None) -> str:
    """The same, from microseconds; a dash where it is not known."""
    if microseconds is None:
        return "–"
    return f"{microseconds:.1f} µs" if microseconds < 1e3 else seconds_text(1e-6 * microseconds)


def plain(text: str) -> str:
    """`text` with every character that would steer a terminal, or reorder the line, written as its escape."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def sparkline(values: Sequence[float], width: int) -> str:
    """Values of 0 to 1 as a line of at most `width` bars, each the largest of those that it stands for."""
    count = min(len(values), width)
    pieces = [values[len(values) * at // count : len(values) * (at + 1) // count] for at in range(count)]
    return "".join(" " if max(piece) <= 0 else _BARS[min(7, int(8 * max(piece)))] for piece in pieces)
