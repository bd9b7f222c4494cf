"""Steps launched before earlier ones are read change no answer.

On a GPU the engine keeps one step in flight. Here the CPU is made to do the same, and more: whatever the scheduler,
the seats and the token ring must get right then, they must get right here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mainspring import LLM, SamplingParams
from mainspring.engine.transfer import Uploader
from mainspring.graphs import Staging

MakeLLM = Callable[..., LLM]
PROMPTS = [{"prompt_token_ids": [11 + 3 * index, 45, 200, 31, 8][: 2 + index % 4]} for index in range(9)]


def ahead(llm: LLM, depth: int) -> LLM:
    """Let ``llm`` launch ``depth`` steps before it reads the first."""
    llm.core.pipeline.depth = depth
    return llm


def mixed(stops: list[int]) -> list[SamplingParams]:
    """Answers that end at different times: by length, by a stop id on the device, greedy and sampled."""
    return [
        SamplingParams(
            temperature=0.9 if index % 2 else 0.0,
            seed=index,
            max_tokens=46 - 7 * (index % 4),
            ignore_eos=True,
            stop_token_ids=stops if index % 3 == 0 else None,
        )
        for index in range(len(PROMPTS))
    ]


def answers(llm: LLM, params: list[SamplingParams]) -> list[tuple[list[int], str | None]]:
    outputs = llm.generate(PROMPTS, params)
    return [(list(output.outputs[0].token_ids), output.outputs[0].finish_reason) for output in outputs]


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("blocks", [64, 6])
def test_steps_in_flight_change_no_answer(make_tiny: MakeLLM, depth: int, blocks: int) -> None:
    options: dict[str, Any] = {"max_num_seqs": 4, "num_gpu_blocks_override": blocks, "max_num_batched_tokens": 16}
    free = make_tiny().generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    params = mixed([free[0].outputs[0].token_ids[1]])
    expected = answers(make_tiny(**options), params)
    assert len({reason for _, reason in expected}) == 2
    llm = ahead(make_tiny(**options), depth)
    assert answers(llm, params) == expected
    assert llm.core.scheduler.pool.num_free == blocks
    assert blocks > 6 or llm.core.scheduler.num_preemptions > 0


@pytest.mark.parametrize("depth", [1, 5])
def test_blocks_given_up_with_steps_in_flight_serve_the_next_request_right(make_tiny: MakeLLM, depth: int) -> None:
    """An aborted request's last steps still write to its blocks, which others have got meanwhile."""
    params = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True)
    expected = [make_tiny().generate(prompt, params)[0].outputs[0].token_ids for prompt in PROMPTS[:3]]
    llm = ahead(make_tiny(max_num_seqs=3, num_gpu_blocks_override=8), depth)
    for _ in range(6):
        given_up = llm.stream({"prompt_token_ids": [9] * 40}, params)
        next(given_up)
        given_up.close()
        got = [output.outputs[0].token_ids for output in llm.generate(PROMPTS[:3], params)]
        assert got == expected
    assert llm.core.scheduler.pool.num_free == 8


class LateCopies:
    """Copies nothing before someone waits, as a device with much to do."""

    class Copy:
        def __init__(self, destination: Tensor, source: Tensor) -> None:
            self.destination, self.source, self.done = destination, source, False

        def query(self) -> bool:
            return self.done

        def synchronize(self) -> None:
            if not self.done:
                self.destination.copy_(self.source)
                self.done = True

    def allocate(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def copy(self, destination: Tensor, source: Tensor) -> LateCopies.Copy:
        return self.Copy(destination, source)


def test_uploads_arrive_whole_however_late_and_whatever_becomes_of_the_array() -> None:
    upload = Uploader(torch.device("cpu"), slot_bytes=64, depth=2)
    staging = upload._staging = Staging("cpu", slot_bytes=64, depth=2, backend=LateCopies())
    sent = []
    for step in range(12):
        array = np.arange(step, step + 5 * step + 1, dtype=np.int64 if step % 2 else np.int32)
        sent.append((array.copy(), upload(array)))
        array[:] = -7
    staging.synchronize()
    for array, arrived in sent:
        assert arrived.dtype == torch.from_numpy(array).dtype
        assert arrived.tolist() == array.tolist()
