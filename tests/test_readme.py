"""What the README shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def shown(code: str) -> list[str]:
    """What the comments beside ``print`` say that it prints, up to a colon and an explanation."""
    return [comment.partition("}: ")[0] for comment in re.findall(r"print\(.*\)  # (.*)", code)]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_snippet_prints_what_stands_beside_it(smollm2_path: Path, number: int, tmp_path: Path) -> None:
    code = SNIPPETS[number]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert shown(code)
    assert [line.removesuffix("}") for line in done.stdout.splitlines()] == [
        line.removesuffix("}") for line in shown(code)
    ]


def test_the_readme_shows_python() -> None:
    assert len(SNIPPETS) == 2
