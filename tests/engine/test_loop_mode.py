"""The engine in loop mode: few launches, tokens as they are made, news heard, everything given back."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mainspring import LLM, SamplingParams
from mainspring.engine.errors import EngineError, SettingsError
from mainspring.engine.limits import choose_launch_mode
from mainspring.engine.loop_times import StepTimes
from mainspring.engine.loops import RunningLoop
from mainspring.engine.settings import EngineSettings
from mainspring.graphs import CpuGraph, Loop, LoopError, LoopStuckError

MakeLLM = Callable[..., LLM]
PROMPT = {"prompt_token_ids": [11, 45, 200, 31, 8]}
PROMPTS = [{"prompt_token_ids": [11 + 3 * index, 45, 200, 31, 8][: 2 + index % 4]} for index in range(9)]


def greedy(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **options)


def ids(llm: LLM, params: SamplingParams, prompt: Any = PROMPT) -> list[int]:
    return list(llm.generate(prompt, params)[0].outputs[0].token_ids)


def drain(llm: LLM) -> None:
    while llm.core.has_work():
        llm.core.step()


def assert_all_free(llm: LLM) -> None:
    assert llm.core.scheduler.pool.num_free == llm.core.memory.num_blocks


class Brake:
    """Makes each recorded step on the CPU last, and lets a test hold it or break it."""

    def __init__(self) -> None:
        self.seconds = 0.002
        self.go = threading.Event()
        self.go.set()
        self.error: Exception | None = None
        self.steps = 0

    def __call__(self, replay: Callable[[CpuGraph], None]) -> Callable[[CpuGraph], None]:
        def slow(graph: CpuGraph) -> None:
            self.go.wait()
            time.sleep(self.seconds)
            if self.error is not None:
                raise self.error
            replay(graph)
            self.steps += 1

        return slow


@pytest.fixture
def brake(monkeypatch: pytest.MonkeyPatch) -> Brake:
    brake = Brake()
    monkeypatch.setattr(CpuGraph, "replay", brake(CpuGraph.replay))
    return brake


def running_loop(llm: LLM) -> RunningLoop:
    """Step until a loop runs of which some tokens have come."""
    for _ in range(200):
        llm.core.step()
        head = llm.core.pipeline.in_flight[0] if llm.core.pipeline.in_flight else None
        if isinstance(head, RunningLoop) and head.taken > 1:
            return head
    raise AssertionError("no loop came to run")


# -- one call for a whole answer -------------------------------------------------------------------------------


def test_an_answer_of_256_tokens_is_one_launch(make_tiny: MakeLLM) -> None:
    llm = make_tiny(launch_mode="loop")
    expected = ids(make_tiny(launch_mode="graph"), greedy(256))
    assert ids(llm, greedy(256)) == expected
    stats = llm.stats()
    assert (stats.loop_launches, stats.loop_steps, dict(stats.loop_ends)) == (1, 255, {"flag": 1})
    assert stats.launches_per_token <= 0.02
    assert_all_free(llm)


@pytest.mark.parametrize("loop_steps", [2, 3, 16])
def test_blocks_are_reserved_anew_while_the_loop_runs(make_tiny: MakeLLM, brake: Brake, loop_steps: int) -> None:
    expected = ids(make_tiny(launch_mode="graph"), greedy(120))
    llm = make_tiny(launch_mode="loop", loop_steps=loop_steps, block_size=4)
    assert ids(llm, greedy(120)) == expected
    stats = llm.stats()
    assert stats.loop_steps + stats.single_steps.get("no free block", 0) == 119
    if loop_steps == 16:
        assert stats.loop_launches < 119 / 16  # fewer than without reserving anew
    assert_all_free(llm)


@pytest.mark.parametrize("blocks", [64, 6])
@pytest.mark.parametrize("loop_steps", [3, 256])
def test_free_runs_give_the_tokens_of_graph_mode(make_tiny: MakeLLM, blocks: int, loop_steps: int) -> None:
    options: dict[str, Any] = {"max_num_seqs": 4, "num_gpu_blocks_override": blocks, "max_num_batched_tokens": 16}
    stop = ids(make_tiny(), greedy(9))[1]
    params = [
        SamplingParams(
            temperature=0.9 if index % 2 else 0.0,
            seed=index,
            max_tokens=46 - 7 * (index % 4),
            ignore_eos=True,
            stop_token_ids=[stop] if index % 3 == 0 else None,
            n=2 if index == 1 else 1,
            min_tokens=3 if index == 5 else 0,
            logprobs=2 if index == 7 else None,
        )
        for index in range(len(PROMPTS))
    ]

    def outcome(llm: LLM) -> list[Any]:
        outputs = llm.generate(PROMPTS, params)
        return [[(each.token_ids, each.finish_reason, each.logprobs) for each in output.outputs] for output in outputs]

    llm = make_tiny(launch_mode="loop", loop_steps=loop_steps, **options)
    assert outcome(llm) == outcome(make_tiny(launch_mode="graph", **options))
    assert llm.stats().loop_steps > 0
    assert blocks > 6 or llm.stats().preemptions > 0
    assert_all_free(llm)


def test_no_token_past_the_end_is_delivered(make_tiny: MakeLLM, tiny_speaking: Path, brake: Brake) -> None:
    """After a stop string the device goes on until it hears of it."""
    options: dict[str, Any] = {"model": str(tiny_speaking), "skip_tokenizer_init": False}
    free = make_tiny(launch_mode="graph", **options).generate("one", greedy(60))[0].outputs[0]
    stop = free.text[20]
    llm = make_tiny(launch_mode="loop", **options)
    output = llm.generate("one", greedy(60, stop=[stop]))[0].outputs[0]
    count = next(n for n in range(60) if stop in llm.core.tokenizer.decode(free.token_ids[: n + 1]))
    assert output.token_ids == free.token_ids[: count + 1]
    assert output.text == free.text[: free.text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    drain(llm)
    assert llm.stats().loop_ends == {"stop string": 1}
    assert llm.stats().loop_steps >= count
    assert_all_free(llm)


def test_a_stream_sees_tokens_while_the_loop_runs(make_tiny: MakeLLM, brake: Brake) -> None:
    llm = make_tiny(launch_mode="loop")
    seen = [len(output.outputs[0].token_ids) for output in llm.stream(PROMPT, greedy(80))]
    assert llm.stats().loop_launches == 1
    assert len(seen) > 20
    assert seen == sorted(seen)


def test_rows_that_end_bring_the_batch_down_the_ladder_without_a_stop(make_tiny: MakeLLM, brake: Brake) -> None:
    llm = make_tiny(launch_mode="loop", max_num_seqs=8)
    params = [greedy(12)] * 6 + [greedy(100)] * 2
    outputs = llm.generate(PROMPTS[:8], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [12] * 6 + [100] * 2
    stats = llm.stats()
    assert stats.loop_ends == {"lower rung": 1, "flag": 1}
    assert set(stats.rungs) == {2, 8}
    assert stats.rungs[2] > 70


def test_an_answer_that_nobody_follows_is_looked_at_seldom(
    make_tiny: MakeLLM, brake: Brake, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mainspring.engine import loop_driver

    monkeypatch.setattr(loop_driver, "LONGEST_WAIT", 3600.0)
    llm = make_tiny(launch_mode="loop")
    ids(llm, greedy(40))  # so that the time of a step is known
    monkeypatch.setattr(StepTimes, "unseen_steps", lambda *args: 16)  # however slow they are here
    steps, step = 0, llm.core.step

    def counted(**options: Any) -> list[Any]:
        nonlocal steps
        steps += 1
        return step(**options)

    llm.core.step = counted  # type: ignore[method-assign]
    assert ids(llm, greedy(200)) == ids(make_tiny(launch_mode="graph"), greedy(200))
    assert steps < 200 / 8
    del llm.core.step
    assert_all_free(llm)


def test_a_stop_string_is_found_at_once_also_where_nobody_follows(
    make_tiny: MakeLLM, tiny_speaking: Path, brake: Brake
) -> None:
    brake.seconds = 0.01
    llm = make_tiny(launch_mode="loop", model=str(tiny_speaking), skip_tokenizer_init=False)
    free = llm.generate("one", greedy(40))[0].outputs[0]
    output = llm.generate("one", greedy(400, stop=[free.text[5:8]]))[0].outputs[0]
    drain(llm)
    assert output.finish_reason == "stop"
    assert llm.stats().loop_steps - 39 < len(output.token_ids) + 20  # and not 64 later


@pytest.mark.parametrize("how", ["arrival", "abort"])
def test_news_end_a_patient_wait(make_tiny: MakeLLM, brake: Brake, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    from mainspring.engine import loop_driver

    monkeypatch.setattr(loop_driver, "LONGEST_WAIT", 3600.0)
    llm = make_tiny(launch_mode="loop")
    first = llm.core.add("first", [5, 6, 7], greedy(400))
    loop = running_loop(llm)
    brake.go.clear()
    monkeypatch.setattr(StepTimes, "unseen_steps", lambda *args: 64)  # a step under way may still bring a token
    monkeypatch.setattr(StepTimes, "sleep_through", lambda *args: 3600.0)
    waiting = threading.Thread(target=llm.core.pipeline.driver.await_news, args=(loop, True), daemon=True)
    waiting.start()
    try:
        assert waiting.is_alive()
        if how == "arrival":
            llm.core.add("second", [8, 9], greedy(3))
        else:
            llm.core.abort(first)
        waiting.join(20)
        assert not waiting.is_alive()
        assert loop.ringing
    finally:
        brake.go.set()
    drain(llm)
    assert_all_free(llm)


# -- news ------------------------------------------------------------------------------------------------------


def test_a_new_request_is_admitted_within_two_steps(make_tiny: MakeLLM, brake: Brake) -> None:
    llm = make_tiny(launch_mode="loop")
    brake.seconds = 0.02
    first = llm.core.add("first", [5, 6, 7], greedy(200))
    loop = running_loop(llm)
    steps = brake.steps
    second = llm.core.add("second", [8, 9], greedy(3))
    while not second.choices[0].request.output_token_ids:
        llm.core.step()
    assert loop.end is not None
    assert brake.steps - steps <= 2
    assert llm.core.pipeline.driver.ends["arrival"] == 1
    llm.core.abort(first)
    while not second.finished:
        llm.core.step()


def test_a_request_for_which_there_is_no_seat_does_not_end_the_loop(make_tiny: MakeLLM, brake: Brake) -> None:
    llm = make_tiny(launch_mode="loop", max_num_seqs=1)
    llm.core.add("first", [5, 6, 7], greedy(60))
    loop = running_loop(llm)
    second = llm.core.add("second", [8, 9], greedy(3))
    assert not loop.ringing
    drain(llm)
    assert second.finished
    assert "arrival" not in llm.core.pipeline.driver.ends


def test_a_row_that_ends_lets_a_waiting_request_in(make_tiny: MakeLLM, brake: Brake) -> None:
    """Although the other row goes on for long."""
    llm = make_tiny(launch_mode="loop", max_num_seqs=2)
    long = llm.core.add("long", [5, 6, 7], greedy(300))
    llm.core.add("short", [8], greedy(10))
    waiting = llm.core.add("waiting", [8, 9], greedy(3))
    while not waiting.finished:
        llm.core.step()
    assert len(long.choices[0].request.output_token_ids) < 60
    llm.core.abort(long)
    drain(llm)
    assert_all_free(llm)


def test_an_aborted_row_is_given_up_and_the_others_go_on_at_once(make_tiny: MakeLLM, brake: Brake) -> None:
    llm = make_tiny(launch_mode="loop")
    expected = ids(make_tiny(launch_mode="graph"), greedy(100))
    kept = llm.core.add("kept", PROMPT["prompt_token_ids"], greedy(100))
    gone = llm.core.add("gone", [8, 9], greedy(100))
    loop = running_loop(llm)
    held = gone.choices[0].request.block_ids
    free = llm.core.scheduler.pool.num_free
    llm.core.abort(gone)
    assert llm.core.scheduler.pool.num_free > free
    assert held
    drain(llm)
    assert loop.tied
    assert kept.choices[0].request.output_token_ids == expected
    assert llm.core.pipeline.driver.ends == {"abort": 1, "flag": 1}
    assert_all_free(llm)


def test_other_threads_are_not_held_up_by_a_step_that_waits(make_tiny: MakeLLM, brake: Brake) -> None:
    llm = make_tiny(launch_mode="loop")
    llm.core.add("first", [5, 6, 7], greedy(100))
    running_loop(llm)
    brake.go.clear()
    entered, answers = threading.Event(), []

    def step() -> None:
        while not answers:
            entered.set()
            llm.core.step()

    waiting = threading.Thread(target=step, daemon=True)
    waiting.start()
    entered.wait()
    try:
        asked = threading.Thread(target=lambda: answers.append(llm.core.add("second", [9], greedy(2))), daemon=True)
        asked.start()
        asked.join(20)
        assert answers, "add() waited for a step"
    finally:
        brake.go.set()
        waiting.join(20)
    assert not waiting.is_alive()
    drain(llm)


def test_a_step_that_waits_can_be_interrupted(
    make_tiny: MakeLLM, brake: Brake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the server's thread is, when a request has come."""
    from mainspring.engine import loop_driver

    monkeypatch.setattr(loop_driver, "LONGEST_WAIT", 3600.0)
    llm = make_tiny(launch_mode="loop")
    llm.core.add("first", [5, 6, 7], greedy(100))
    loop = running_loop(llm)
    brake.go.clear()
    for _ in range(2):  # takes what is there, then nothing comes any more
        llm.core.interrupt()
        llm.core.step()
    waiting = threading.Thread(target=llm.core.step, daemon=True)
    waiting.start()
    try:
        llm.core.interrupt()
        waiting.join(20)
        assert not waiting.is_alive()
        assert not loop.ringing
    finally:
        brake.go.set()
    drain(llm)


