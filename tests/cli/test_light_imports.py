"""What may be imported by the time a command has nothing to do with a model."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mainspring

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
