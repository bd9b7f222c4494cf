"""The report as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mainspring.graphs import RecordedOperation, RungRecording
from mainspring.inspect.book import Owner, OwnerGroup, group_owners, owners
from mainspring.inspect.diff import RungDiff, label
from mainspring.inspect.inspection import Inspection
from mainspring.inspect.layers import Section, pattern_of, sections
from mainspring.inspect.padding import ladders, padding_by_rung, padding_waste
from mainspring.inspect.text import bytes_text, plain, seconds_text, sparkline, us_text

__all__ = ["diff_report", "report"]

#: Owners, differences and findings that are listed at most.
MOST_OWNERS = 24
MOST_CHANGES = 40
MOST_FINDINGS = 20
BAR = 48


def report(inspection: Inspection, rung: RungRecording | None, *, unfold: bool = False) -> Iterator[RenderableType]:
    """Everything, in order; `rung` is the one whose operations are listed, one layer of those alike unless `unfold`."""
    yield about_table(inspection)
    yield from ladder_tables(inspection)
    if rung is not None:
        yield operation_table(rung, unfold)
    yield owner_table(inspection, unfold)
    yield accounting_table(inspection)
    if inspection.timelines:
        yield timeline_table(inspection)
    for note in inspection.notes:
        yield Text(plain(note), style="dim")
    yield from audit_lines(inspection)


def about_table(inspection: Inspection) -> Table:
    """What was inspected, and where."""
    table = Table(box=box.ROUNDED, show_header=False, title=_title(f"Recording of {inspection.title}"))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in inspection.about.items():
        table.add_row(plain(name), Text(plain(value)))
    if not inspection.about:
        table.add_row("device", Text(plain(inspection.recording.device)))
    return table


def ladder_tables(inspection: Inspection) -> Iterator[RenderableType]:
    """For each runner its rungs, and the padding at every batch size."""
    recording = inspection.recording
    for name in dict.fromkeys(rung.name for rung in recording.rungs):
        rungs = sorted((rung for rung in recording.rungs if rung.name == name), key=lambda rung: rung.size)
        sizes = ladders(recording).get(name, ())
        padding = {each.size: each for each in padding_by_rung(sizes)} if sizes else {}
        table = _table(f"Ladder of {name or 'one graph'}")
        for title in ("rung", "serves", "waste at worst", "mean", "operations", "addresses", "pool", "executable"):
            table.add_column(title, justify="right", no_wrap=title != "waste at worst")
        table.add_column("capture", justify="right", no_wrap=True)
        for rung in rungs:
            pad = padding.get(rung.size)
            serves = "–" if pad is None else str(pad.size) if pad.first == pad.size else f"{pad.first}-{pad.size}"
            table.add_row(
                str(rung.size),
                serves,
                "–" if pad is None else f"{100 * pad.worst:.0f} %",
                "–" if pad is None else f"{100 * pad.mean:.0f} %",
                str(len(rung.operations)),
                str(len(rung.addresses)),
                bytes_text(rung.pool_bytes),
                bytes_text(rung.executable_bytes),
                seconds_text(rung.capture_seconds),
            )
        table.add_section()
        table.add_row(
            "all",
            "",
            "",
            "",
            str(sum(len(rung.operations) for rung in rungs)),
            str(sum(len(rung.addresses) for rung in rungs)),
            bytes_text(sum(rung.pool_bytes for rung in rungs)),
            bytes_text(sum(rung.executable_bytes for rung in rungs)),
            seconds_text(sum(rung.capture_seconds for rung in rungs)),
        )
        yield table
        if sizes and max(sizes) > 1:
            bars = sparkline(padding_waste(sizes), BAR)
            yield Text(f"padding waste, batch 1 to {max(sizes)}: |{bars}| (full height is 100 %)", style="dim")


def operation_table(rung: RungRecording, unfold: bool) -> Table:
    """One rung's operation list."""
    kernels = any(operation.grid is not None for operation in rung.operations)
    table = _table(f"Operations of {label(rung)}")
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("operation", overflow="fold")
    table.add_column("grid x block" if kernels else "writes", overflow="fold")
    table.add_column("uses", overflow="fold")
    for section in sections(rung.operations):
        _add_section(table, rung.operations, section, unfold)
    return table


