"""A server under requests that come at random moments, at a given rate: times to the first token and between tokens."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mainspring.bench.http_client import Address, get, opened
from mainspring.bench.peers.base import PeerSpec, find_server, modes_of, open_server
from mainspring.bench.records import package_version
from mainspring.bench.server_child import mode_options, server
from mainspring.bench.shapes import BenchModel
from mainspring.models.loader import load_config
from mainspring.models.source import resolve

#: Requests that go before those that are measured.
WARM_UP = 4
#: Seconds without an answer after which a request counts as failed.
PATIENCE = 300.0


@dataclass(frozen=True)
class Traffic:
    """Requests of random token ids, ``input_len`` in and ``output_len`` out, for ``seconds`` at each rate per second.

    Raises ``ValueError`` for a size that is not positive.
    """

    rates: tuple[float, ...]
    input_len: int = 128
    output_len: int = 64
    seconds: float = 10.0
    sampled: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = {"input_len": self.input_len, "output_len": self.output_len, "seconds": self.seconds}
        for name, value in {**sizes, "rate": min(self.rates, default=0)}.items():
            if value <= 0:
                raise ValueError(f"{name} is {value:g}; it must be above 0")

    def arrivals(self, rate: float) -> list[float]:
        """Seconds from the beginning at which requests arrive: a Poisson process, of at least one."""
        rng, now, moments = random.Random(self.seed), 0.0, [0.0]
        while (now := now + rng.expovariate(rate)) < self.seconds:
            moments.append(now)
        return moments


@dataclass(frozen=True)
class Timing:
    """One answered request: when it was sent, and the arrival and number of tokens of each piece. In seconds."""

    sent: float
    pieces: Sequence[tuple[float, int]]

    @property
    def first_token(self) -> float:
        """From sending to the first token."""
        return self.pieces[0][0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Between two tokens; tokens that came together share the time that they took."""
        return [
            (now - before) / count
            for (before, _), (now, count) in zip(self.pieces, self.pieces[1:], strict=False)
            for _ in range(count)
        ]

    @property
    def tokens(self) -> int:
        """Tokens of the answer."""
        return sum(count for _, count in self.pieces)


@dataclass(frozen=True)
class ServeRecord:
    """One rate in one launch mode. Times are in milliseconds; ``tokens_per_second`` counts tokens of answers.

    ``peak`` is the most requests that were under way at a time, as the client saw it.
    """

    model: str
    dtype: str
    launch_mode: str
    engine: str
    request_rate: float
    requests: int
    failed: int
    input_len: int
    output_len: int
    sampled: bool
    seconds: float
    peak: int
    ttft_ms: float
    ttft_p99_ms: float
    itl_ms: float
    itl_p99_ms: float
    e2e_ms: float
    e2e_p99_ms: float
    tokens_per_second: float
    extra: dict[str, Any] = field(default_factory=dict)


def serve_rates(
    model: BenchModel, traffic: Traffic, modes: Sequence[str], dtype: str, device: str | None, options: Sequence[str]
) -> Iterator[ServeRecord]:
    """Measure a server of our own in each launch mode; it works on token ids alone."""
    vocab_size = load_config(resolve(model.path, weights=model.load_format != "dummy")).vocab_size
    given = ["--dtype", dtype, "--load-format", model.load_format, "--skip-tokenizer-init", "--log-level", "info"]
    given += ["--device", device] if device else []
    given += ["--no-enable-prefix-caching", "--max-queue", "100000", *options]
    for mode in modes:
        with server(model.path, [*given, *mode_options(mode)]) as (_, address):
            for record in asyncio.run(measure(address, traffic, vocab_size, None)):
                yield ServeRecord(model=model.title, dtype=dtype, launch_mode=mode, engine="mainspring", **record)


def serve_elsewhere(url: str, traffic: Traffic, vocab_size: int, api_key: str | None) -> Iterator[ServeRecord]:
    """Measure a server that runs already, of whatever kind."""
    address = Address.of(url)

    async def name() -> str:
        status, body = await get(address, "/v1/models", _headers(api_key))
        if status != 200:
            raise ValueError(f"{url} answers /v1/models with status {status}: {body[:200].decode(errors='replace')}")
        return str(json.loads(body)["data"][0]["id"])

    model = asyncio.run(name())
    for record in asyncio.run(measure(address, traffic, vocab_size, model, api_key)):
        yield ServeRecord(model=model, dtype="", launch_mode="", engine=url, **record)


