"""What requests get and what they may not do, on the tiny model: limits, stops, aborts, faults."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mainspring import LLM, SamplingParams
from mainspring.engine.errors import EngineError, RequestError, SettingsError

MakeLLM = Callable[..., LLM]
PROMPT = {"prompt_token_ids": [11, 45, 200, 31, 8]}
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


def assert_idle(llm: LLM, blocks: int | None = None) -> None:
    pool = llm.core.scheduler.pool
    while llm.core.has_work():  # a loop that was asked to end is still to be read
        assert llm.core.launch_mode == "loop"
        llm.core.step()
    assert pool.num_free == (blocks or llm.core.memory.num_blocks)


def test_a_stop_id_ends_the_answer_and_is_its_last_token(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    free = llm.generate(PROMPT, GREEDY)[0].outputs[0]
    assert free.finish_reason == "length"
    stop = free.token_ids[7]
    first = free.token_ids.index(stop)
    stopped = llm.generate(
        PROMPT, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop_token_ids=[stop])
    )[0].outputs[0]
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert_idle(llm)


def test_min_tokens_holds_stop_ids_back(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    free = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    params = SamplingParams(
        temperature=0.0, max_tokens=30, min_tokens=20, ignore_eos=True, stop_token_ids=list(set(free[:10]))
    )
    held = llm.generate(PROMPT, params)[0].outputs[0].token_ids
    assert len(held) >= 20
    assert not set(held[:20]) & set(free[:10])


def test_the_answer_ends_when_the_context_is_full(make_tiny: MakeLLM) -> None:
    llm = make_tiny(max_model_len=40)
    output = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True))[0].outputs[0]
    assert len(output.token_ids) == 35
    assert output.finish_reason == "length"


def test_a_lone_answer_ends_when_the_pool_is_full(make_tiny: MakeLLM) -> None:
    llm = make_tiny(num_gpu_blocks_override=2)
    output = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True))[0].outputs[0]
    assert len(output.token_ids) == 27
    assert output.finish_reason == "length"
    assert_idle(llm, 2)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        (list(range(3, 203)), "KV pool of 128 tokens"),
        ([5] * 600, "max_model_len 512"),
        ([5, 256], "token id 256 is outside the vocabulary of 256"),
        ([-1], "token id -1"),
    ],
)
def test_a_prompt_that_can_never_run_is_refused_at_once_and_hurts_nobody(
    make_tiny: MakeLLM, prompt: list[int], message: str
) -> None:
    llm = make_tiny(num_gpu_blocks_override=8)
    running = llm.stream(PROMPT, GREEDY)
    first = next(running)
    with pytest.raises(RequestError, match=message):
        llm.generate({"prompt_token_ids": prompt}, GREEDY)
    rest = list(running)
    assert first.outputs[0].token_ids == rest[-1].outputs[0].token_ids[: len(first.outputs[0].token_ids)]
    assert rest[-1].outputs[0].token_ids == llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    assert_idle(llm, 8)


def test_one_bad_prompt_of_a_list_leaves_nothing_behind(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    with pytest.raises(RequestError):
        llm.generate([PROMPT, {"prompt_token_ids": []}], GREEDY)
    assert_idle(llm)


def test_more_stop_ids_than_the_step_holds_are_refused(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    with pytest.raises(RequestError, match="> 16"):
        llm.generate(PROMPT, SamplingParams(stop_token_ids=list(range(20, 40))))


def test_closing_a_stream_frees_its_blocks(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    stream = llm.stream(PROMPT, GREEDY)
    for _ in range(3):
        next(stream)
    assert llm.core.scheduler.pool.num_free < llm.core.memory.num_blocks
    stream.close()
    assert_idle(llm)


def test_two_streams_read_in_turn_give_what_each_gives_alone(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    other = {"prompt_token_ids": [9, 9, 9]}
    expected = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in (PROMPT, other)]
    streams = [llm.stream(PROMPT, GREEDY), llm.stream(other, GREEDY)]
    last = [None, None]
    while streams[0] or streams[1]:
        for index, stream in enumerate(streams):
            if stream is not None:
                output = next(stream, None)
                if output is None:
                    streams[index] = None
                else:
                    last[index] = output.outputs[0].token_ids
    assert last == expected


def test_unknown_options_suggest_the_nearest(make_tiny: MakeLLM, tiny_folder: Path) -> None:
    with pytest.raises(TypeError, match="max_num_seqs"):
        LLM(str(tiny_folder), max_num_seq=3)
    with pytest.raises(TypeError, match="temperature"):
        SamplingParams(temprature=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"cudagraph_capture_sizes": [1, 0]}, "cudagraph_capture_sizes"),
        ({"cudagraph_capture_sizes": [-4]}, "cudagraph_capture_sizes"),
        ({"cudagraph_capture_sizes": []}, "cudagraph_capture_sizes"),
        ({"max_model_len": 4096}, "max_model_len 4096 > 512"),
        ({"kv_cache_memory": 100}, "no room for a single KV block"),
        ({"dtype": "int3"}, "dtype is 'int3'"),
        ({"device": "warp"}, "'warp'"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(make_tiny: MakeLLM, options: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make_tiny(**options)


def test_ctrl_c_ends_the_requests_under_way_and_the_engine_goes_on(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    expected = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    long = SamplingParams(temperature=0.0, max_tokens=480, ignore_eos=True)

    def interrupt() -> None:
        deadline = time.monotonic() + 20
        while not llm.core.scheduler.num_running and time.monotonic() < deadline:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT] * 20, long)
    thread.join()
    assert_idle(llm)
    assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == expected


@pytest.mark.parametrize("mode", ["graph", "loop"])
def test_an_engine_used_after_a_fork_says_so(make_tiny: MakeLLM, mode: str) -> None:
    llm = make_tiny(launch_mode=mode)
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    next(stream)  # in loop mode, one is running
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def child() -> None:
        try:
            llm.generate(PROMPT, GREEDY)
        except EngineError as error:
            queue.put(str(error))

    process = context.Process(target=child)
    process.start()
    process.join(60)
    assert "fork" in queue.get()
    assert process.exitcode == 0
    stream.close()


def test_a_closed_engine_says_so(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    llm.close()
    llm.close()
    for ask in (
        lambda: llm.generate(PROMPT, GREEDY),
        lambda: llm.stream(PROMPT, GREEDY),
        llm.stats,
        llm.recording,
        llm.audit,
        llm.verify_graphs,
        llm.release_graphs,
        lambda: llm.update_weights([]),
    ):
        with pytest.raises(EngineError, match="closed"):
            ask()


def test_python_in_a_layer_runs_at_every_token_when_eager_only(make_tiny: MakeLLM) -> None:
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    for eager in (True, False):
        llm = make_tiny(enforce_eager=eager)
        llm.core.runner.model.model.layers[0].register_forward_pre_hook(count)
        calls = 0
        llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True))
        prefill, decode = 1, 9
        assert calls == (prefill + decode if eager else prefill)


def test_a_step_that_fails_aborts_what_runs_and_the_engine_goes_on(
    make_tiny: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_tiny()
    expected = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    other = llm.stream({"prompt_token_ids": [5, 6, 7]}, GREEDY)
    next(other)
    launch = llm.core.runner.launch

    def fail(plan: object) -> object:
        launch(plan)  # type: ignore[arg-type]
        raise RuntimeError("the layer broke")

    monkeypatch.setattr(llm.core.runner, "launch", fail)
    with pytest.raises(RuntimeError, match="the layer broke"):
        llm.generate(PROMPT, GREEDY)
    monkeypatch.undo()
    assert_idle(llm)
    assert [output.outputs[0].finish_reason for output in other][-1:] in ([], ["abort"])
    assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == expected
