"""What a peer is, and which ones there are."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from mainspring.bench.http_client import Address
from mainspring.engine.errors import EngineError


class PeerError(EngineError):
    """A peer is not installed, cannot run what was asked, or failed."""


@dataclass(frozen=True)
class PeerSpec:
    """How a peer is to load the model: ``path`` is a folder or a GGUF file, ``load_format`` is ``auto`` or ``dummy``.

    Lengths are in tokens; ``sampling`` is empty for greedy answers.
    """

    path: str
    load_format: str
    dtype: str
    device: str
    launch_mode: str
    max_model_len: int
    max_num_seqs: int
    sampling: Mapping[str, float]
    seed: int = 0


class Peer(Protocol):
    """A loaded engine that can be timed as a whole."""

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Make exactly ``tokens`` tokens for each prompt, all of one length; returns the seconds that it took."""
        ...


@dataclass(frozen=True)
class PeerKind:
    """Where a peer's adapter is, and which launch modes it has; a command that asks for others gets those.

    ``server_module`` is where the one of its server is, None where it has none that could be measured.
    """

    package: str
    module: str
    launch_modes: tuple[str, ...]
    server_module: str | None = None


PEERS: Mapping[str, PeerKind] = {
    "transformers": PeerKind("transformers", "mainspring.bench.peers.transformers_peer", ("eager",)),
    "vllm": PeerKind(
        "vllm", "mainspring.bench.peers.vllm_peer", ("graph", "eager"), "mainspring.bench.peers.vllm_server"
    ),
}


def find_peer(name: str) -> PeerKind:
    """The peer of that name. Raises ``ValueError`` for an unknown one and ``PeerError`` for one not installed."""
    kind = PEERS.get(name)
    if kind is None:
        raise ValueError(f"peer {name!r} is not known; give {' or '.join(PEERS)}")
    if importlib.util.find_spec(kind.package) is None:
        raise PeerError(f"peer {name} cannot be measured: the package {kind.package!r} is not installed here")
    return kind


def find_server(name: str) -> PeerKind:
    """The peer of that name. Raises ``PeerError`` as well where it has no server; see :func:`find_peer`."""
    kind = find_peer(name)
    if kind.server_module is None:
        serving = " or ".join(each for each, other in PEERS.items() if other.server_module)
        raise PeerError(f"peer {name} has no server that could be measured; give {serving}")
    return kind


def modes_of(name: str, wanted: Sequence[str]) -> list[str]:
    """The launch modes to measure a peer in: those wanted that it has, or all of its own where it has none."""
    own = find_peer(name).launch_modes
    return [mode for mode in wanted if mode in own] or list(own)


def open_peer(name: str, spec: PeerSpec) -> Peer:
    """Load a peer in this process."""
    peer: Peer = importlib.import_module(find_peer(name).module).load(spec)
    return peer


def open_server(name: str, spec: PeerSpec) -> AbstractContextManager[Address]:
    """Start a peer's server; leaving the block ends it."""
    running: AbstractContextManager[Address] = importlib.import_module(str(find_server(name).server_module)).serve(spec)
    return running
