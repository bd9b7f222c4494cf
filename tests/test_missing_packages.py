"""The suite on a machine that lacks optional packages: what needs them is skipped and says so, the rest is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: What is no core dependency, and gguf, which a machine that is lent for its GPU may lack.
OPTIONAL = (
    "fastapi",
    "uvicorn",
    "prometheus_client",
    "httptools",
    "uvloop",
    "httpx",
    "llguidance",
    "openai",
    "schemathesis",
    "gguf",
    "triton",
)
BLOCKER = """
import importlib.util
import sys

NAMES = {names!r}


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NAMES:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    None if name.partition(".")[0] in NAMES else find_spec(name, package)
)
sys.meta_path.insert(0, Blocked())
"""


@pytest.mark.slow
def test_every_folder_is_collected_without_optional_packages(tmp_path: Path) -> None:
    (tmp_path / "without_packages.py").write_text(BLOCKER.format(names=OPTIONAL))
    command = [sys.executable, "-m", "pytest", "tests", "--collect-only", "-q", "-p", "without_packages"]
    # A plugin of a package that is there would import one that is not.
    environment = {
        **os.environ,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]),
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "tests/engine/test_recorded_step.py::" in done.stdout
    assert "not installed: fastapi, uvicorn, prometheus_client" in done.stdout
    assert "could not import 'gguf'" in done.stdout
