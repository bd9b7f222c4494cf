"""What may be imported by the time a command has nothing to do with a model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mainspring

SET_BY_US = ("GOMP_SPINCOUNT", "THP_MEM_ALLOC_ENABLE", "OMP_WAIT_POLICY")
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HEAVY = ("torch", "transformers", "triton", "numpy", "gguf")


def heavy_modules_after(code: str) -> list[str]:
    """Names of the heavy packages that a fresh interpreter has imported after running ``code``."""
    program = f"{code}\nimport sys\nprint('\\nHEAVY', *[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()[1:]


def test_the_probe_sees_a_heavy_import() -> None:
    assert "numpy" in heavy_modules_after("import numpy")


def test_importing_the_package_imports_no_torch() -> None:
    assert heavy_modules_after("import mainspring; dir(mainspring)") == []


@pytest.mark.parametrize("argv", [["--version"], ["--help"]])
def test_a_command_that_runs_no_model_imports_no_torch(argv: list[str]) -> None:
    code = f"import sys; sys.argv = ['mainspring', *{argv!r}]\nfrom mainspring.cli import main\n"
    code += "try:\n    main()\nexcept SystemExit as leave:\n    assert not leave.code"
    assert heavy_modules_after(code) == []


def test_version_is_printed() -> None:
    done = subprocess.run([sys.executable, "-m", "mainspring", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"mainspring {mainspring.__version__}\n")


def test_an_unknown_attribute_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LML'"):
        _ = mainspring.LML


PROBE = """
import os
import mainspring
print(os.environ.get("GOMP_SPINCOUNT"), os.environ.get("THP_MEM_ALLOC_ENABLE"))
"""


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        ({}, "2000 1"),
        ({"GOMP_SPINCOUNT": "7", "THP_MEM_ALLOC_ENABLE": "0"}, "7 0"),
        ({"OMP_WAIT_POLICY": "active"}, "None 1"),
    ],
)
def test_threads_and_pages_are_set_unless_the_user_chose(chosen: dict[str, str], told: str) -> None:
    unset = {name: value for name, value in os.environ.items() if name not in SET_BY_US}
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**unset, **chosen},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == told


@pytest.mark.skipif(
    not LARGE_PAGES.is_file() or "[never]" in LARGE_PAGES.read_text(), reason="this kernel gives no large pages"
)
@pytest.mark.parametrize("setting", ["1", "0"])
def test_tensors_lie_in_large_pages(setting: str) -> None:
    code = (
        "import mainspring, torch; x = torch.ones(16 << 20); "
        "print(*[line for line in open('/proc/self/smaps_rollup') if line.startswith('AnonHugePages')])"
    )
    if "[always]" in LARGE_PAGES.read_text() and setting == "0":
        pytest.skip("this kernel gives large pages to all memory")
    unset = {name: value for name, value in os.environ.items() if name not in SET_BY_US}
    env = unset if setting == "1" else {**unset, "THP_MEM_ALLOC_ENABLE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert (int(done.stdout.split()[1]) > 32 << 10) == (setting == "1")
