"""Peers: which there are, in which modes they are measured, and what their adapters insist on."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mainspring.bench.child import run_module
from mainspring.bench.peers import base
from mainspring.bench.peers.base import PeerError, PeerSpec, find_peer, modes_of, open_peer
from mainspring.engine.errors import EngineError

SPEC = PeerSpec(
    path="folder",
    load_format="dummy",
    dtype="float32",
    device="cpu",
    launch_mode="eager",
    max_model_len=64,
    max_num_seqs=2,
    sampling={},
)


class FakeVllm(ModuleType):
    """As much of vLLM as the adapter uses."""

    def __init__(self, shorter_by: int = 0) -> None:
        super().__init__("vllm")
        self.options: dict[str, Any] = {}
        self.asked: list[Any] = []

        class Engine:
            def __init__(engine, **options: Any) -> None:
                self.options = options

            def generate(engine, requests: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
                self.asked.append((requests, params))
                tokens = [0] * (params.max_tokens - shorter_by)
                return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)]) for _ in requests]

        self.LLM = Engine
        self.SamplingParams = SimpleNamespace


def test_a_peer_runs_in_the_modes_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base.importlib.util, "find_spec", lambda name: object())
    assert modes_of("vllm", ["eager", "graph"]) == ["eager", "graph"]
    assert modes_of("vllm", ["graph"]) == ["graph"]
    assert modes_of("transformers", ["graph", "eager"]) == modes_of("transformers", ["graph"]) == ["eager"]


def test_unknown_and_missing_peers_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="peer 'tgi' is not known; give transformers or vllm"):
        find_peer("tgi")
    monkeypatch.setattr(base.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PeerError, match="the package 'vllm' is not installed here"):
        find_peer("vllm")


def test_vllm_is_asked_for_what_mainspring_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeVllm()
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setattr(base.importlib.util, "find_spec", lambda name: object())
    assert open_peer("vllm", SPEC).generate([[1, 2], [3, 4]], 5) >= 0
    for name, value in {"model": "folder", "enforce_eager": True, "enable_prefix_caching": False}.items():
        assert fake.options[name] == value
    ((requests, params),) = fake.asked
    assert requests == [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3, 4]}]
    assert (params.max_tokens, params.ignore_eos, params.temperature) == (5, True, 0.0)


def test_answers_that_end_early_are_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", FakeVllm(shorter_by=1))
    monkeypatch.setattr(base.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(PeerError, match=r"vllm made \[4\] tokens instead of 5"):
        open_peer("vllm", SPEC).generate([[1, 2]], 5)


def test_a_child_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="the peer failed with exit status 1: FileNotFoundError.*nothing.json"):
        run_module("the peer", "mainspring.bench.peers.worker", tmp_path / "nothing.json", tmp_path / "results")
