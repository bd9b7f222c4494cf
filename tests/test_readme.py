"""What the README shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.slow
def test_the_snippet_prints_what_stands_beside_it(smollm2_path: Path, tmp_path: Path) -> None:
    [code] = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    shown = re.findall(r"print\(.*\)  # (.*)", code)
    assert shown
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines() == shown
