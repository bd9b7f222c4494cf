"""The process in which a peer runs: ``python -m mainspring.bench.peers.worker JOB RESULTS``."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from mainspring.bench.peers.base import PeerSpec, open_peer
from mainspring.bench.workload import Workload, time_per_token

WARM_UP_TOKENS = 8


def main(job: Path, results: Path) -> None:
    """Measure what ``job`` asks for; one line of JSON for each batch is appended to ``results``."""
    asked = json.loads(job.read_text(encoding="utf-8"))
    fields = asked["workload"]
    workload = Workload(**{**fields, "batches": tuple(fields["batches"])})
    peer = open_peer(asked["peer"], PeerSpec(**asked["spec"]))
    for batch in workload.batches:
        generate = partial(peer.generate, workload.prompts(batch, asked["vocab_size"]))
        generate(min(WARM_UP_TOKENS, workload.output_len))
        step, first = time_per_token(generate, workload.output_len, workload.repeats)
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"batch": batch, "step_seconds": step, "first_seconds": first}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
