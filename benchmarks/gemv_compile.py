"""Compile many variants of a kernel at once, in processes that share Triton's cache on disk."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

from mainspring.kernels.triton.gemv_common import Epilogue, Prologue, WeightOperand  # noqa: E402
from mainspring.kernels.triton.gemv_ops import head_argmax, skinny_matmul  # noqa: E402
from mainspring.kernels.triton.gemv_plan import Tile  # noqa: E402


@dataclass(frozen=True)
class Job:
    """One kernel to compile: rows x (n, k) with a tile and what is fused."""

    rows: int
    n: int
    k: int
    tile: Tile
    prologue: Prologue = Prologue.PLAIN
    epilogue: Epilogue = Epilogue.PLAIN
    residual: bool = False
    pdl: bool = True


def compile_job(job: Job) -> str:
    """Compile one job on this process's GPU context; the message of what went wrong, or nothing."""
    try:
        device, dtype = torch.device("cuda"), torch.bfloat16
        weight = WeightOperand.dense(torch.empty((job.n, job.k), device=device, dtype=dtype))
        x = torch.empty((job.rows, job.k * (2 if job.prologue == Prologue.SILU else 1)), device=device, dtype=dtype)
        norm = torch.empty(job.k, device=device, dtype=dtype)
        common: dict[str, Any] = {
            "norm_weight": norm,
            "prologue": job.prologue,
            "pdl": job.pdl,
            "compile_only": True,
        }
        if job.epilogue == Epilogue.ARGMAX:
            head_argmax(x, weight, job.tile, **common)
        else:
            columns = job.n // 2 if job.epilogue == Epilogue.SWIGLU else job.n
            beside = torch.empty((job.rows, columns), device=device, dtype=dtype) if job.residual else None
            skinny_matmul(x, weight, job.tile, epilogue=job.epilogue, residual=beside, **common)
        return ""
    except Exception as problem:
        return f"{type(problem).__name__}: {str(problem)[-300:]}"


def start_worker() -> int:
    """Make this process's GPU context, so that it is there when the first job comes."""
    torch.empty(1, device="cuda")
    return os.getpid()


class Compilers:
    """Worker processes, started once."""

    def __init__(self, processes: int | None = None) -> None:
        """One process a core, at most 14."""
        count = processes or max(1, min(14, (os.cpu_count() or 1) - 1))
        self.pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))
        self.starting = [self.pool.submit(start_worker) for _ in range(count)]

    def run(self, jobs: Sequence[Job], seconds: float) -> dict[Job, str]:
        """Compile ``jobs``; what is not done within ``seconds`` is left to whoever runs it. Returns the
        failures.
        """
        futures = {self.pool.submit(compile_job, job): job for job in jobs}
        done, late = wait(futures, timeout=max(1.0, seconds))
        for future in late:
            future.cancel()
        results = {futures[future]: future.result() if not future.exception() else "worker died" for future in done}
        return {job: problem for job, problem in results.items() if problem}

    def close(self) -> None:
        """Stop the processes."""
        self.pool.shutdown(wait=False, cancel_futures=True)
