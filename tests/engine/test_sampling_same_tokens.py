"""What requests ask of sampling depends on nothing but the request, and costs those nothing who do not ask."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling_helpers import PROMPT, greedy, ids

from mainspring import LLM, SamplingParams
from mainspring.engine.asks import Asks, asks_of
from mainspring.engine.model_runner import ModelRunner
from mainspring.engine.request import Request
from mainspring.engine.request_state import seat_state
from mainspring.engine.samplers import FULL, PLAIN

MakeLLM = Callable[..., LLM]
OTHERS = [{"prompt_token_ids": [50 + i, 60, 70 + i]} for i in range(6)]
KINDS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.2, "frequency_penalty": 0.3},
    "bias": {"logit_bias": {7: 3.0, 8: 2.5, 200: -50}},
    "allowed": {"allowed_token_ids": list(range(0, 256, 3))},
    "min_tokens": {"min_tokens": 20, "ignore_eos": False, "stop_token_ids": [7, 8, 9, 75]},
    "logprobs": {"logprobs": 4},
    "drawn": {"temperature": 0.9, "top_p": 0.9, "seed": 11},
    "all": {
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.3,
        "logit_bias": {7: 3.0, 9: 2.5},
        "allowed_token_ids": list(range(0, 256, 2)) + [7, 9],
        "logprobs": 4,
        "temperature": 0.8,
        "top_k": 20,
        "seed": 5,
    },
}


def params_of(kind: str, **options: Any) -> SamplingParams:
    return greedy(**{"max_tokens": 40, **KINDS[kind], **options})


@pytest.mark.parametrize("kind", KINDS)
def test_alone_in_company_and_in_another_seat(make_tiny: MakeLLM, kind: str) -> None:
    llm = make_tiny()
    params = params_of(kind)
    alone = ids(llm.generate(PROMPT, params)[0])
    company = [params_of(other) for other in list(KINDS)[:6]]
    first = llm.generate([PROMPT, *OTHERS], [params, *company])
    last = llm.generate([*OTHERS, PROMPT], [*company, params])
    assert ids(first[0]) == ids(last[-1]) == alone


def test_after_preemptions_and_in_eager_mode(make_tiny: MakeLLM) -> None:
    kinds = list(KINDS)
    prompts = [PROMPT, *OTHERS]
    params = [params_of(kind) for kind in kinds]
    large = make_tiny()
    expected = [ids(output) for output in large.generate(prompts, params)]
    small = make_tiny(num_gpu_blocks_override=8)
    assert [ids(output) for output in small.generate(prompts, params)] == expected
    assert small.core.scheduler.num_preemptions > 0
    eager = make_tiny(enforce_eager=True)
    assert [ids(output) for output in eager.generate(prompts, params)] == expected
    assert large.stats().eager_steps == {}


def test_a_penalized_request_that_was_preempted_counts_its_earlier_tokens(make_tiny: MakeLLM) -> None:
    params = greedy(frequency_penalty=1.0, max_tokens=40)
    prompts = [PROMPT, *OTHERS[:3]]
    expected = [ids(output) for output in make_tiny().generate(prompts, params)]
    small = make_tiny(num_gpu_blocks_override=6)
    assert [ids(output) for output in small.generate(prompts, params)] == expected
    assert small.core.scheduler.num_preemptions > 0


class IdsAsText:
    """Reads "7 8 9" as these token ids, so that a model without a tokenizer can have bad words."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(part) for part in text.split()]


