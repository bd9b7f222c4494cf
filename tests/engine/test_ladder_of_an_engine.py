"""Which rung serves a batch, whatever sizes were asked for; nothing runs eager in silence."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mainspring import LLM, SamplingParams
from mainspring.engine import core, limits
from mainspring.graphs import CudaGraph

MakeLLM = Callable[..., LLM]


def decode(llm: LLM, rows: int, tokens: int = 4) -> dict[int, int]:
    """Answer ``rows`` prompts at a time; how often each rung was replayed for that."""
    before = llm.stats().rungs
    prompts = [{"prompt_token_ids": [3 + index % 200, 7]} for index in range(rows)]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
    assert llm.stats().eager_steps == {}
    used = {rung: count - before.get(rung, 0) for rung, count in llm.stats().rungs.items()}
    return {rung: count for rung, count in used.items() if count}


def test_after_a_batch_above_the_top_rung_small_batches_use_their_rungs_again(make_tiny: MakeLLM) -> None:
    llm = make_tiny(max_num_seqs=11, cudagraph_capture_sizes=[1, 2, 4])
    for _ in range(2):
        assert decode(llm, 2) == {2: 3}
        assert decode(llm, 11) == {4: 9}
        assert decode(llm, 1) == {1: 3}


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes", "rungs"),
    [
        (3, [1, 2, 4, 8, 16], (1, 2, 3)),
        (1, [8], (1,)),
        (5, [5, 64, 2, 2], (2, 5)),
        (6, [2, 4], (2, 4)),
    ],
)
def test_sizes_above_max_num_seqs_are_cut_to_it_and_serve_every_batch(
    make_tiny: MakeLLM, max_num_seqs: int, sizes: list[int], rungs: tuple[int, ...]
) -> None:
    llm = make_tiny(max_num_seqs=max_num_seqs, cudagraph_capture_sizes=sizes)
    assert llm.core.limits.ladder.sizes == rungs
    for rows in range(1, max_num_seqs + 1):
        assert set(decode(llm, rows)) <= set(rungs)


def test_pythons_collector_is_held_from_sizing_to_the_last_recording(
    make_tiny: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for name in ("plan_memory", "record_ladder"):
        original = getattr(core, name)

        def noted(*args: Any, original: Any = original) -> Any:
            seen.append(gc.isenabled())
            return original(*args)

        monkeypatch.setattr(core, name, noted)
    make_tiny(max_num_seqs=2)
    assert seen == [False, False]
    assert gc.isenabled()


@pytest.mark.parametrize("budget", [1, 7, 100, 513])
def test_any_budget_of_prompt_tokens_leaves_every_decode_step_recorded(make_tiny: MakeLLM, budget: int) -> None:
    llm = make_tiny(max_num_seqs=3, max_num_batched_tokens=budget)
    decode(llm, 5)
    stats = llm.stats()
    assert sum(stats.rungs.values()) == stats.decode_steps > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_second_engine_on_a_gpu_runs_its_step_once_for_a_whole_ladder(
    make_tiny: MakeLLM, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WARM_UP", "first")
    options: dict[str, Any] = {"device": "cuda", "dtype": dtype, "max_num_seqs": 64, "launch_mode": "graph"}
    first = make_tiny(**options)
    assert first.verify_graphs() >= len(first.core.limits.ladder)
    rows = decode(first, 1)
    second = make_tiny(**options)  # every kernel that the ladder needs is loaded now
    for runner in second.core.runner.all_runners:
        runs = {size: report.runs for size, report in runner.counters.captures.items()}
        why = {size: str(graph.discarded) for size, graph in runner.graphs.items() if isinstance(graph, CudaGraph)}
        assert sum(runs.values()) <= 1, (runner.name, runs, why)
    assert all(report.ok for report in second.audit().values())
    assert second.verify_graphs() >= len(second.core.limits.ladder)
    assert decode(second, 1) == rows