def test_waiting_for_tokens_takes_no_processor_time(make_tiny: MakeLLM, brake: Brake) -> None:
    """A step of a running loop sleeps: counted in looks, since time is not for tests."""
    llm = make_tiny(launch_mode="loop")
    brake.seconds = 0.02
    looks = 0
    look = RunningLoop.has_news

    def counted(loop: RunningLoop, enough: int = 1) -> bool:
        nonlocal looks
        looks += 1
        return look(loop, enough)

    RunningLoop.has_news = counted  # type: ignore[method-assign]
    try:
        ids(llm, greedy(20))
    finally:
        RunningLoop.has_news = look  # type: ignore[method-assign]
    assert looks < 20 * 40


# -- what needs the CPU ----------------------------------------------------------------------------------------


def test_logits_processors_put_the_engine_in_graph_mode_while_they_live(make_tiny: MakeLLM, brake: Brake) -> None:
    llm = make_tiny(launch_mode="loop")
    other = llm.core.add("other", PROMPT["prompt_token_ids"], greedy(150))
    running_loop(llm)
    held = llm.core.add("held", [4, 5], greedy(6, logits_processors=[lambda ids, logits: logits]))
    while not held.finished:
        llm.core.step()
    assert llm.stats().single_steps == {"a row needs the CPU": 5}
    launches = llm.stats().loop_launches
    drain(llm)
    assert llm.stats().loop_launches == launches + 1
    assert other.choices[0].request.output_token_ids == ids(make_tiny(launch_mode="graph"), greedy(150))