def serve_peer(
    name: str, model: BenchModel, traffic: Traffic, modes: Sequence[str], dtype: str, device: str, seats: int
) -> Iterator[ServeRecord]:
    """Measure another project's server on the same model under the same traffic.

    Raises ``PeerError`` where there is none of that name, or it does not start.
    """
    version = package_version(find_server(name).package)
    path = resolve(model.path, weights=model.load_format != "dummy")
    vocab_size = load_config(path).vocab_size
    for mode in modes_of(name, modes):
        spec = PeerSpec(
            path=str(path.path),
            load_format=model.load_format,
            dtype=dtype,
            device=device,
            launch_mode=mode,
            max_model_len=traffic.input_len + traffic.output_len,
            max_num_seqs=seats,
            sampling={},
            seed=traffic.seed,
        )
        with open_server(name, spec) as address:
            for record in asyncio.run(measure(address, traffic, vocab_size, None)):
                yield ServeRecord(
                    model=model.title,
                    dtype=dtype,
                    launch_mode=mode,
                    engine=name,
                    extra={"version": version},
                    **record,
                )


async def measure(
    address: Address, traffic: Traffic, vocab_size: int, model: str | None, api_key: str | None = None
) -> list[dict[str, Any]]:
    """The figures of each rate; ``model`` is the name to ask for, None where the server tells the ids of its tokens."""
    rng = random.Random(traffic.seed)
    under_way, peak = 0, 0

    async def ask(delay: float) -> Timing | None:
        nonlocal under_way, peak
        body = _body(traffic, [rng.randrange(3, vocab_size) for _ in range(traffic.input_len)], model)
        await asyncio.sleep(delay)
        under_way += 1
        peak = max(peak, under_way)
        try:
            return await asyncio.wait_for(_timed(address, body, api_key), PATIENCE)
        except (OSError, asyncio.IncompleteReadError, TimeoutError, ValueError):
            return None
        finally:
            under_way -= 1

    await asyncio.gather(*(ask(0) for _ in range(WARM_UP)))
    figures = []
    for rate in traffic.rates:
        peak, began = 0, time.perf_counter()
        timings = await asyncio.gather(*(ask(moment) for moment in traffic.arrivals(rate)))
        took = time.perf_counter() - began
        figures.append({"request_rate": rate, "peak": peak, "seconds": took, **_figures(timings, traffic, took)})
    return figures


def _figures(timings: Sequence[Timing | None], traffic: Traffic, seconds: float) -> dict[str, Any]:
    answered = [timing for timing in timings if timing is not None]
    if not answered:
        raise ValueError(f"none of {len(timings)} requests was answered; see the server's log")
    gaps = [gap for timing in answered for gap in timing.gaps] or [0.0]
    ends = [timing.pieces[-1][0] - timing.sent for timing in answered]
    firsts = [timing.first_token for timing in answered]
    return {
        "requests": len(timings),
        "failed": len(timings) - len(answered),
        "input_len": traffic.input_len,
        "output_len": traffic.output_len,
        "sampled": traffic.sampled,
        "tokens_per_second": sum(timing.tokens for timing in answered) / seconds,
        **_both("ttft", firsts),
        **_both("itl", gaps),
        **_both("e2e", ends),
    }


def _both(name: str, seconds: Sequence[float]) -> dict[str, float]:
    return {f"{name}_ms": 1e3 * statistics.median(seconds), f"{name}_p99_ms": 1e3 * percentile(seconds, 0.99)}


def percentile(values: Sequence[float], share: float) -> float:
    """The value at or below which ``share`` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _body(traffic: Traffic, prompt: Sequence[int], model: str | None) -> bytes:
    body: dict[str, Any] = {
        "prompt": list(prompt),
        "max_tokens": traffic.output_len,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0.8 if traffic.sampled else 0.0,
    }
    if traffic.sampled:
        body |= {"top_p": 0.95, "seed": traffic.seed}
    if model is None:
        body["return_token_ids"] = True  # tells how many tokens came together
    else:
        body["model"] = model
    return json.dumps(body).encode()


async def _timed(address: Address, body: bytes, api_key: str | None) -> Timing:
    sent = time.perf_counter()
    pieces = []
    async with opened(address, "POST", "/v1/completions", body, _headers(api_key)) as response:
        if response.status != 200:
            raise ValueError((await response.read()).decode(errors="replace"))
        async for now, event in response.events():
            if "error" in event:
                raise ValueError(event["error"])
            for choice in event["choices"]:
                pieces.append((now, len(choice["token_ids"]) if choice.get("token_ids") is not None else 1))
    if not pieces:
        raise ValueError("the answer had no tokens")
    return Timing(sent, pieces)


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}