def _add_section(table: Table, operations: Sequence[RecordedOperation], section: Section, unfold: bool) -> None:
    folded = len(section.layers) > 1 and not unfold
    if section.layers:
        table.add_section()
        count = f"{len(section.layers)} layers alike, {section.each} operations each" if folded else ""
        table.add_row("", Text(plain(section.title), style="bold"), "", Text(count, style="bold"))
    stop = section.start + section.each if folded else section.stop
    for operation in operations[section.start : stop]:
        names = [use.owner for use in operation.uses if use.owner != "graph pool"]
        own = f"{section.prefix}N." if folded else f"{section.title}."
        shown = dict.fromkeys(plain((pattern_of(name) if folded else name).removeprefix(own)) for name in names)
        number = f"{operation.index}+" if folded else str(operation.index)
        indent = "  " * ((operation.parent is not None) + bool(section.layers))
        table.add_row(number, Text(indent + plain(operation.name)), _launch(operation), Text(", ".join(shown)))
    if section.layers:
        table.add_section()


def _launch(operation: RecordedOperation) -> Text:
    if operation.grid is not None:
        text = f"{'·'.join(map(str, operation.grid))} x {'·'.join(map(str, operation.block or ()))}"
        pdl = any(edge.kind == "programmatic" for edge in operation.dependencies)
        return Text(text + (" PDL" if pdl else ""))
    written = [use.text for use in operation.uses if "write" in use.role and use.text]
    return Text(plain(", ".join(written) or operation.note or operation.kind))


def owner_table(inspection: Inspection, unfold: bool) -> Table:
    """The address book by owner; owners that differ only in the layer are one line unless `unfold`."""
    groups = group_owners(owners(inspection.recording))
    table = _table("Address book by owner")
    table.add_column("owner", overflow="fold")
    table.add_column("kind", no_wrap=True)
    for title in ("bytes", "addresses", "uses"):
        table.add_column(title, justify="right", no_wrap=True)
    shown = groups if unfold else groups[:MOST_OWNERS]
    for group in shown:
        members = group.owners if unfold else ()
        times = f"  ({len(group.owners)} layers)" if len(group.owners) > 1 and not unfold else ""
        lines: list[tuple[str, Owner | OwnerGroup]] = [(each.name, each) for each in members]
        for name, each in lines or [(group.pattern, group)]:
            table.add_row(
                Text(plain(name) + times),
                each.kind if each.typed else f"{each.kind}, in structs",
                bytes_text(each.nbytes),
                str(each.addresses),
                str(each.operations),
                style="red" if each.kind in ("freed", "unknown") else None,
            )
    if len(groups) > len(shown):
        table.add_row(Text(f"and {len(groups) - len(shown)} smaller; --unfold lists all", style="dim"), "", "", "", "")
    return table


def accounting_table(inspection: Inspection) -> Table:
    """Bytes by what they are for, and the estimate beside what was taken."""
    table = Table(box=box.ROUNDED, show_header=False, title=_title("Memory"))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", overflow="fold")
    for name, count in inspection.recording.totals.items():
        table.add_row(plain(name.replace("_", " ")), bytes_text(count))
    estimates = inspection.estimates
    if estimates is not None:
        table.add_row("recordings, expected", bytes_text(estimates.expected))
        table.add_row("recordings, taken", f"{bytes_text(estimates.taken)} ({estimates.difference:+d} B)")
        table.add_row("largest prefill", bytes_text(estimates.prefill))
        table.add_row("KV blocks", f"{estimates.kv_blocks} of {bytes_text(estimates.block)}")
    return table


