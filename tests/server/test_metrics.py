"""The metrics have vLLM's names where vLLM has them, and tell what has happened."""

from __future__ import annotations

import pytest
from live_server import Live

VLLM = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
]
OWN = [
    *("replays_total", "padding_waste", "decode_steps_total", "prefill_steps_total", "cpu_calls_per_token"),
    *("recorded_prefill_steps_total", "eager_prefill_steps_total"),
]


def read(live: Live) -> dict[str, float]:
    """The sum over all series of each name."""
    reply = live.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    values: dict[str, float] = {}
    for line in reply.body.decode().splitlines():
        if not line.startswith("#"):
            name, value = line.split("{")[0].split(" ")[0], float(line.rsplit(" ", 1)[1])
            values[name] = values.get(name, 0.0) + value
    return values


def test_every_name_is_there(tiny: Live) -> None:
    assert tiny.complete(prompt=[5, 6, 7], max_tokens=3).status == 200
    values = read(tiny)
    missing = {*VLLM, *(f"mainspring:{name}" for name in OWN)} - set(values)
    assert not missing


def test_counts_grow_by_what_was_done(tiny: Live) -> None:
    tiny.wait_for(lambda: tiny.is_idle)
    before = read(tiny)
    fields = {"prompt": list(range(3, 43)), "max_tokens": 6, "n": 3, "ignore_eos": True}
    for stream in (False, True):
        assert tiny.complete(**fields, stream=stream).status == 200
    tiny.wait_for(lambda: read(tiny)["vllm:num_requests_running"] == 0)
    tiny.wait_for(lambda: read(tiny)["mainspring:decode_steps_total"] >= before["mainspring:decode_steps_total"] + 10)
    grown = {name: value - before.get(name, 0.0) for name, value in read(tiny).items()}
    assert grown["vllm:prompt_tokens_total"] == 80
    assert grown["vllm:generation_tokens_total"] == 36
    assert grown["vllm:request_success_total"] == 6
    assert grown["vllm:time_to_first_token_seconds_count"] == 2
    assert grown["vllm:inter_token_latency_seconds_count"] == 30
    assert grown["vllm:e2e_request_latency_seconds_count"] == 2
    assert grown["vllm:prefix_cache_hits_total"] > 0
    assert grown["mainspring:replays_total"] >= 10
    assert read(tiny)["vllm:kv_cache_usage_perc"] == pytest.approx(0, abs=1e-9)


def test_the_label_is_the_served_name(tiny: Live) -> None:
    assert b'vllm:num_requests_running{engine="0",model_name="tiny"}' in tiny.get("/metrics").body


def test_why_loops_ended_is_told_where_the_engine_knows() -> None:
    from types import SimpleNamespace

    from mainspring.server.metrics import loop_exits

    assert loop_exits(SimpleNamespace(loop_ends={"arrival": 3})) == {"arrival": 3}  # type: ignore[arg-type]
    assert loop_exits(SimpleNamespace()) == {}  # type: ignore[arg-type]
