"""Random traffic through a real model and a pool that is far too small."""

from __future__ import annotations

from pathlib import Path

import pytest

from mainspring import LLM, SamplingParams
from mainspring.bench.soak import TIE, Job, SoakReport, is_near_tie, random_jobs, soak


def run(folder: Path, device: str, requests: int, blocks: int, seats: int, mode: str) -> SoakReport:
    options = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "device": device,
        "dtype": "float32",
        "max_num_seqs": seats,
        "max_num_batched_tokens": 64,
    }
    with (
        LLM(str(folder), **options, num_gpu_blocks_override=blocks, launch_mode=mode) as small,
        LLM(str(folder), **options, num_gpu_blocks_override=1000, launch_mode="graph") as large,
    ):
        vocab = small.core.config.vocab_size
        jobs = random_jobs(requests, 11, vocab, max_prompt=60, max_tokens=40, spread=requests * 2)
        return soak(small, large, jobs)


@pytest.mark.parametrize("mode", ["graph", "loop"])
def test_random_requests_through_a_tiny_pool_get_the_answers_of_a_large_one(tiny_folder: Path, mode: str) -> None:
    report = run(tiny_folder, "cpu", requests=120, blocks=10, seats=8, mode=mode)
    print(report)
    assert report.ok, report
    assert report.requests == 120
    assert report.compared > 40
    assert report.ties <= 2
    assert report.aborted > 0
    assert report.preemptions > 5
    assert report.cached_tokens > 0


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["graph", "loop"])
def test_random_requests_through_a_tiny_pool_on_a_gpu(tiny_folder: Path, mode: str) -> None:
    report = run(tiny_folder, "cuda", requests=400, blocks=40, seats=24, mode=mode)
    print(report)
    assert report.ok, report


def test_a_pool_that_loses_a_block_or_an_answer_that_differs_is_not_ok() -> None:
    good = SoakReport(preemptions=1, blocks=3, free_blocks=3)
    assert good.ok
    assert not SoakReport(preemptions=1, blocks=3, free_blocks=2).ok
    assert not SoakReport(preemptions=1, blocks=3, free_blocks=3, different=[7]).ok
    assert not SoakReport(preemptions=1, blocks=3, free_blocks=3, memory_late=1 << 30).ok
    assert not SoakReport(preemptions=0, blocks=3, free_blocks=3).ok
    assert not SoakReport(preemptions=1, blocks=3, free_blocks=3, launch_mode="loop").ok


def test_a_tie_is_told_from_a_difference(tiny_folder: Path) -> None:
    with LLM(
        str(tiny_folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        device="cpu",
        dtype="float32",
        num_gpu_blocks_override=20,
    ) as llm:
        prompt = [5, 9, 17]
        [first] = llm.generate(
            {"prompt_token_ids": prompt}, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        )
        best, second = (float(value) for value in llm.core.runner.logits[0].topk(2).values)
        top = first.outputs[0].token_ids[0]
        free = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        level = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logit_bias={top: second - best})
        assert best - second > TIE
        assert not is_near_tie(llm, Job(prompt, free, 0, 0, 0), [])
        assert is_near_tie(llm, Job(prompt, level, 0, 0, 0), [])
