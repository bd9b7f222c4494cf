"""A picture of the same tokens in each launch mode, one under another: an SVG that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from mainspring.inspect.same_tokens import Figures, ModeTimeline

__all__ = ["figure_text", "render_picture"]

WIDTH, MARGIN = 900, 20
PLOT = WIDTH - 2 * MARGIN
BAR, LANE = 34, 92
#: Pixels of a column. Its share of busy time is its height above, where it stands for many kernels, and its opacity
#: below, where it is the edge of a bar.
COLUMN = 1.0
SHADES = 40
#: Tokens of the fastest mode that the lower panel shows.
ENLARGED_TOKENS = 2.5
#: Ticks on an axis, at most.
TICKS = 10
NAMES = {
    "eager": "the CPU launches every kernel",
    "graph": "the CPU launches one recording for each token",
    "loop": "the GPU repeats the recording by itself",
}
STYLE = """
text { font-family: system-ui, -apple-system, "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif; font-size: 13px;
  fill: #1f2328; }
.title { font-size: 17px; font-weight: 600; }
.head { font-size: 14px; font-weight: 600; }
.small { font-size: 12px; }
.faint { fill: #59636e; }
.ground { fill: #ffffff; }
.idle { fill: #e6eaef; }
.line { stroke: #d1d9e0; }
.token { stroke: #1f2328; }
.eager .busy { fill: #bc4c00; }
.graph .busy { fill: #0969da; }
.loop .busy { fill: #1a7f37; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; }
  .faint { fill: #9198a1; }
  .ground { fill: #0d1117; }
  .idle { fill: #262c36; }
  .line { stroke: #3d444d; }
  .token { stroke: #f0f6fc; }
  .eager .busy { fill: #f0883e; }
  .graph .busy { fill: #58a6ff; }
  .loop .busy { fill: #3fb950; }
}
"""


def figure_text(value: float) -> str:
    """A figure as the picture writes it: three significant digits, or all that are before the point."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.{2 if abs(value) < 10 else 1}f}" if abs(value) >= 1 else f"{value:.3g}"


def render_picture(modes: Sequence[ModeTimeline], about: Mapping[str, Any]) -> str:
    """The picture as SVG text: all tokens on one time axis, and below it the beginning of the middle token, enlarged.

    Args:
        modes: in the order of the lanes.
        about: "model", "dtype", "prompt_tokens", "device", "commit", "date" and "clock" of what was measured.
    """
    whole = max(mode.timeline.span[1] for mode in modes)
    tokens = modes[0].timeline.steps
    middle = tokens // 2
    enlarged = ENLARGED_TOKENS * min(mode.timeline.step_us for mode in modes)
    parts = [
        _text(MARGIN, 32, f"The same {tokens} tokens, eager, graph and loop", "title"),
        _text(
            MARGIN,
            53,
            f"{about['model']}, {about['dtype']}, batch 1, after a prompt of {about['prompt_tokens']} tokens, on "
            f"{about['device']}.",
            "faint",
        ),
        _text(
            MARGIN,
            71,
            "Colour: something runs; grey: nothing does. Here the height of the colour is the share of the time.",
            "faint",
        ),
    ]
    y = 98
    for mode in modes:
        parts.append(_lane(mode, y, 0.0, whole, figures=mode.figures()))
        y += LANE
    parts.append(_axis(y - 14, whole))
    y += 46
    parts.append(_text(MARGIN, y, f"Enlarged: {_ms(enlarged)} ms from the beginning of token {middle + 1}", "title"))
    parts.append(_text(MARGIN, y + 20, "A stroke is the beginning of a token.", "faint"))
    y += 44
    for mode in modes:
        parts.append(_lane(mode, y, mode.begins()[middle], enlarged))
        y += 62
    parts.append(_axis(y - 4, enlarged))
    y += 46
    for line in _notes(modes, about):
        parts.append(_text(MARGIN, y, line, "faint small"))
        y += 17
    body = "\n".join(parts)
    label = f"Busy and idle time of the device for the same {tokens} tokens in {len(modes)} launch modes"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}" role="img" '
        f'aria-label="{label}">\n<style>{STYLE}</style>\n<rect class="ground" width="{WIDTH}" height="{y}" rx="8"/>\n'
        f"{body}\n</svg>\n"
    )


def _notes(modes: Sequence[ModeTimeline], about: Mapping[str, Any]) -> list[str]:
    lines = [f"{mode.mode}: timed by {mode.timeline.clock}." for mode in modes if not mode.timeline.whole_steps]
    lines += [
        f"{mode.mode}: timed by {mode.timeline.clock} at the end of each step, which counts as busy from begin to end; "
        "gaps inside it are not seen."
        for mode in modes
        if mode.timeline.whole_steps
    ]
    looped = [mode for mode in modes if mode.timeline.whole_steps]
    watched = [mode for mode in modes if mode.mode == "graph"]
    if looped and watched:
        lines.append(
            f"What {watched[0].mode} launches ran for {figure_text(watched[0].figures().busy_ms_per_token)} ms of a "
            f"token, under the profiler; a step of {looped[0].mode} takes "
            f"{figure_text(looped[0].figures().ms_per_token)} ms, gaps included."
        )
    return [*lines, f"Commit {about['commit']}, {about['date']}."]


def _lane(mode: ModeTimeline, y: float, start: float, length: float, figures: Figures | None = None) -> str:
    """A lane's name, figures where given, and bars of the times from `start` on, all in microseconds."""
    scale = PLOT / length
    name = f"{mode.mode}: {NAMES.get(mode.mode, '')}" if figures is not None else mode.mode
    parts = [_text(MARGIN, y, name, "head")]
    top = y + 8
    if figures is not None:
        parts.append(f'<text x="{MARGIN}" y="{y + 18}" class="faint">{_figures(mode.mode, figures)}</text>')
        top += 18
    parts.append(f'<rect class="idle" x="{MARGIN}" y="{top}" width="{PLOT}" height="{BAR}"/>')
    for left, width, share in _columns(mode.busy(), start, length):
        height = BAR * share if figures is not None else BAR
        shade = "" if figures is not None or share >= 1 else f' fill-opacity="{share:g}"'
        parts.append(
            f'<rect class="busy" x="{_px(MARGIN + left)}" y="{_px(top + BAR - height)}" width="{_px(width)}" '
            f'height="{_px(height)}"{shade}/>'
        )
    if figures is None:
        for begin in mode.begins():
            if start <= begin < start + length:
                x = _px(MARGIN + (begin - start) * scale)
                parts.append(f'<line class="token" x1="{x}" x2="{x}" y1="{top - 4}" y2="{top + BAR}"/>')
    return f'<g class="lane {mode.mode}">\n' + "\n".join(parts) + "\n</g>"


def _columns(busy: Sequence[tuple[float, float]], start: float, length: float) -> list[tuple[float, float, float]]:
    """Left edge and width in pixels, and share of busy time, of stretches that are equally busy."""
    count = int(PLOT / COLUMN)
    step = length / count
    times = [0.0] * count
    for begin, end in busy:
        begin, end = max(begin - start, 0.0), min(end - start, length)
        at = int(begin / step)
        while begin < end and at < count:
            until = min(end, (at + 1) * step)
            times[at] += max(until - begin, 0.0)
            begin, at = max(begin, (at + 1) * step), at + 1
    found: list[tuple[float, float, float]] = []
    for at, time in enumerate(times):
        share = round(SHADES * time / step) / SHADES
        if share <= 0 and time > 0:
            share = 1 / SHADES
        if share <= 0:
            continue
        if found and found[-1][2] == share and abs(sum(found[-1][:2]) - at * COLUMN) < 1e-6:
            found[-1] = (found[-1][0], found[-1][1] + COLUMN, share)
        else:
            found.append((at * COLUMN, COLUMN, share))
    return found


def _figures(mode: str, figures: Figures) -> str:
    def number(name: str, factor: float = 1.0) -> str:
        return f'<tspan data-figure="{mode}.{name}">{figure_text(factor * getattr(figures, name))}</tspan>'

    whole = "" if figures.gaps_in_steps_seen else " (whole steps)"
    parts = [f"{number('ms_per_token')} ms a token", f"busy {number('busy_share', 100)} %{whole}"]
    if figures.gaps_in_steps_seen:
        parts[0] += f" ({number('ms_per_token_unwatched')} without the profiler)"
    if figures.median_gap_us is not None:
        parts.append(f"gaps: median {number('median_gap_us')} µs, largest {number('largest_gap_us')} µs")
    else:
        parts.append("no gap between steps")
    parts.append(f"launches a token: {number('launches_per_token')}")
    return " · ".join(parts)


def _axis(y: float, length: float) -> str:
    step = _tick(length)
    parts = [f'<line class="line" x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y}" y2="{y}"/>']
    at, count = 0.0, 0
    while at <= length * (1 + 1e-9):
        x = MARGIN + PLOT * at / length
        anchor = "start" if count == 0 else "end" if x > WIDTH - MARGIN - 24 else "middle"
        label = f"{_ms(at)} ms" if count == 0 else _ms(at)
        parts.append(f'<line class="line" x1="{_px(x)}" x2="{_px(x)}" y1="{y}" y2="{y + 5}"/>')
        parts.append(f'<text class="faint small" x="{_px(x)}" y="{y + 19}" text-anchor="{anchor}">{label}</text>')
        count += 1
        at = count * step
    return '<g class="axis">\n' + "\n".join(parts) + "\n</g>"


def _tick(length: float) -> float:
    """A round number of microseconds of which `length` holds `TICKS` at most."""
    size = 1e-3
    while True:
        for factor in (1, 2, 5):
            if length <= TICKS * factor * size:
                return factor * size
        size *= 10


def _ms(microseconds: float) -> str:
    return f"{1e-3 * microseconds:.3g}" if microseconds < 1e6 else f"{1e-3 * microseconds:.0f}"


def _px(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(text)}</text>'
