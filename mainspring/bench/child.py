"""Runs a module of this package in a fresh Python, for what must be measured from the beginning or alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from mainspring.engine.errors import EngineError

#: Where the running copy of the package lies, so that the child uses that one and no other.
PACKAGE_ROOT = Path(__file__).resolve().parents[2]


def run_module(what: str, module: str, *arguments: Path, environment: Mapping[str, str] | None = None) -> None:
    """Run ``python -m module arguments``, keeping what it says to itself.

    Raises ``EngineError`` when it fails, beginning with ``what`` and ending with the last line that it said.
    """
    given = dict(os.environ if environment is None else environment)
    given["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), given.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", module, *map(str, arguments)]
    # A file, since a grandchild that outlives its parent would keep a pipe open.
    with tempfile.TemporaryFile() as said:
        done = subprocess.run(command, stdout=said, stderr=subprocess.STDOUT, env=given, check=False)
        if not done.returncode:
            return
        said.seek(0)
        lines = [line.strip() for line in said.read().decode(errors="replace").splitlines() if line.strip()]
    raise EngineError(f"{what} failed with exit status {done.returncode}: {lines[-1] if lines else 'it said nothing'}")
