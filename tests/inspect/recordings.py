"""Recordings made by hand, with names that try to break out of whatever shows them."""

from __future__ import annotations

from typing import Any

from mainspring.graphs import (
    AddressEntry,
    AuditReport,
    Dependency,
    Finding,
    RecordedOperation,
    Recording,
    RungRecording,
    Span,
    Use,
)
from mainspring.inspect import Estimates, Event, Inspection, Lane, Timeline

NASTY = "</script><img src=x onerror='window.pwned=1'><script>window.pwned=1</script>\u2028\x1b[31m[red]{{ 7*7 }}"
PER_LAYER = ("norm.weight", "qkv.weight", "down.weight")


def operation(index: int, name: str, owners: list[str], size: int, **fields: Any) -> RecordedOperation:
    uses = tuple(
        Use(0x7F0000000000 + 4096 * (index + 1) + at, owner, at, role="read", nbytes=16, text=f"float32[{size}, 4]")
        for at, owner in enumerate(owners)
    )
    edges = (Dependency(index - 1, "programmatic"),) if index else ()
    return RecordedOperation(index, "kernel", name, dependencies=edges, uses=uses, **fields)


def rung(size: int, layers: int = 4, name: str = "decode.plain", last: str = "sample_kernel") -> RungRecording:
    """Embedding, layers of four kernels of which one uses no weight, and what samples."""
    listed = [operation(0, "embed_kernel", ["model.embed.weight"], size)]
    for layer in range(layers):
        for part in PER_LAYER:
            owner = f"model.layers.{layer}.{part}"
            grid = {"grid": (8 * size, 1, 1), "block": (128, 1, 1), "shared_memory": 0, "parameters": (8, 8, 4)}
            listed.append(operation(len(listed), f"{part.split('.')[0]}_kernel", [owner, "graph pool"], size, **grid))
        listed.append(operation(len(listed), "reduce_kernel", ["graph pool"], size, symbol=f"_Z{NASTY}"))
    listed.append(operation(len(listed), last, ["logits", NASTY], size, unresolved=2))
    book = tuple(
        AddressEntry(use.address, use.owner, "pool" if use.owner == "graph pool" else "buffer", 0, (each.index,))
        for each in listed
        for use in each.uses
    )
    return RungRecording(size, tuple(listed), book, 4096 * size, 0.01 * size, 65536, name)


def inspection(*, sizes: tuple[int, ...] = (1, 2, 4, 8), findings: bool = True, layers: int = 4) -> Inspection:
    rungs = tuple(rung(size, layers) for size in reversed(sizes))
    owners = list(dict.fromkeys(entry.owner for entry in rungs[0].addresses))
    spans = [
        Span(owner, "pool" if owner == "graph pool" else "buffer", 0x7F0000000000 + 0x1000 * at, 0xF00)
        for at, owner in enumerate(owners)
    ]
    far = Span("kv_cache", "buffer", 0x7F1000000000, 1 << 30)
    found = Finding("moved", NASTY, (1, 2), ("rung 1: operation 17 sample_kernel, parameter 1",), "0x10", "0x20", 16)
    audit = AuditReport((found,) if findings else (), len(rungs), 100, 7, 11, {"buffer": 90, "pool": 10}, 0.002)
    return Inspection(
        Recording(rungs, "cuda:0", (*spans, far), {"pool": 61440, "kv_cache": 1 << 30, "weights": 0}, "decode"),
        about={"model": f"toy {NASTY}", "device": "cuda:0"},
        audits={"decode.plain": audit},
        estimates=Estimates(1 << 20, (1 << 20) + 4096, 0, 64, 1 << 24),
        timelines=timelines(),
        notes=(f"a note {NASTY}",),
    )


def timelines() -> tuple[Timeline, ...]:
    """Eager with gaps, a graph without, and a loop of which only the steps are seen."""
    eager = [Event(f"kernel_{at % 3}", 100.0 * at, 40.0, at // 3) for at in range(6)]
    calls = [Event("cudaLaunchKernel", 100.0 * at, 10.0, at // 3) for at in range(6)]
    graph = [Event(f"kernel_{at % 3}", 40.0 * at, 40.0, at // 3) for at in range(6)]
    loop = [Event(f"step {at}", 120.0 * at, 120.0, at) for at in range(2)]
    lanes = (Lane("GPU", True, tuple(eager)), Lane("CPU: calls to the GPU", False, tuple(calls)))
    return (
        Timeline("eager", 1, 1, 2, "torch.profiler", lanes),
        Timeline("graph", 1, 1, 2, "torch.profiler", (Lane("GPU", True, tuple(graph)),)),
        Timeline("loop", 1, 1, 2, "the GPU's clock", (Lane("GPU", True, tuple(loop)),), NASTY, whole_steps=True),
    )
