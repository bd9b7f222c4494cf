"""Makes an `Inspection` of an engine."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from mainspring.inspect.inspection import Estimates, Inspection
from mainspring.inspect.timeline import Timeline

if TYPE_CHECKING:
    from mainspring import LLM

__all__ = ["inspect_engine"]


def inspect_engine(llm: LLM, *, rows: int = 1, steps: int = 3, sampled: bool = False) -> Inspection:
    """Read and audit everything that an engine has recorded, and watch it make a few steps.

    Args:
        llm: with no request under way.
        rows: of the batch whose steps are watched.
        steps: that are watched in each launch mode; with 0 none are.
        sampled: record the full step on every rung too, which serves requests that sample.

    Raises:
        ValueError: nothing is recorded (an eager engine), or the engine cannot hold such a batch.
        GraphError: recordings cannot be read here.
    """
    core = llm.core
    if core.launch_mode == "eager":
        raise ValueError("an eager engine records nothing that could be inspected; leave --enforce-eager out")
    if rows < 1 or steps < 0:
        raise ValueError(f"a batch of {rows} rows and {steps} steps; have at least 1 row and 0 steps")
    if sampled:
        for runner in core.runner.all_runners:
            runner.capture()
    timelines: list[Timeline] = []
    notes: list[str] = []
    if steps:
        from mainspring.inspect.observe import observe

        timelines, notes = observe(core, rows, steps)
    estimates = None
    if core.recorded is not None:
        estimates = Estimates(
            expected=core.recorded.expected,
            taken=core.recorded.taken,
            prefill=core.memory.prefill_bytes,
            kv_blocks=core.memory.num_blocks,
            block=core.memory.block_bytes,
        )
    recording = llm.recording()
    present = {rung.name for rung in recording.rungs}
    audits = {name: report for name, report in llm.audit().items() if name in present}
    return Inspection(recording, _about(llm), audits, estimates, tuple(timelines), tuple(notes))


def _about(llm: LLM) -> dict[str, str]:
    import torch

    from mainspring import __version__

    core = llm.core
    limits = core.limits
    if limits.device.type == "cuda":
        device = f"{limits.device}, {torch.cuda.get_device_name(limits.device)}, CUDA {torch.version.cuda}"
    else:
        device = f"{limits.device}, {torch.get_num_threads()} threads"
    return {
        "model": core.settings.model,
        "weights": "random (dummy)" if core.settings.load_format == "dummy" else "from files",
        "dtype": str(limits.dtype).removeprefix("torch."),
        "device": device,
        "launch mode": core.launch_mode,
        "layers": str(core.config.num_layers),
        "max_num_seqs": str(limits.max_num_seqs),
        "max_model_len": f"{limits.max_model_len} tokens",
        "versions": f"mainspring {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
    }
