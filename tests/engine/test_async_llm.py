"""An engine in a thread of its own gives event loops the same answers, and takes back what they let go."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from mainspring import LLM, AsyncLLM, SamplingParams
from mainspring.engine.errors import EngineError, RequestError

PROMPT = {"prompt_token_ids": [11, 45, 200, 31, 8]}
DRAWN = SamplingParams(seed=4, top_k=20, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "device": "cpu",
    "kv_cache_memory": 8 << 20,
}


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


async def idle(engine: AsyncLLM) -> bool:
    """Whether everything comes to rest, with every block free."""
    core = engine.llm.core
    for _ in range(500):
        if not core.has_work() and core.scheduler.pool.num_free == core.memory.num_blocks:
            return True
        await asyncio.sleep(0.01)
    return False


async def last(engine: AsyncLLM, params: SamplingParams) -> list[int]:
    outputs = [output async for output in engine.generate(PROMPT, params)]
    assert outputs[-1].finished
    return list(outputs[-1].outputs[0].token_ids)


def test_answers_are_those_of_the_engine_in_the_foreground(tiny_folder: Path) -> None:
    with LLM(str(tiny_folder), **OPTIONS) as llm:
        expected = [list(llm.generate(PROMPT, params)[0].outputs[0].token_ids) for params in (DRAWN, LONG)]

    async def ask() -> None:
        async with AsyncLLM(str(tiny_folder), **OPTIONS) as engine:
            got = await asyncio.gather(*(last(engine, params) for params in (DRAWN, LONG) * 3))
            assert got == expected * 3
            assert await idle(engine)

    run(ask())


def test_the_updates_of_a_stream_join_to_the_answer(tiny_folder: Path) -> None:
    params = SamplingParams(seed=4, n=2, max_tokens=9, ignore_eos=True, logprobs=1, prompt_logprobs=1)

    async def ask() -> None:
        async with AsyncLLM(str(tiny_folder), **OPTIONS) as engine:
            stream = await engine.add(PROMPT["prompt_token_ids"], params)
            tokens: dict[int, list[int]] = {0: [], 1: []}
            logprobs: dict[int, int] = {0: 0, 1: 0}
            prompts = []
            async for update in stream:
                prompts += [update.prompt_logprobs] if update.prompt_logprobs is not None else []
                for choice in update.choices:
                    tokens[choice.index] += choice.token_ids
                    logprobs[choice.index] += len(choice.logprobs or ())
            assert update.finished
            assert stream.answer is not None
            outputs = stream.answer.output().outputs
            assert tokens == {output.index: list(output.token_ids) for output in outputs}
            assert logprobs == {0: 9, 1: 9}
            assert [len(told) for told in prompts] == [5]

    run(ask())


@pytest.mark.parametrize("how", ["closed", "cancelled", "cancelled at once"])
def test_who_stops_reading_ends_the_request(tiny_folder: Path, how: str) -> None:
    async def ask() -> None:
        async with AsyncLLM(str(tiny_folder), **OPTIONS) as engine:
            if how == "closed":
                stream = engine.generate(PROMPT, LONG)
                await anext(stream)
                await stream.aclose()  # type: ignore[attr-defined]
            else:
                task = asyncio.create_task(last(engine, LONG))
                await asyncio.sleep(0 if how == "cancelled at once" else 0.05)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert await idle(engine)
            assert await last(engine, DRAWN)

    run(ask())


def test_a_request_that_can_never_be_served_is_refused(tiny_folder: Path) -> None:
    async def ask() -> None:
        async with AsyncLLM(str(tiny_folder), **OPTIONS) as engine:
            for token_ids in ([], [999], [5] * 600):
                with pytest.raises(RequestError):
                    await engine.add(token_ids, DRAWN)
            assert await idle(engine)

    run(ask())


def test_a_failed_step_is_told_to_everyone_who_waits_and_the_engine_goes_on(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> None:
        async with AsyncLLM(str(tiny_folder), **OPTIONS) as engine:
            expected = await last(engine, DRAWN)
            monkeypatch.setattr(engine.llm.core.runner, "launch", lambda plan: 1 / 0)
            told = await asyncio.gather(*(last(engine, LONG) for _ in range(3)), return_exceptions=True)
            assert [type(each) for each in told] == [EngineError] * 3
            monkeypatch.undo()
            assert await last(engine, DRAWN) == expected

    run(ask())


def test_a_model_that_cannot_be_loaded_raises_for_everyone_who_waits(tmp_path: Path) -> None:
    async def ask() -> None:
        engine = AsyncLLM(str(tmp_path / "nowhere"))
        for _ in range(2):
            with pytest.raises(Exception, match="nowhere"):
                await engine.ready()
        assert engine.failure is not None and not engine.is_ready
        await engine.aclose()

    run(ask())


def test_closing_ends_what_runs_and_later_calls_are_told(tiny_folder: Path) -> None:
    async def ask() -> None:
        engine = AsyncLLM(str(tiny_folder), **OPTIONS)
        await engine.ready()
        task = asyncio.create_task(last(engine, LONG))
        await asyncio.sleep(0.02)
        await engine.aclose()
        with pytest.raises(EngineError):
            await task
        with pytest.raises(EngineError):
            await engine.add([5], DRAWN)
        assert engine.closed
        assert not engine._thread.is_alive()

    run(ask())


def test_an_event_loop_that_is_gone_holds_nothing(tiny_folder: Path) -> None:
    engine = AsyncLLM(str(tiny_folder), **OPTIONS)

    async def begin() -> None:
        await engine.ready()
        await engine.add([5, 6], LONG)

    run(begin())  # the loop is closed with the stream still open
    assert run(idle(engine))
    assert run(last(engine, DRAWN))
    engine.close()


def test_text_that_is_taken_piece_by_piece_is_the_text(smollm2: LLM) -> None:
    answer = smollm2.core.add("t", smollm2._encode("The capital of France is")[1], SamplingParams(seed=1, stop="zq"))
    detokenizer, taken = answer.choices[0].detokenizer, ""
    assert detokenizer is not None
    while smollm2.core.has_work():
        smollm2.core.step()
        taken += detokenizer.take()
        assert taken == detokenizer.text
    assert detokenizer.take() == "" and taken