def test_bad_words_of_several_tokens_in_company_and_after_preemptions(make_tiny: MakeLLM) -> None:
    large = make_tiny()
    prompts = [PROMPT, *OTHERS[:3]]
    free = [ids(output) for output in large.generate(prompts, greedy(max_tokens=40))]
    # Pairs and triples of each free answer, from its beginning to its end, so that some are met after a preemption.
    words = [answer[at : at + 2 + at % 2] for answer in free for at in range(0, 36, 4)]
    params = greedy(max_tokens=40, bad_words=[" ".join(map(str, word)) for word in words])
    runs = []
    for llm in (large, make_tiny(num_gpu_blocks_override=6)):
        llm.core._intake._tokenizer = IdsAsText()
        runs.append([ids(output) for output in llm.generate(prompts, params)])
    assert llm.core.scheduler.num_preemptions > 0
    assert runs[0] == runs[1] != free
    assert ids(large.generate(PROMPT, params)[0]) == runs[0][0]
    for answer in runs[0]:
        assert not any(answer[at : at + len(word)] == word for word in words for at in range(40))
    for answer, before in zip(runs[0], free, strict=True):
        assert answer[0] == before[0], "the beginning of a bad word is not barred"


@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_what_readmission_rebuilds_is_what_the_steps_left(make_tiny: MakeLLM, tokens: int) -> None:
    llm = make_tiny()
    llm.core._intake._tokenizer = IdsAsText()
    runner = llm.core.runner
    params = greedy(frequency_penalty=0.1, bad_words=["1 2 3"], min_tokens=20)
    answer = llm.core.add("rebuilt", [11, 45, 200, 45], params)
    request = answer.choices[0].request
    for _ in range(tokens):
        llm.core.step()
    assert len(request.output_token_ids) == tokens
    names = ("seats", "logits_state.seen", "logits_state.recent")
    left = {name: runner.buffers[name].clone() for name in names}
    assert request.seat is not None
    for name in names:
        runner.buffers[name][..., request.seat].fill_(77) if name == "seats" else runner.buffers[name].fill_(77)
    runner.seats.write([(request.seat, seat_state(request))], runner.upload)
    runner.logits_state.write([(request.seat, request)], runner.upload)
    assert torch.equal(runner.buffers["seats"], left["seats"])
    for name in names[1:]:
        assert torch.equal(runner.buffers[name][request.seat], left[name][request.seat]), name