def timeline_table(inspection: Inspection) -> Table:
    """A step in each launch mode."""
    first = inspection.timelines[0]
    table = _table(f"A decode step at batch {first.rows}, mean of {first.steps}")
    for title in ("launch mode", "time", "device busy", "gaps", "operations", "CPU calls", "clock"):
        table.add_column(title, justify="left" if title in ("launch mode", "clock") else "right")
    for each in inspection.timelines:
        idle = each.idle_us
        share = "–" if idle is None else f"{us_text(idle)} ({100 * idle / max(each.step_us, 1e-9):.0f} %)"
        table.add_row(
            each.mode,
            us_text(each.step_us),
            us_text(None if idle is None else each.step_us - idle),
            share,
            "–" if each.operations is None else f"{each.operations:.0f}",
            "–" if each.calls is None else f"{each.calls:.0f}",
            plain(each.clock),
        )
    return table


def audit_lines(inspection: Inspection) -> Iterator[RenderableType]:
    """What the audits found; words that only look like addresses apart."""
    for name, found in inspection.audits.items():
        count = len(found.findings)
        verdict = "nothing found" if found.ok else f"{count} finding{'s' if count > 1 else ''}"
        text = (
            f"Audit of {name}: {verdict} in {found.rungs} rungs, {found.addresses} pointers, {found.struct_addresses} "
            f"addresses within structs; {found.unresolved} words that only look like some; "
            f"{seconds_text(found.seconds)}"
        )
        yield Text(plain(text), style="green" if found.ok else "bold red")
        for finding in found.findings[:MOST_FINDINGS]:
            yield Text(f"- {plain(str(finding))}", style="red")
        if len(found.findings) > MOST_FINDINGS:
            yield Text(f"- and {len(found.findings) - MOST_FINDINGS} more; --json has all", style="red")
    if not inspection.audits:
        yield Text("No audit: it needs the graphs themselves.", style="dim")


def diff_report(diff: RungDiff, *, everything: bool = False) -> Iterator[RenderableType]:
    """What differs between two rungs, changes in alike layers as one line; all of them with `everything`."""
    before, after = plain(diff.before), plain(diff.after)
    if diff.equal:
        yield Text(f"{before} and {after}: the same {diff.same} operations and owners", style="green")
    else:
        text = f"{before} → {after}: {len(diff.changes)} operations differ, {diff.same} are the same"
        yield Text(text, style="bold")
        table = Table(box=box.ROUNDED)
        table.add_column("", no_wrap=True)
        table.add_column("times", justify="right", no_wrap=True)
        table.add_column("operation", overflow="fold")
        table.add_column("what changed", overflow="fold")
        groups = diff.groups()
        marks = {"added": ("+", "green"), "removed": ("-", "red"), "changed": ("~", "yellow")}
        for group in groups if everything else groups[:MOST_CHANGES]:
            mark, style = marks[group.what]
            fields = "\n".join(f"{name}: {old} → {new}" for name, old, new in group.fields)
            at = group.changes[0].before if group.changes[0].before is not None else group.changes[0].after
            times = f"{len(group.changes)} x"
            table.add_row(Text(mark, style=style), times, Text(f"#{at} {plain(group.name)}"), Text(_lines(fields)))
        if len(groups) > MOST_CHANGES and not everything:
            table.add_row("", "", Text(f"and {len(groups) - MOST_CHANGES} more; --unfold lists all", style="dim"), "")
        yield table
        for mark, names in (("+", diff.owners_added), ("-", diff.owners_removed)):
            listed = list(dict.fromkeys(pattern_of(name) for name in names))
            if listed:
                yield Text(f"owners {mark} {plain(', '.join(listed))}", style="green" if mark == "+" else "red")
    for name, old, new in diff.numbers:
        texts = [bytes_text(each) if "bytes" in name else f"{each:g}" for each in (old, new, new - old)]
        sign = "+" if new > old else ""
        yield Text(f"  {name}: {texts[0]} → {texts[1]} ({sign}{texts[2]})", style="dim")


def _lines(text: str) -> str:
    return "\n".join(plain(line) for line in text.split("\n"))


def _table(title: str) -> Table:
    return Table(box=box.ROUNDED, title=_title(title))


def _title(text: str) -> Text:
    return Text(plain(text), style="bold")
