"""vLLM's server in processes of its own, in the settings that its users have, prefix caching and tokenizer apart."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mainspring.bench.http_client import Address, get
from mainspring.bench.peers.base import PeerError, PeerSpec
from mainspring.bench.peers.vllm_peer import MEMORY_SHARE

#: Seconds within which it has to be ready, and to end.
START_WITHIN = 600.0
END_WITHIN = 30.0


@contextmanager
def serve(spec: PeerSpec) -> Iterator[Address]:
    """Start it on a free port; leaving the block ends all of its processes.

    Raises ``PeerError`` for a GGUF file, and where it ends or is not ready in time, with the last line that it said.
    """
    if spec.path.endswith(".gguf"):
        raise PeerError(f"vllm is measured on folders and named shapes, not on {spec.path}")
    address = Address("127.0.0.1", _free_port())
    with tempfile.TemporaryDirectory(prefix="mainspring-vllm-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as said:
            process = subprocess.Popen(
                _command(spec, address.port),
                stdout=said,
                stderr=said,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # it starts processes of its own, which are ended as one group
            )
        try:
            _wait_until_ready(process, address, log)
            yield address
        finally:
            _end(process)


def _command(spec: PeerSpec, port: int) -> list[str]:
    settings = {
        "--model": spec.path,
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": spec.dtype,
        "--load-format": spec.load_format,
        "--max-model-len": spec.max_model_len,
        "--max-num-seqs": spec.max_num_seqs,
        "--gpu-memory-utilization": MEMORY_SHARE,
        "--seed": spec.seed,
    }
    given = [str(word) for pair in settings.items() for word in pair]
    switches = ["--skip-tokenizer-init", "--no-enable-prefix-caching"]
    switches += ["--enforce-eager"] if spec.launch_mode == "eager" else []
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *given, *switches]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(process: subprocess.Popen[bytes], address: Address, log: Path) -> None:
    deadline = time.monotonic() + START_WITHIN
    while time.monotonic() < deadline:
        if process.poll() is not None:
            lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
            raise PeerError(f"vllm's server did not start: {lines[-1] if lines else 'it said nothing'}")
        try:
            if asyncio.run(get(address, "/health"))[0] == 200:
                return
        except (OSError, asyncio.IncompleteReadError):
            pass
        time.sleep(0.2)
    raise PeerError(f"vllm's server was not ready within {START_WITHIN:g} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:  # all of them are gone
            break
        try:
            process.wait(END_WITHIN)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