def test_greedy_rows_beside_full_rows_have_the_tokens_they_have_alone(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    plain = [ids(llm.generate(prompt, greedy())[0]) for prompt in OTHERS]
    assert llm.core.runner.runners[FULL].counters.steps == 0
    mixed = llm.generate([*OTHERS, *[PROMPT] * 2], [greedy()] * 6 + [params_of("all"), params_of("drawn")])
    assert [ids(output) for output in mixed[:6]] == plain


def test_the_plain_variant_is_recorded_once_and_serves_whoever_asks_for_nothing(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    runner = llm.core.runner
    recorded = dict(runner.runners[PLAIN].graphs)
    buffers = set(runner.buffers)
    llm.generate(OTHERS, greedy())
    assert not runner.runners[FULL].graphs and runner.logits_state.active == Asks.NOTHING
    assert set(runner.buffers) == buffers, "nothing is allocated for what nobody asked for"
    for kind in KINDS:
        llm.generate(OTHERS[:3], params_of(kind))
    full = runner.runners[FULL].counters.replays.total()
    plain = runner.runners[PLAIN].counters.replays.total()
    llm.generate(OTHERS, greedy())
    assert runner.runners[FULL].counters.replays.total() == full
    assert runner.runners[PLAIN].counters.replays.total() > plain
    assert all(runner.runners[PLAIN].graphs[size] is graph for size, graph in recorded.items())
    assert runner.runners[FULL].pool is runner.runners[PLAIN].pool


def test_the_full_variant_is_recorded_anew_only_when_a_kind_is_asked_for_first(make_tiny: MakeLLM) -> None:
    llm = make_tiny()
    runner = llm.core.runner.runners[FULL]
    llm.generate(PROMPT, params_of("drawn"))
    sampled = runner.graphs[1]
    llm.generate(PROMPT, params_of("penalties"))
    penalized = runner.graphs[1]
    assert penalized is not sampled
    assert len(penalized.operations) > len(sampled.operations)
    llm.generate(PROMPT, params_of("drawn"))
    llm.generate(PROMPT, params_of("penalties", presence_penalty=1.0))
    assert runner.graphs[1] is penalized


def seat_requests(runner: ModelRunner, seed: int) -> None:
    """Fill every seat with a request in mid-answer that asks for some kinds, with blocks and KV contents of its own."""
    rng = random.Random(seed)
    cache = runner.buffers["kv_cache"]
    cache.copy_(torch.randn(cache.shape, generator=torch.Generator().manual_seed(seed)).to(cache))
    admitted, writes = [], []
    for seat in range(runner.limits.max_num_seqs):
        options: dict[str, Any] = {"temperature": rng.choice([0.0, 0.8]), "max_tokens": 40}
        for kind in ("penalties", "bias", "allowed", "logprobs"):
            options |= KINDS[kind] if rng.random() < 0.5 else {}
        params = SamplingParams(**options)
        request = Request(
            str(seat),
            [rng.randrange(3, 250) for _ in range(5)],
            params,
            seat,
            seed=rng.getrandbits(63),
            stop_ids=(2,),
            asks=asks_of(params) | Asks.BAD_WORDS,
            bad_word_ids=((rng.randrange(256),), (5, 6), (9, 8, 7)),
            output_token_ids=[rng.randrange(3, 250) for _ in range(rng.randrange(1, 9))],
            max_total_tokens=45,
        )
        admitted.append((seat, request))
        writes += [(seat, column, 1 + seat * 3 + column) for column in range(3)]
    runner.seats.write([(seat, seat_state(request)) for seat, request in admitted], runner.upload)
    runner.logits_state.write(admitted, runner.upload)
    runner.seats.write_tables(writes, runner.upload)


def check_every_rung(llm: LLM) -> None:
    runner = llm.core.runner
    runner.require(Asks.PENALTIES | Asks.LOGIT_BIAS | Asks.ALLOWED_IDS | Asks.BAD_WORDS | Asks.LOGPROBS)
    names = [name for name in runner.buffers if name.startswith("logits_state.")]
    names += ["seats", "token_ring", "logits"]
    assert len(names) == 10
    for size in runner.limits.ladder.sizes:
        below = max((rung for rung in runner.limits.ladder.sizes if rung < size), default=0)
        rows = random.Random(size).sample(range(runner.limits.max_num_seqs), below + 1)
        results = []
        for eager in (False, True):
            seat_requests(runner, seed=size)
            runner.ring.clear()
            for name in ("logits", "logits_state.record"):
                runner.buffers[name].zero_()
            for _ in range(3):
                if eager:
                    padded = torch.tensor(rows + [-1] * (size - len(rows)), dtype=torch.int32).to(runner.limits.device)
                    with torch.no_grad():
                        runner.step.decode(padded, runner.samplers[FULL])
                else:
                    runner.runners[FULL](rows=rows)
            results.append({name: runner.buffers[name].clone() for name in names})
        for name in names:
            left, right = (result[name].view(torch.uint8) for result in results)
            assert torch.equal(left, right), f"{name} differs on rung {size}"


def test_replay_and_eager_give_the_same_bits_with_every_kind(make_tiny: MakeLLM) -> None:
    check_every_rung(make_tiny(max_num_seqs=12, num_gpu_blocks_override=40))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replay_and_eager_give_the_same_bits_with_every_kind_on_a_gpu(make_tiny: MakeLLM, dtype: str) -> None:
    check_every_rung(make_tiny(device="cuda", dtype=dtype, max_num_seqs=12, num_gpu_blocks_override=40))


@pytest.mark.gpu
def test_a_gpu_gives_the_tokens_of_the_cpu(make_tiny: MakeLLM, tiny_weights: Path) -> None:
    prompts = [PROMPT, *OTHERS]
    params = [params_of(kind) for kind in KINDS]
    weights = {"model": str(tiny_weights), "load_format": "auto"}  # random ones would differ by device
    expected = make_tiny(**weights).generate(prompts, params)
    on_gpu = make_tiny(**weights, device="cuda", dtype="float32", num_gpu_blocks_override=200)
    outputs = on_gpu.generate(prompts, params)
    same = [ids(ours) == ids(theirs) for ours, theirs in zip(outputs, expected, strict=True)]
    assert sum(same) >= len(same) - 1, "only a near-tie may differ"