def test_a_split_batch_runs_step_by_step(make_tiny: MakeLLM) -> None:
    llm = make_tiny(launch_mode="loop", max_num_seqs=6, cudagraph_capture_sizes=[1, 4])
    sizes = llm.core.limits.ladder.sizes
    assert sizes[-1] == 6 or sizes[-1] == 4
    expected = make_tiny(launch_mode="graph", max_num_seqs=6, cudagraph_capture_sizes=[1, 4]).generate(
        PROMPTS[:6], greedy(12)
    )
    outputs = llm.generate(PROMPTS[:6], greedy(12))
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    if sizes[-1] == 4:
        assert llm.stats().single_steps["split batch"] > 0


def test_records_too_large_for_a_ring_are_read_step_by_step(
    make_tiny: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mainspring.engine import loops

    monkeypatch.setattr(loops, "RING_BYTES", 64 * 8 * 8)
    llm = make_tiny(launch_mode="loop")
    assert ids(llm, greedy(10))
    assert llm.stats().single_steps == {}
    assert llm.generate(PROMPT, greedy(10, logprobs=3))[0].outputs[0].logprobs is not None
    assert llm.stats().single_steps == {"large records": 9}


# -- between and around loops ----------------------------------------------------------------------------------


def test_weights_are_updated_and_recordings_released_in_mid_answer(make_tiny: MakeLLM, brake: Brake) -> None:
    llm = make_tiny(launch_mode="loop")
    expected = ids(make_tiny(launch_mode="graph"), greedy(90))
    answer = llm.core.add("a", PROMPT["prompt_token_ids"], greedy(90))
    loop = running_loop(llm)
    llm.release_graphs()
    assert not loop.loop.poll(loop.launch).running
    running_loop(llm)
    assert llm.update_weights([]) == 0
    drain(llm)
    assert answer.choices[0].request.output_token_ids == expected


def test_a_first_request_of_a_kind_waits_for_the_loop_that_must_be_recorded_again(
    make_tiny: MakeLLM, brake: Brake
) -> None:
    llm = make_tiny(launch_mode="loop")
    sampled = SamplingParams(temperature=0.8, seed=3, max_tokens=80, ignore_eos=True)
    answer = llm.core.add("a", PROMPT["prompt_token_ids"], sampled)
    running_loop(llm)
    told = llm.core.add("b", PROMPT["prompt_token_ids"], greedy(20, logprobs=2))
    drain(llm)
    assert answer.choices[0].request.output_token_ids == ids(make_tiny(launch_mode="graph"), sampled)
    assert len(told.output().outputs[0].logprobs or []) == 20


def test_moved_buffers_are_recorded_again(make_tiny: MakeLLM) -> None:
    llm = make_tiny(launch_mode="loop")
    expected = ids(llm, greedy(20))
    buffers = llm.core.runner.buffers
    name = next(name for name in buffers if name.endswith("norm.weight"))
    module = llm.core.runner.model.get_submodule(name.rpartition(".")[0])
    module.weight.data = module.weight.data.clone()
    assert buffers.accept() == [name]
    assert ids(llm, greedy(20)) == expected


@pytest.mark.parametrize("how", ["close", "del"])
def test_an_engine_that_goes_ends_its_loop(tiny_folder: Path, brake: Brake, how: str) -> None:
    llm = LLM(
        str(tiny_folder), load_format="dummy", skip_tokenizer_init=True, device="cpu", kv_cache_memory=8 << 20,
        launch_mode="loop",
    )  # fmt: skip
    llm.core.add("a", PROMPT["prompt_token_ids"], greedy(400))
    loop = running_loop(llm)
    cache = weakref.ref(llm.core.runner.buffers["kv_cache"])
    if how == "close":
        llm.close()
    else:
        del llm
        gc.collect()
    assert not loop.loop.poll(loop.launch).running
    del loop
    gc.collect()
    assert cache() is None


def test_an_interrupted_answer_ends_its_loop(make_tiny: MakeLLM, brake: Brake) -> None:
    llm = make_tiny(launch_mode="loop")
    stream = llm.stream(PROMPT, greedy(400))
    for _ in range(4):
        next(stream)
    loop = llm.core.pipeline.in_flight[0]
    assert isinstance(loop, RunningLoop)
    stream.close()
    assert_all_free(llm)
    loop.wait()
    assert loop.loop.poll(loop.launch).iterations < 100
    assert ids(llm, greedy(5)) == ids(make_tiny(launch_mode="graph"), greedy(5))


# -- faults ----------------------------------------------------------------------------------------------------


def test_an_error_in_a_loop_names_the_launch_and_stops_the_engine(make_tiny: MakeLLM, brake: Brake) -> None:
    llm = make_tiny(launch_mode="loop")
    answer = llm.core.add("a", PROMPT["prompt_token_ids"], greedy(100))
    running_loop(llm)
    brake.error = ValueError("illegal address")
    with pytest.raises(LoopError, match=r"launch 1 of 'decode\.plain\[1\]'.*illegal address"):
        drain(llm)
    assert answer.finished
    with pytest.raises(EngineError, match=r"launch 1 of 'decode\.plain\[1\]'.*illegal address"):
        llm.generate(PROMPT, greedy(3))
    llm.close()


def test_a_stuck_loop_is_found(make_tiny: MakeLLM, brake: Brake) -> None:
    llm = make_tiny(launch_mode="loop", loop_timeout=0.3)
    answer = llm.core.add("a", PROMPT["prompt_token_ids"], greedy(100))
    running_loop(llm)
    brake.go.clear()
    try:
        with pytest.raises(LoopStuckError, match=r"launch 1 of decode\.plain\[1\] made no step for 0\.3 s"):
            drain(llm)
        assert answer.finished
        with pytest.raises(EngineError, match="made no step"):
            llm.core.step()
    finally:
        brake.go.set()


# -- choosing the mode -----------------------------------------------------------------------------------------


def test_the_default_is_loop_on_a_gpu_and_graph_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(Loop, "available", staticmethod(lambda device: None))
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert choose_launch_mode(EngineSettings(model="m"), gpu) == "loop"
    assert choose_launch_mode(EngineSettings(model="m"), cpu) == "graph"
    assert choose_launch_mode(EngineSettings(model="m", launch_mode="graph"), gpu) == "graph"
    assert choose_launch_mode(EngineSettings(model="m", launch_mode="loop"), cpu) == "loop"
    assert choose_launch_mode(EngineSettings(model="m", launch_mode="eager"), gpu) == "eager"
    assert choose_launch_mode(EngineSettings(model="m", enforce_eager=True), gpu) == "eager"


@pytest.mark.parametrize("asked", [None, "loop"])
def test_the_log_says_once_why_loop_cannot_be_had(
    make_tiny: MakeLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asked: str | None
) -> None:
    import torch

    monkeypatch.setattr(Loop, "available", staticmethod(lambda device: "the driver is too old"))
    with caplog.at_level(logging.INFO, "mainspring"):
        mode = choose_launch_mode(EngineSettings(model="m", launch_mode=asked), torch.device("cuda", 0))
    assert mode == "graph"
    assert [record.message for record in caplog.records] == [
        "launch mode is graph, as loop cannot be had on cuda:0: the driver is too old"
    ]
    llm = make_tiny(launch_mode="loop")
    assert llm.stats().launch_mode == "graph"
    assert len(ids(llm, greedy(4))) == 4


@pytest.mark.parametrize("mode", ["graph", "loop"])
def test_contradicting_settings_are_refused(mode: str) -> None:
    with pytest.raises(SettingsError, match="enforce_eager"):
        EngineSettings(model="m", enforce_eager=True, launch_mode=mode)


@pytest.mark.parametrize("wrong", [{"launch_mode": "fast"}, {"loop_steps": 0}, {"loop_timeout": 0.0}])
def test_settings_of_loops_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        EngineSettings(model="m", **wrong)


# -- what is measured ------------------------------------------------------------------------------------------


def test_a_lower_rung_is_taken_where_what_it_saves_is_more_than_the_change_costs() -> None:
    times = StepTimes()
    now = ("plain", 8)
    assert not times.lower_pays(now, 4, rows=5, steps_left=100)  # nothing is known, and few rows are padding
    assert times.lower_pays(now, 4, rows=4, steps_left=100)  # it is tried
    times.add(now, 0.100, 100)
    times.add(("plain", 4), 0.090, 100)
    times.add_switch(0.0)
    assert times.lower_pays(now, 4, rows=4, steps_left=30)  # saves 3 ms
    assert not times.lower_pays(now, 4, rows=4, steps_left=0)
    times.add(("plain", 4), 0.200, 100)
    assert not times.lower_pays(now, 4, rows=4, steps_left=1000)  # it is slower


def test_the_cpu_looks_seldom_while_nothing_is_due_and_often_at_the_end() -> None:
    times, rung = StepTimes(), ("plain", 1)
    times.add(rung, 0.4, 1000)
    usual = times.look_again(rung, 1, 100, ending=False)
    assert usual >= 4 * 0.4e-3  # several tokens a look
    assert times.look_again(rung, 1, 1, ending=False) < usual
    assert times.look_again(rung, 8, 100, ending=False) < usual  # which several tokens a step pay for
    assert times.look_again(rung, 1, 100, ending=True) < 1e-4
    times.add(rung, 10.0, 100)
    assert times.look_again(rung, 1, 100, ending=False) <= 5e-3


def test_a_loop_goes_unseen_for_some_steps_but_its_end_is_seen_at_once() -> None:
    times, rung = StepTimes(), ("plain", 1)
    assert times.unseen_steps(rung) == 1  # nothing is known
    times.add(rung, 0.5, 1000)
    assert times.unseen_steps(rung) == 64
    assert times.sleep_through(rung, 40, is_end=False, may_stop=False) == pytest.approx(40 * 0.5e-3)
    assert times.sleep_through(rung, 40, is_end=True, may_stop=False) == pytest.approx(39 * 0.5e-3)
    assert times.sleep_through(rung, 1, is_end=True, may_stop=False) < 0.5e-3 / 4
    assert times.sleep_through(rung, 40, is_end=False, may_stop=True) <= 2e-3  # it may be at its end any moment
    times.add(rung, 10.0, 1000)
    assert times.unseen_steps(rung) == 4
    times.add(rung, 100.0, 1000)
    assert times.unseen_steps(rung) == 1
