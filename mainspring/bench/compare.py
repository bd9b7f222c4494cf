"""Tokens per second beside ``transformers``' ``generate`` on this CPU, in alternating runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mainspring.bench.latency import Setting, engine_options
from mainspring.bench.peers.base import Peer, open_peer
from mainspring.bench.peers.measure import peer_spec

if TYPE_CHECKING:
    from mainspring import LLM, SamplingParams


@dataclass(frozen=True)
class Comparison:
    """One batch: tokens per second of each run, prompts and all; run i of both engines was made side by side."""

    model: str
    batch: int
    input_len: int
    output_len: int
    dtype: str
    launch_mode: str
    engine: str
    peer: str
    runs: Sequence[float]
    peer_runs: Sequence[float]

    @property
    def tokens_per_second(self) -> float:
        """The median run."""
        return statistics.median(self.runs)

    @property
    def peer_tokens_per_second(self) -> float:
        """The peer's median run."""
        return statistics.median(self.peer_runs)

    @property
    def ratios(self) -> list[float]:
        """Our speed over the peer's, for each pair."""
        return [ours / theirs for ours, theirs in zip(self.runs, self.peer_runs, strict=True)]

    @property
    def ratio(self) -> float:
        """The median pair's ratio."""
        return statistics.median(self.ratios)

    def figures(self) -> dict[str, object]:
        """What a record holds."""
        return {
            "model": self.model,
            "batch": self.batch,
            "input_len": self.input_len,
            "output_len": self.output_len,
            "dtype": self.dtype,
            "launch_mode": self.launch_mode,
            "engine": self.engine,
            "peer": self.peer,
            "tokens_per_second": self.tokens_per_second,
            "peer_tokens_per_second": self.peer_tokens_per_second,
            "ratio": self.ratio,
            "ratios": self.ratios,
        }


def compare(setting: Setting, launch_mode: str = "graph", peer_name: str = "transformers") -> Iterator[Comparison]:
    """Run both engines in turns, ``workload.repeats`` pairs for each batch; who goes first alternates too.

    Each run answers the whole batch with ``output_len`` greedy tokens a prompt, after a warm-up run of each.
    """
    import mainspring

    workload = setting.workload
    peer = open_peer(peer_name, peer_spec(setting, "eager"))
    with mainspring.LLM(setting.model.path, **engine_options(setting, launch_mode)) as llm:
        params = mainspring.SamplingParams(
            temperature=0.0, max_tokens=workload.output_len, ignore_eos=True, detokenize=False
        )
        for batch in workload.batches:
            prompts = workload.prompts(batch, setting.config.vocab_size)
            tokens = batch * workload.output_len
            runs: list[float] = []
            peer_runs: list[float] = []
            for pair in range(workload.repeats + 1):
                seconds = _pair(llm, peer, prompts, params, workload.output_len, ours_first=pair % 2 == 0)
                if pair:
                    runs.append(tokens / seconds[0])
                    peer_runs.append(tokens / seconds[1])
            yield Comparison(
                model=setting.model.title,
                batch=batch,
                input_len=workload.input_len,
                output_len=workload.output_len,
                dtype=setting.dtype_name,
                launch_mode=launch_mode,
                engine="mainspring",
                peer=peer_name,
                runs=runs,
                peer_runs=peer_runs,
            )


def _pair(
    llm: LLM, peer: Peer, prompts: Sequence[Sequence[int]], params: SamplingParams, tokens: int, *, ours_first: bool
) -> tuple[float, float]:
    """Seconds of one run of each: ours, the peer's."""
    if ours_first:
        ours = _seconds(llm, prompts, params)
        return ours, peer.generate(prompts, tokens)
    theirs = peer.generate(prompts, tokens)
    return _seconds(llm, prompts, params), theirs


def _seconds(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> float:
    started = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return time.perf_counter() - started
