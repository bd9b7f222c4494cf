"""What the README shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = sorted({README, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")})


@pytest.mark.slow
def test_the_snippet_prints_what_stands_beside_it(smollm2_path: Path, tmp_path: Path) -> None:
    [code] = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    shown = re.findall(r"print\(.*\)  # (.*)", code)
    assert shown
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines() == shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_point_stands_twice_on_a_page(page: Path) -> None:
    """What a merge leaves behind: a list item, or a heading, in an older and a newer form."""
    leads = re.findall(r"^(?:- \*\*.*?\*\*|#+ .*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(set(leads)) == sorted(leads)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    rooms = {path.name for path in (ROOT / "mainspring").iterdir()}
    named = re.findall(r"`(?:python )?([\w./-]+/[\w.-]+\.(?:md|py|json|service|toml))[` :]", text)
    missing = [
        name for name in named if not (ROOT / ("mainspring" if name.split("/")[0] in rooms else "") / name).exists()
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_target_that_a_page_names_is_there(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert targets >= set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE))


def test_ci_runs_the_targets_that_contributors_are_told_of() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.findall(r"^make (.*)", script, re.MULTILINE) == ["lint", "types", "test"]
