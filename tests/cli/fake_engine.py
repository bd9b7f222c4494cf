"""Stands in for ``mainspring.LLM``, to test what the commands make of options, answers and errors."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

from mainspring import CompletionOutput, RequestOutput, SamplingParams

STATS = SimpleNamespace(
    launch_mode="graph",
    cpu_calls_per_token=1.25,
    ms_per_token=7.5,
    tokens_per_second=133.3,
    padding_waste=0.125,
    rungs={1: 63, 4: 0, 8: 12},
    prefill_steps=2,
    recorded_prefill_steps=1,
    eager_prefill_steps={"too_many_tokens": 1},
    decode_steps=75,
    eager_steps={},
    padded_rows=9,
    recaptures={},
    verified_graphs=0,
    launches_per_token=0.125,
    loop_launches=0,
    loop_steps=0,
    loop_ends={},
    single_steps={},
    loop_gap_ms=None,
)


class FakeLLM:
    """Answers each prompt with the prompt, a word a step; one of three words is cut by its length."""

    made: ClassVar[list[FakeLLM]] = []
    fails_with: ClassVar[BaseException | None] = None
    interrupt_after: ClassVar[int | None] = None
    """Ctrl-C comes when this many pieces of an answer have been taken."""
    sampling_defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, model: str, **options: Any) -> None:
        self.options = {"model": model, **options}
        self.conversations: list[list[dict[str, str]]] = []
        self.params: list[SamplingParams] = []
        self.open_streams = 0
        self.closed = False
        type(self).made.append(self)

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.closed = True

    def stream(self, prompt: str, params: SamplingParams) -> Iterator[RequestOutput]:
        self.params.append(params)
        if self.fails_with is not None:
            raise self.fails_with
        return self._pieces(prompt)

    def stream_chat(self, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[RequestOutput]:
        self.conversations.append(list(messages))
        return self.stream(messages[-1]["content"], params)

    def generate(self, prompts: list[str], params: SamplingParams, use_tqdm: bool = False) -> list[RequestOutput]:
        self.params.append(params)
        answers = range(params.n)
        return [self._output(prompt, [f"{prompt}#{index}" for index in answers], True) for prompt in prompts]

    def chat(
        self, conversations: list[list[dict[str, str]]], params: SamplingParams, use_tqdm: bool = False
    ) -> list[RequestOutput]:
        self.conversations += conversations
        return self.generate([messages[-1]["content"] for messages in conversations], params)

    def stats(self) -> SimpleNamespace:
        return STATS

    def _pieces(self, prompt: str) -> Iterator[RequestOutput]:
        self.open_streams += 1
        try:
            words = prompt.split(" ")
            for count in range(1, len(words) + 1):
                if self.interrupt_after is not None and count > self.interrupt_after:
                    raise KeyboardInterrupt
                yield self._output(prompt, [" ".join(words[:count])], count == len(words))
        finally:
            self.open_streams -= 1

    def _output(self, prompt: str, texts: list[str], finished: bool) -> RequestOutput:
        length = len(texts[0].split(" "))
        reason = ("length" if length == 3 else "stop") if finished else None
        outputs = [
            CompletionOutput(index, text, [7] * length, finish_reason=reason) for index, text in enumerate(texts)
        ]
        return RequestOutput("0", prompt, [1, 2], outputs, finished)
