"""Everything that a report shows, as plain data, to JSON and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mainspring.graphs import AuditReport, Finding, GraphError, Recording
from mainspring.graphs.plain_data import make
from mainspring.inspect.timeline import Timeline

__all__ = ["Estimates", "Inspection"]


@dataclass(frozen=True, slots=True)
class Estimates:
    """What sizing the KV cache expected the plain step's recordings to take, beside what they took; all in bytes.

    Attributes:
        expected: by recording two rungs.
        taken: by recording all.
        prefill: what the largest prefill step took.
        kv_blocks: blocks that the KV cache got.
        block: bytes of one.
    """

    expected: int
    taken: int
    prefill: int
    kv_blocks: int
    block: int

    @property
    def difference(self) -> int:
        """How much more than expected was taken; negative where it was less."""
        return self.taken - self.expected


@dataclass(frozen=True)
class Inspection:
    """A recording with what was found out about it.

    Attributes:
        recording: operation lists and address books.
        about: what was inspected, and where: labels and texts, in order.
        audits: what an audit of each runner found, by the runner's name.
        estimates: of the memory, where an engine made them.
        timelines: a few steps in each launch mode.
        notes: what is not shown, and why.
    """

    recording: Recording
    about: Mapping[str, str] = field(default_factory=dict)
    audits: Mapping[str, AuditReport] = field(default_factory=dict)
    estimates: Estimates | None = None
    timelines: tuple[Timeline, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """What was inspected."""
        return self.about.get("model") or self.recording.name or "recording"

    @property
    def findings(self) -> list[Finding]:
        """Of all audits."""
        return [finding for report in self.audits.values() for finding in report.findings]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: a recording's, with one key more, "inspection"; see docs/inspect.md."""
        return {
            **self.recording.as_dict(),
            "inspection": {
                "about": dict(self.about),
                "audits": {name: report.as_dict() for name, report in self.audits.items()},
                "estimates": None if self.estimates is None else asdict(self.estimates),
                "timelines": [timeline.as_dict() for timeline in self.timelines],
                "notes": list(self.notes),
            },
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Inspection:
        """From `as_dict`, or from a recording alone.

        Raises:
            GraphError: `data` is neither.
        """
        recording = Recording.from_dict(data)
        found = data.get("inspection")
        if found is None:
            return cls(recording, notes=("This file holds a recording alone: no audit and no timeline.",))
        try:
            estimates = found.get("estimates")
            parts = {
                "recording": recording,
                "audits": {name: _audit(report) for name, report in found.get("audits", {}).items()},
                "estimates": None if estimates is None else make(Estimates, estimates),
                "timelines": tuple(Timeline.from_dict(timeline) for timeline in found.get("timelines", ())),
            }
            return make(cls, {**found, **parts})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise GraphError(f"this is no inspection: {type(error).__name__}: {error}") from error

    def to_json(self, indent: int | None = None) -> str:
        """`as_dict` as JSON text."""
        return json.dumps(self.as_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Inspection:
        """From `to_json`, or from a recording's JSON.

        Raises:
            GraphError: the text is neither.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise GraphError(f"this is no recording: it is not JSON ({error})") from error
        return cls.from_dict(data)

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Inspection:
        """Read what `save` or `Recording.save` wrote.

        Raises:
            GraphError: the file holds something else.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise GraphError(f"{path} is no recording: it is not UTF-8 text") from error
        except GraphError as error:
            raise GraphError(f"{path}: {error}") from error


def _audit(data: Mapping[str, Any]) -> AuditReport:
    findings = tuple(make(Finding, finding) for finding in data.get("findings", ()))
    return make(AuditReport, {**data, "findings": findings})
