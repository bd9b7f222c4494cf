"""The offline interface: ``LLM`` with vLLM's names."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from types import TracebackType
from typing import Any

import torch

from mainspring.engine.answers import Answer
from mainspring.engine.conversations import Messages, conversations, render
from mainspring.engine.core import EngineCore
from mainspring.engine.errors import RequestError
from mainspring.engine.interrupts import HeldInterrupts, interrupts_between_steps
from mainspring.engine.options import reject_unknown
from mainspring.engine.outputs import RequestOutput
from mainspring.engine.sampling_params import SamplingParams
from mainspring.engine.settings import EngineSettings
from mainspring.engine.stats import EngineStats
from mainspring.graphs import AuditReport, Recording

#: A prompt: text, or token ids as ``{"prompt_token_ids": [...]}``, or text as ``{"prompt": "..."}``.
Prompt = str | Mapping[str, Any]


class LLM:
    """A model that answers, with its decode step recorded.

    Args:
        model: a local Hugging Face folder, a GGUF file, a hub name in the local cache, or ``smollm2``.
        options: see ``EngineSettings``; an unknown name is an error that suggests the nearest.

    Usable as a context manager; ``close`` gives the memory back.
    """

    def __init__(self, model: str, **options: Any) -> None:
        reject_unknown(options, {field.name for field in fields(EngineSettings)}, "LLM option")
        self.core = EngineCore(EngineSettings(model=str(model), **options))
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs are in the order of the prompts.

        ``priority`` has one number per prompt; the lower is served first, 0 where none is given.
        ``sampling_params`` is one for all, or one per prompt. Raises ``RequestError`` before anything runs when a
        prompt cannot be served. Ctrl-C ends these requests, frees what they held and raises ``KeyboardInterrupt``.
        """
        if isinstance(prompts, (str, Mapping)):
            prompts = [prompts]
        if not isinstance(prompts, Iterable):
            raise RequestError(f"prompts is {prompts!r}; give a prompt or a list of them")
        encoded = [self._encode(prompt) for prompt in prompts]
        return self._run(encoded, sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template."""
        encoded = [self._encode_chat(conversation) for conversation in conversations(messages)]
        return self._run(encoded, sampling_params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding the answer so far (cumulative) whenever it has grown.

        Several streams may be read in turn. Closing the iterator, or dropping it, ends the request and frees what it
        held. Where the request is ended from elsewhere, the last output is finished with reason "abort".
        """
        return self._stream(self._encode(prompt), sampling_params)

    def stream_chat(self, messages: Messages, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Answer one conversation, yielding the answer so far as ``stream`` does."""
        return self._stream(self._encode_chat(messages), sampling_params)

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Replace weights in place by their checkpoint names, any subset in any order; see ``EngineCore``."""
        return self.core.update_weights(tensors)

    def release_graphs(self) -> None:
        """Give back the memory of everything recorded; it is recorded again when next needed."""
        self.core.release_graphs()

    def recording(self) -> Recording:
        """What is recorded: each rung's operation list and address book, as plain data; see docs/graphs.md."""
        return self.core.recording()

    def audit(self) -> dict[str, AuditReport]:
        """Compare every recorded address with the memory that there is now, for each variant of the step."""
        return self.core.audit()

    def verify_graphs(self) -> int:
        """Compare every recording with an eager run, bit for bit; see ``EngineCore``."""
        return self.core.verify_graphs()

    def stats(self) -> EngineStats:
        """What the engine has done since it was made."""
        return self.core.stats()

    def close(self) -> None:
        """Give the memory back. The object cannot be used afterwards."""
        self.core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[tuple[str | None, Sequence[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        params = self._params_for(sampling_params, len(prompts))
        ranks = [0] * len(prompts) if priority is None else priority
        if not isinstance(ranks, Sequence) or isinstance(ranks, str):
            raise RequestError(f"priority is {ranks!r}; give a list with one number per prompt")
        if len(ranks) != len(prompts):
            raise RequestError(f"{len(ranks)} priorities for {len(prompts)} prompts; give one per prompt")
        answers: list[Answer] = []
        with interrupts_between_steps() as interrupts, self.core.brisk():
            try:
                for (text, token_ids), each, rank in zip(prompts, params, ranks, strict=True):
                    answers.append(self.core.add(self._next_id(), token_ids, each, prompt=text, priority=rank))
                    interrupts.check()
                self._finish(answers, use_tqdm, interrupts)
            finally:
                for answer in answers:
                    self.core.abort(answer)
        return [answer.output() for answer in answers]

    def _finish(self, answers: Sequence[Answer], use_tqdm: bool, interrupts: HeldInterrupts) -> None:
        from tqdm import tqdm

        waiting = deque(answers)
        with tqdm(total=len(answers), disable=not use_tqdm) as bar:
            while waiting:
                self.core.step(patient=True, may_be_cut=interrupts.may_cut)
                interrupts.check()
                # In order, and not by what this step touched: another thread's step may have finished an answer.
                while waiting and (waiting[0].finished or waiting[0].error is not None):
                    answer = waiting.popleft()
                    if answer.error is not None:
                        raise answer.error
                    bar.update()

    def _stream(
        self, prompt: tuple[str | None, Sequence[int]], params: SamplingParams | None
    ) -> Iterator[RequestOutput]:
        text, token_ids = prompt
        answer = None
        try:
            with interrupts_between_steps():
                answer = self.core.add(self._next_id(), token_ids, self._params_for(params, 1)[0], prompt=text)
                stream = self._follow(answer)
                next(stream)  # begun, so that closing or dropping it unread ends the request
            return stream
        except BaseException:
            if answer is not None:
                self.core.doomed.append(answer)
                self._end(answer)
            raise

    def _follow(self, answer: Answer) -> Iterator[RequestOutput]:
        told = (0, False)
        try:
            yield answer.output()
            while True:
                tokens = sum(len(choice.request.output_token_ids) for choice in answer.choices)
                state = (tokens, answer.finished and answer.error is None)
                if state != told:
                    told = state
                    yield answer.output()
                elif answer.error is not None:
                    raise answer.error
                elif answer.finished:
                    return
                else:
                    with interrupts_between_steps() as interrupts:
                        self.core.step(may_be_cut=interrupts.may_cut)
        finally:
            self.core.doomed.append(answer)  # which no signal can cut; so the next call ends it where the rest is cut
            self._end(answer)

    def _end(self, answer: Answer) -> None:
        with interrupts_between_steps():
            self.core.abort(answer)

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """The model's own defaults that are in force, as keyword arguments for ``SamplingParams``."""
        return dict(self.core.sampling_defaults)

    def default_params(self) -> SamplingParams:
        """What a request without parameters runs with: the model's ``generation_config.json``, unless the engine was
        made with ``generation_config="vllm"``, and else the defaults of ``SamplingParams``."""
        return SamplingParams(**self.sampling_defaults)

    def get_default_sampling_params(self) -> SamplingParams:
        """``default_params`` under vLLM's name."""
        return self.default_params()

    def _params_for(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        if params is None:
            return [self.default_params()] * count
        if isinstance(params, SamplingParams):
            return [params] * count
        if not isinstance(params, (list, tuple)) or not all(isinstance(each, SamplingParams) for each in params):
            raise RequestError(f"sampling_params is {params!r}; give a SamplingParams, or a list with one per prompt")
        if len(params) != count:
            raise RequestError(f"{len(params)} sampling_params for {count} prompts; give one, or one per prompt")
        return params

    def _encode(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        if isinstance(prompt, Mapping):
            reject_unknown(prompt, {"prompt", "prompt_token_ids"}, "prompt field")
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), prompt["prompt_token_ids"]
            if "prompt" not in prompt:
                raise RequestError("a prompt given as a mapping needs 'prompt' or 'prompt_token_ids'")
            prompt = prompt["prompt"]
        if not isinstance(prompt, str):
            raise RequestError(f"a prompt is a text or a mapping with 'prompt_token_ids', not {type(prompt).__name__}")
        return prompt, self._tokenize(prompt)

    def _encode_chat(self, messages: Messages) -> tuple[str, list[int]]:
        text = render(self._tokenizer(), messages, self.core.settings.model)
        return text, self._tokenize(text, add_special_tokens=False)

    def _tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        tokenizer = self._tokenizer()
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt holds {text[error.start]!r} at character {error.start}, half of a surrogate pair, which "
                f"is no text; decode the bytes that it came from as UTF-8"
            ) from error
        return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def _tokenizer(self) -> Any:
        if self.core.tokenizer is None:
            raise RequestError("this engine has no tokenizer (skip_tokenizer_init); give 'prompt_token_ids'")
        return self.core.tokenizer

    def _next_id(self) -> str:
        return str(next(self._ids))
