"""Each example runs, in a process of its own, and says what it should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str) -> str:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, check=True, timeout=200
    ).stdout


def test_any_module() -> None:
    lines = run("any_module.py").splitlines()
    differences = [float(line.rsplit(" ", 1)[1]) for line in lines if "difference" in line]
    assert len(differences) == 4
    assert max(differences) < 1e-5
    assert "replays per rung: {1: 1, 4: 1, 8: 3} padded rows: 4" in lines


def test_solver_loop() -> None:
    *rows, ended, error = run("solver_loop.py").splitlines()
    residuals = [float(row.rsplit(" ", 1)[1]) for row in rows]
    assert len(residuals) > 2
    assert residuals == sorted(residuals, reverse=True)
    assert "ended by the flag after" in ended
    assert float(error.rsplit(" ", 1)[1]) < 1e-10
