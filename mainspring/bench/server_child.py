"""A server in a process of its own, so that whoever loads it takes no time from it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

from mainspring.bench.child import PACKAGE_ROOT
from mainspring.bench.http_client import Address
from mainspring.engine.errors import EngineError

#: Seconds within which a server has to be ready, and to end.
START_WITHIN = 600.0
END_WITHIN = 60.0


class ServerChild:
    """A running ``mainspring serve``."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        """What it has said."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def resident_bytes(self) -> int:
        """Its memory in use."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def wait_until_ready(self) -> Address:
        """Its address, once it serves. Raises ``EngineError`` where it ends instead, or takes too long."""
        deadline = time.monotonic() + START_WITHIN
        while time.monotonic() < deadline:
            found = re.search(r"ready: (http://\S+) serves", self.log)
            if found:
                return Address.of(found[1])
            if self.process.poll() is not None:
                lines = [line for line in self.log.splitlines() if line.strip()]
                raise EngineError(f"the server did not start: {lines[-1] if lines else 'it said nothing'}")
            time.sleep(0.05)
        raise EngineError(f"the server was not ready within {START_WITHIN:g} s")


@contextmanager
def server(model: str, options: Sequence[str]) -> Iterator[tuple[ServerChild, Address]]:
    """Start ``mainspring serve model options`` on a free port; it is asked to end at the end."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), environment.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "mainspring", "serve", model, "--port", "0", "--shutdown-grace", "5", *options]
    with tempfile.TemporaryDirectory(prefix="mainspring-serve-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as said:
            process = subprocess.Popen(command, stdout=said, stderr=said, stdin=subprocess.DEVNULL, env=environment)
        child = ServerChild(process, log)
        try:
            yield child, child.wait_until_ready()
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END_WITHIN)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def mode_options(launch_mode: str) -> list[str]:
    """How ``mainspring serve`` is told a launch mode. Raises ``ValueError`` for one that it does not have."""
    from mainspring.cli.options import EngineOptions

    if any(field.name == "launch_mode" for field in fields(EngineOptions)):
        return ["--launch-mode", launch_mode]
    known = {"graph": [], "eager": ["--enforce-eager"]}
    if launch_mode not in known:
        raise ValueError(f"launch mode {launch_mode!r} is not known here; give {', '.join(known)}")
    return known[launch_mode]
