"""Engines begin and end cleanly: several in a process, memory given back, a start after a failed one, signals."""

from __future__ import annotations

import gc
import multiprocessing
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mainspring import LLM, SamplingParams
from mainspring.engine.errors import SettingsError

MakeLLM = Callable[..., LLM]
PROMPT = {"prompt_token_ids": [11, 45, 200, 31, 8]}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def ids(llm: LLM) -> list[int]:
    return list(llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids)


@pytest.mark.parametrize("mode", ["graph", "loop"])
def test_two_engines_in_one_process_do_not_disturb_each_other(make_tiny: MakeLLM, mode: str) -> None:
    first, second = make_tiny(seed=1, launch_mode=mode), make_tiny(seed=2, launch_mode=mode)
    expected = ids(first), ids(second)
    assert expected[0] != expected[1]
    streams = [first.stream(PROMPT, GREEDY), second.stream(PROMPT, GREEDY)]
    for _ in range(5):
        for stream in streams:
            next(stream, None)  # several tokens may have come at once
    assert (ids(first), ids(second)) == expected
    first.close()
    assert ids(second) == expected[1]


def test_a_dropped_engine_is_freed(make_tiny: MakeLLM, tiny_folder: Path) -> None:
    llm = LLM(str(tiny_folder), load_format="dummy", skip_tokenizer_init=True, device="cpu", kv_cache_memory=8 << 20)
    ids(llm)
    cache = weakref.ref(llm.core.runner.buffers["kv_cache"])
    del llm
    gc.collect()
    assert cache() is None


def test_close_frees_at_once_even_where_the_object_is_kept(tiny_folder: Path) -> None:
    with LLM(
        str(tiny_folder), load_format="dummy", skip_tokenizer_init=True, device="cpu", kv_cache_memory=8 << 20
    ) as llm:
        cache = weakref.ref(llm.core.runner.buffers["kv_cache"])
    assert cache() is None
    llm.close()


@pytest.mark.gpu
def test_what_a_closed_engine_had_is_free_for_others(tiny_folder: Path) -> None:
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "num_gpu_blocks_override": (512 << 20) // 4096}
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with LLM(str(tiny_folder), **options) as llm:
        ids(llm)
        assert torch.cuda.memory_reserved() - before > 500 << 20
    assert torch.cuda.memory_reserved() - before < 64 << 20  # though `llm` is still there


def test_a_start_after_a_failed_start_works(make_tiny: MakeLLM) -> None:
    with pytest.raises(SettingsError):
        make_tiny(kv_cache_memory=100)
    assert len(ids(make_tiny())) == 12


def test_released_graphs_are_recorded_again_when_needed(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    expected = ids(llm)
    llm.release_graphs()
    assert llm.stats().recorded_bytes == 0
    assert ids(llm) == expected
    assert llm.stats().recorded_bytes > 0
    assert llm.stats().eager_steps == {}


def test_updated_weights_are_served_at_once_by_the_same_recording(make_tiny: MakeLLM) -> None:
    llm, other = make_tiny(), make_tiny(seed=9)
    expected = ids(other)
    assert ids(llm) != expected
    captures = dict(llm.core.runner.runners["plain"].counters.captures)
    weights = checkpoint_weights(other)
    assert llm.update_weights(weights.items()) == len(weights)
    assert ids(llm) == expected
    assert llm.core.runner.runners["plain"].counters.captures == captures
    assert not llm.core.runner.runners["plain"].counters.recaptures


def checkpoint_weights(llm: LLM) -> dict[str, torch.Tensor]:
    """The model's weights under their checkpoint names, fused ones taken apart."""
    model, config = llm.core.runner.model, llm.core.config
    weights = {}
    for prefix, module in model.named_modules():
        tensor = getattr(module, "weight", None)
        if not isinstance(tensor, torch.Tensor):
            continue
        dense = tensor.to_dense() if tensor.is_mkldnn else tensor
        if prefix.endswith("qkv_proj"):
            parts = dense.split([config.q_size, config.kv_size, config.kv_size])
            for name, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
                weights[prefix.replace("qkv_proj", name) + ".weight"] = part
        elif prefix.endswith("gate_up_proj"):
            for name, part in zip(("gate_proj", "up_proj"), dense.chunk(2), strict=True):
                weights[prefix.replace("gate_up_proj", name) + ".weight"] = part
        else:
            weights[f"{prefix}.weight"] = dense
    return weights


def test_priority_decides_who_is_served_first(make_tiny: MakeLLM) -> None:
    llm = make_tiny(max_num_seqs=1)
    order: list[str] = []
    step = llm.core.step

    def watched(**options: Any) -> list[object]:
        answers = step(**options)
        order.extend(answer.request_id for answer in answers if answer.finished)
        return answers  # type: ignore[return-value]

    llm.core.step = watched  # type: ignore[method-assign, assignment]
    llm.generate([PROMPT] * 4, GREEDY, priority=[3, 1, 2, 0])
    assert order == ["3", "1", "2", "0"]


SERVE_UNTIL_SIGNALLED = """
import sys
from mainspring import LLM, SamplingParams
sizes = {"device": "cpu", "kv_cache_memory": 8 << 20, "launch_mode": sys.argv[2]}
llm = LLM(sys.argv[1], load_format="dummy", skip_tokenizer_init=True, **sizes)
params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
print("ready", flush=True)
while True:
    llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 8, params)
"""


@pytest.mark.parametrize("mode", ["graph", "loop"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_process_in_the_middle_of_generate(
    number: signal.Signals, mode: str, tiny_folder: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE_UNTIL_SIGNALLED, str(tiny_folder), mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode in ((-number, 1, 130) if number is signal.SIGINT else (-number,))
    assert "Segmentation" not in errors
    if number is signal.SIGINT:
        assert "KeyboardInterrupt" in errors


def test_a_spawned_process_has_its_own_loops(tiny_folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=answer_in_loop_mode, args=(str(tiny_folder), queue))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert queue.get() == (12, 1)


def answer_in_loop_mode(folder: str, queue: multiprocessing.SimpleQueue[tuple[int, int]]) -> None:
    sizes = {"device": "cpu", "kv_cache_memory": 8 << 20, "launch_mode": "loop"}
    with LLM(folder, load_format="dummy", skip_tokenizer_init=True, **sizes) as llm:
        queue.put((len(ids(llm)), llm.stats().loop_launches))
