"""Counts and times for Prometheus. What vLLM counts too has vLLM's name; the rest begins with ``mainspring:``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from mainspring.engine.async_llm import AsyncLLM
    from mainspring.engine.stats import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Upper bounds in seconds. Those below vLLM's first are for tokens that take less than 10 ms.
TOKEN_TIMES: tuple[float, ...] = (
    0.0005,
    0.00075,
    0.001,
    0.0015,
    0.002,
    0.003,
    0.005,
    0.0075,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
)
TOKEN_TIMES += (0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
FIRST_TOKEN_TIMES: tuple[float, ...] = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
)
FIRST_TOKEN_TIMES += (40.0, 80.0, 160.0, 640.0, 2560.0)
ANSWER_TIMES: tuple[float, ...] = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
)
ANSWER_TIMES += (960.0, 1920.0, 7680.0)
COUNTS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))


class ServerMetrics:
    """One service's metrics, in a registry of its own.

    Args:
        engine: whose statistics are told.
        model_name: the label ``model_name`` of them all.
    """

    def __init__(self, engine: AsyncLLM, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._registry.register(_EngineCollector(engine, self._labels))
        self.first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", FIRST_TOKEN_TIMES
        )
        self.inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of an answer.", TOKEN_TIMES
        )
        self.per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "An answer's mean time per token.", TOKEN_TIMES
        )
        self.answer = self._histogram(
            "vllm:e2e_request_latency_seconds", "From a request's arrival to its end.", ANSWER_TIMES
        )
        self.prompt_length = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", COUNTS)
        self.answer_length = self._histogram("vllm:request_generation_tokens", "Tokens of an answer.", COUNTS)
        self.choices = self._histogram("vllm:request_params_n", "The n of requests.", (1.0, 2.0, 5.0, 10.0, 20.0))
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Tokens of prompts.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens of answers.")
        self._finished = Counter(
            "vllm:request_success", "Answers that ended.", [*self._labels, "finished_reason"], registry=self._registry
        )
        self._responses = Counter(
            "mainspring:http_responses", "Responses by path and status.", ["path", "status"], registry=self._registry
        )

    def finished(self, reason: str) -> None:
        """Count one answer that ended."""
        self._finished.labels(**self._labels, finished_reason=reason).inc()

    def responded(self, path: str, status: int) -> None:
        """Count one response."""
        self._responses.labels(path=path, status=str(status)).inc()

    def render(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        made = Histogram(name, text, list(self._labels), buckets=bounds, registry=self._registry)
        return made.labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, list(self._labels), registry=self._registry).labels(**self._labels)


class _EngineCollector:
    """Reads the engine when it is asked."""

    def __init__(self, engine: AsyncLLM, labels: dict[str, str]) -> None:
        self._engine = engine
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """What Prometheus calls."""
        stats = self._engine.stats()
        if stats is None or not self._engine.is_ready:
            return
        scheduler, memory = self._engine.llm.core.scheduler, self._engine.llm.core.memory
        used = 1 - scheduler.pool.num_free / max(memory.num_blocks, 1)
        yield self._gauge("vllm:num_requests_running", "Answers that have a seat.", scheduler.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Answers that wait for a seat.", scheduler.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks that answers hold, 0 to 1.", used)
        counters = {
            "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", stats.prefix_queried_tokens),
            "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache.", stats.prefix_hit_tokens),
            "vllm:num_preemptions": ("Answers that gave up their seat to be computed again.", stats.preemptions),
            "mainspring:prefill_steps": ("Prefill steps.", stats.prefill_steps),
            "mainspring:recorded_prefill_steps": ("Prefill steps that were replays.", stats.recorded_prefill_steps),
            "mainspring:decode_steps": ("Decode steps.", stats.decode_steps),
            "mainspring:decoded_tokens": ("Rows of decode steps that were not padding.", stats.decoded_tokens),
        }
        for name, (text, value) in counters.items():
            yield self._counter(name, text, value)
        yield self._gauge("mainspring:padding_waste", "Share of decode rows that were padding.", stats.padding_waste)
        yield self._gauge(
            "mainspring:cpu_calls_per_token", "What the CPU asks of the device for a token.", stats.cpu_calls_per_token
        )
        yield self._gauge("mainspring:recorded_bytes", "Memory of all recordings.", stats.recorded_bytes)
        yield self._by("mainspring:replays", "Replays of each rung.", "rung", stats.rungs)
        yield self._by("mainspring:eager_steps", "Decode steps that ran eager.", "reason", stats.eager_steps)
        yield self._by(
            "mainspring:eager_prefill_steps", "Prefill steps that ran eager.", "reason", stats.eager_prefill_steps
        )
        yield self._by("mainspring:loop_exits", "Why loops ended.", "reason", loop_exits(stats))

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _by(self, name: str, text: str, label: str, values: Mapping[Any, float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=[*self._labels, label])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), str(key)], value)
        return family


def loop_exits(stats: EngineStats) -> dict[str, int]:
    """Why loops ended -> how often; empty for an engine without the loop."""
    return dict(getattr(stats, "loop_ends", None) or {})
