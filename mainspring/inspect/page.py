"""The report as one HTML page that needs nothing else: no network, no other file."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from mainspring.graphs import GraphError, RecordedOperation, RungRecording, Use
from mainspring.graphs.spans import KINDS
from mainspring.inspect.book import CLASSES, Region, group_owners, memory_class, owners, regions
from mainspring.inspect.diff import label
from mainspring.inspect.inspection import Inspection
from mainspring.inspect.layers import sections
from mainspring.inspect.padding import ladders, padding_by_rung, padding_waste
from mainspring.inspect.text import bytes_text, seconds_text, us_text
from mainspring.inspect.timeline import Timeline, category

__all__ = ["render_page"]

#: Regions of the memory map that are shown, the largest ones.
MOST_REGIONS = 40
#: Gaps that are listed of each timeline.
MOST_GAPS = 5


def render_page(inspections: Sequence[Inspection]) -> str:
    """The page of one inspection, or of two side by side: what is shown of the ladder, the memory and the timelines is
    the first's, and the page opens with what differs.

    Raises:
        GraphError: there is not one or two of them.
    """
    if len(inspections) not in (1, 2):
        raise GraphError(f"a page shows 1 or 2 inspections, not {len(inspections)}")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_read), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters.update(bytes=bytes_text, seconds=seconds_text, us=us_text, percent=_percent, hex=_hex)
    script = _read("page.js")
    first = inspections[0]
    return environment.get_template("page.html").render(
        inspections=inspections,
        shown=first,
        ladders=[_ladder(first, name) for name in dict.fromkeys(rung.name for rung in first.recording.rungs)],
        groups=group_owners(owners(first.recording)),
        most_operations=max((len(rung.operations) for rung in first.recording.rungs), default=0),
        ownerless=_ownerless(first),
        kinds=KINDS,
        classes=CLASSES,
        memory_class=memory_class,
        regions=_regions(first),
        totals=_totals(first),
        gaps=[_largest_gaps(timeline) for timeline in first.timelines],
        label=label,
        style=Markup(_read("page.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=Markup(_script_safe(_page_data(inspections))),
    )


def _read(name: str) -> str:
    return files("mainspring.inspect").joinpath(name).read_text(encoding="utf-8")


def _script_safe(data: Mapping[str, Any]) -> str:
    """JSON that can stand in a script element, whatever the strings in it hold."""
    text = json.dumps(data, separators=(",", ":"))  # ASCII: line separators are escaped too
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _hex(address: int | None) -> str:
    return "–" if address is None else f"{address:#x}"


def _ladder(inspection: Inspection, name: str) -> dict[str, Any]:
    sizes = ladders(inspection.recording).get(name, ())
    padding = {each.size: each for each in padding_by_rung(sizes)} if sizes else {}
    rungs = sorted((rung for rung in inspection.recording.rungs if rung.name == name), key=lambda rung: rung.size)
    waste = padding_waste(sizes) if sizes else []
    return {
        "name": name or "graph",
        "sizes": list(sizes),
        "rungs": [(rung, padding.get(rung.size)) for rung in rungs],
        "waste": waste,
        "mean": sum(waste) / len(waste) if waste else 0.0,
        "worst": max(waste, default=0.0),
    }


def _ownerless(inspection: Inspection) -> int:
    """Pointers into memory that nobody is known to own."""
    books = (entry for rung in inspection.recording.rungs for entry in rung.addresses)
    return sum(entry.typed and entry.kind in ("unknown", "freed") for entry in books)


def _regions(inspection: Inspection) -> list[Region]:
    found = regions(inspection.recording.memory)
    largest = sorted(found, key=lambda region: region.end - region.start, reverse=True)[:MOST_REGIONS]
    return [region for region in found if region in largest]


def _totals(inspection: Inspection) -> list[tuple[str, int, str]]:
    classes = {"kv_cache": "kv", "weights": "weights", "buffers": "buffers", "pool": "pool"}
    return [
        (name.replace("_", " "), count, classes.get(name, "other"))
        for name, count in sorted(inspection.recording.totals.items(), key=lambda item: -item[1])
    ]


def _largest_gaps(timeline: Timeline) -> list[Any]:
    return sorted(timeline.gaps(), key=lambda gap: -gap.duration)[:MOST_GAPS] if not timeline.whole_steps else []


class _Tables:
    """Every text, and every use of an address, once, since rungs have most in common; what is stored is its number."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}
        self.uses: dict[tuple[Any, ...], int] = {}

    def __call__(self, text: str | None) -> int:
        return -1 if text is None else self.texts.setdefault(text, len(self.texts))

    def use(self, use: Use) -> int:
        """In the order that the script's `Operation` takes apart."""
        texts = (self(use.kind), self(use.role), self(use.text), self(use.owner))
        packed = (*texts, use.address, use.parameter, use.offset, use.nbytes)
        return self.uses.setdefault(packed, len(self.uses))


def _page_data(inspections: Sequence[Inspection]) -> dict[str, Any]:
    """What the page's script shows: operation lists and timelines, short enough for hundreds of rungs."""
    tables = _Tables()
    rungs = [
        {
            "title": (f"{'AB'[at]}: " if len(inspections) > 1 else "") + label(rung),
            "size": rung.size,
            "file": at,
            "operations": [_operation(operation, tables) for operation in rung.operations],
            "sections": _sections(rung),
        }
        for at, inspection in enumerate(inspections)
        for rung in sorted(inspection.recording.rungs, key=lambda rung: (rung.name, rung.size))
    ]
    timelines = [
        {
            "mode": timeline.mode,
            "lanes": [
                {
                    "name": lane.name,
                    "device": lane.device,
                    "events": [
                        [tables(e.name), tables(category(e.name)), round(e.start, 3), round(e.duration, 3), e.step]
                        for e in lane.events
                    ],
                }
                for lane in timeline.lanes
            ],
        }
        for timeline in inspections[0].timelines
    ]
    return {"strings": list(tables.texts), "uses": list(tables.uses), "rungs": rungs, "timelines": timelines}


def _sections(rung: RungRecording) -> list[Any]:
    """[start, stop, title, [[layer's title, start, stop], ...]]."""
    return [
        [
            section.start,
            section.stop,
            section.title,
            [[f"{section.prefix}{layer.number}", layer.start, layer.stop] for layer in section.layers],
        ]
        for section in sections(rung.operations)
    ]


def _operation(operation: RecordedOperation, tables: _Tables) -> list[Any]:
    """In the order that the script's `Operation` takes apart; an edge that is programmatic is its complement."""
    return [
        tables(operation.name),
        tables(operation.kind),
        tables(operation.symbol),
        operation.grid or 0,
        operation.block or 0,
        operation.shared_memory,
        operation.parameters,
        [~edge.operation if edge.kind == "programmatic" else edge.operation for edge in operation.dependencies],
        [tables.use(use) for use in operation.uses],
        operation.unresolved,
        operation.parent,
        tables(operation.note),
    ]
