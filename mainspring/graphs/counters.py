"""Live counts of what a `GraphRunner` did."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from mainspring.graphs.report import CaptureReport

__all__ = ["GraphCounters"]


@dataclass(slots=True)
class GraphCounters:
    """What a runner did since it was made or `reset`.

    Attributes:
        rows: real rows served.
        padded_rows: rows added to reach a rung.
        replays: recorded steps by rung, each launched by the CPU.
        repeats: recorded steps by rung that a loop ran.
        eager_steps: steps run without a recording, by reason.
        split_batches: calls with more rows than the top rung, served by several steps.
        uploads: inputs copied to their fixed buffer.
        uploads_skipped: inputs whose fixed buffer held the values already.
        captures: the latest recording of each rung.
        recaptures: rungs recorded again, by reason.
        verified: rungs that were compared with eager.
        audits: audits made after recording.
        audit_seconds: what reading and auditing took then.
        audit_findings: what the last of them found.
    """

    rows: int = 0
    padded_rows: int = 0
    replays: Counter[int] = field(default_factory=Counter)
    repeats: Counter[int] = field(default_factory=Counter)
    eager_steps: Counter[str] = field(default_factory=Counter)
    split_batches: int = 0
    uploads: int = 0
    uploads_skipped: int = 0
    captures: dict[int, CaptureReport] = field(default_factory=dict)
    recaptures: Counter[str] = field(default_factory=Counter)
    verified: int = 0
    audits: int = 0
    audit_seconds: float = 0.0
    audit_findings: int = 0

    @property
    def steps(self) -> int:
        """Steps of every kind."""
        return self.replays.total() + self.repeats.total() + self.eager_steps.total()

    @property
    def padding_waste(self) -> float:
        """Share of computed rows that were padding, 0 to 1."""
        computed = self.rows + self.padded_rows
        return self.padded_rows / computed if computed else 0.0

    @property
    def capture_seconds(self) -> float:
        """Wall time of the latest recording of every rung."""
        return sum(report.seconds for report in self.captures.values())

    def reset(self) -> None:
        """Set the running counts to zero; what was captured stays."""
        self.rows = self.padded_rows = self.split_batches = self.uploads = self.uploads_skipped = 0
        self.replays.clear()
        self.repeats.clear()
        self.eager_steps.clear()

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "rows": self.rows,
            "padded_rows": self.padded_rows,
            "padding_waste": self.padding_waste,
            "replays": dict(sorted(self.replays.items())),
            "repeats": dict(sorted(self.repeats.items())),
            "eager_steps": dict(self.eager_steps),
            "split_batches": self.split_batches,
            "uploads": self.uploads,
            "uploads_skipped": self.uploads_skipped,
            "captures": {size: report.as_dict() for size, report in sorted(self.captures.items())},
            "recaptures": dict(self.recaptures),
            "verified": self.verified,
            "audits": self.audits,
            "audit_seconds": self.audit_seconds,
            "audit_findings": self.audit_findings,
        }
