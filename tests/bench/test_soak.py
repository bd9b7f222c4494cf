"""Random traffic through a real model and a pool that is far too small."""

from __future__ import annotations

from pathlib import Path

import pytest

from mainspring import LLM
from mainspring.bench.soak import SoakReport, random_jobs, soak


def run(folder: Path, device: str, requests: int, blocks: int, seats: int) -> SoakReport:
    options = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "device": device,
        "dtype": "float32",
        "max_num_seqs": seats,
        "max_num_batched_tokens": 64,
    }
    jobs = random_jobs(requests, seed=11, vocab_size=256, max_prompt=60, max_tokens=40, spread=requests * 2)
    with (
        LLM(str(folder), **options, num_gpu_blocks_override=blocks) as small,
        LLM(str(folder), **options, num_gpu_blocks_override=1000) as large,
    ):
        return soak(small, large, jobs)


def test_random_requests_through_a_tiny_pool_get_the_answers_of_a_large_one(tiny_folder: Path) -> None:
    report = run(tiny_folder, "cpu", requests=120, blocks=10, seats=8)
    print(report)
    assert report.ok, report
    assert report.requests == 120
    assert report.compared > 40
    assert report.ties <= 2
    assert report.aborted > 3
    assert report.preemptions > 5
    assert report.cached_tokens > 0


@pytest.mark.gpu
def test_random_requests_through_a_tiny_pool_on_a_gpu(tiny_folder: Path) -> None:
    report = run(tiny_folder, "cuda", requests=400, blocks=40, seats=24)
    print(report)
    assert report.ok, report


def test_a_pool_that_loses_a_block_or_an_answer_that_differs_is_not_ok() -> None:
    good = SoakReport(preemptions=1, blocks=3, free_blocks=3)
    assert good.ok
    assert not SoakReport(preemptions=1, blocks=3, free_blocks=2).ok
    assert not SoakReport(preemptions=1, blocks=3, free_blocks=3, different=[7]).ok
    assert not SoakReport(preemptions=1, blocks=3, free_blocks=3, memory_late=1 << 30).ok
    assert not SoakReport(preemptions=0, blocks=3, free_blocks=3).ok
