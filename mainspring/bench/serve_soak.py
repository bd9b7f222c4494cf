"""Many clients at once for minutes, some of whom go away midway or send garbage; the others' answers must be right."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mainspring import LLM, SamplingParams
from mainspring.bench.http_client import Address, abandon, get, opened
from mainspring.bench.memory_growth import MemoryGrowth, memory_growth
from mainspring.bench.server_child import server
from mainspring.bench.shapes import BenchModel

#: Different requests that clients choose among; each is answered offline first.
JOBS = 64
#: Seconds without an answer after which a request counts as lost.
PATIENCE = 600.0
#: Longest context of the server; longer than any right request, shorter than some of the garbage.
MODEL_LEN = 256
#: Kinds of requests that are none, and of ways to leave one midway.
GARBAGE_KINDS = 6
DROP_KINDS = 2
#: Seconds between two looks at the server's memory.
LOOK = 1.0

WORDS = ("spring", "wheel", "tooth", "brass", "clock", "hour", "night", "river", "stone", "light", "wind", "bird")


@dataclass(frozen=True)
class Crowd:
    """``clients`` that ask without pause for ``minutes``; ``drop`` and ``garbage`` are shares of their requests."""

    clients: int = 200
    minutes: float = 5.0
    drop: float = 0.1
    garbage: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.clients < 1 or self.minutes <= 0:
            raise ValueError(f"{self.clients} clients for {self.minutes:g} minutes; both must be above 0")
        if min(self.drop, self.garbage) < 0 or self.drop + self.garbage > 1:
            raise ValueError(f"drop {self.drop:g} and garbage {self.garbage:g} are shares, of together at most 1")


@dataclass
class ServeSoakReport:
    """What was seen. ``ok`` says that nothing was lost, leaked or wrong.

    ``memory_early``, ``memory_late`` and ``memory_slack`` are of the server's resident bytes; see ``memory_growth``.
    ``kinds`` of the ``all_kinds`` of requests came to their end; with all of them the server counts as warm.
    ``kv_usage``, ``running`` and ``waiting`` are the server's own figures at the end.
    """

    model: str = ""
    dtype: str = ""
    clients: int = 0
    minutes: float = 0.0
    sent: int = 0
    answered: int = 0
    streamed: int = 0
    dropped: int = 0
    garbage: int = 0
    busy: int = 0
    tokens: int = 0
    different: int = 0
    lost: int = 0
    garbage_taken: int = 0
    kv_usage: float = -1.0
    running: float = -1.0
    waiting: float = -1.0
    memory_early: int = 0
    memory_late: int = 0
    memory_slack: int = 0
    kinds: int = 0
    all_kinds: int = 0
    exit_status: int | None = None
    statuses: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """No request lost, no answer different, no block held, memory flat, and a clean end."""
        nothing_left = self.kv_usage == self.running == self.waiting == 0
        flat = MemoryGrowth(self.memory_early, self.memory_late, self.memory_slack).is_flat
        wrong = self.different or self.lost or self.garbage_taken or self.exit_status
        return bool(self.answered and nothing_left and flat and not wrong)


@dataclass(frozen=True)
class Job:
    """A request and its right answers, one for each choice."""

    body: dict[str, Any]
    expected: tuple[tuple[int, ...], ...]


def soak_server(
    model: BenchModel, crowd: Crowd, dtype: str, device: str | None, seats: int, say: Callable[[str], None]
) -> ServeSoakReport:
    """Answer the jobs offline, then run the crowd against a server of the same model."""
    options: dict[str, Any] = {"dtype": dtype, "device": device, "max_model_len": MODEL_LEN, "max_num_seqs": seats}
    without_text = model.load_format == "dummy"
    with LLM(model.path, load_format=model.load_format, skip_tokenizer_init=without_text, **options) as llm:
        jobs = make_jobs(llm, crowd.seed)
    say(f"{len(jobs)} requests answered offline")
    report = ServeSoakReport(model.title, dtype, crowd.clients, crowd.minutes)
    given = ["--dtype", dtype, "--load-format", model.load_format, "--max-model-len", str(MODEL_LEN)]
    given += ["--max-num-seqs", str(seats), "--max-queue", str(2 * crowd.clients)]
    given += ["--device", device] if device else []
    given += ["--skip-tokenizer-init"] if without_text else []
    with server(model.path, given) as (child, address):
        asyncio.run(_soak(address, crowd, jobs, report, lambda: child.resident_bytes, say))
    report.exit_status = child.process.returncode
    return report


def make_jobs(llm: LLM, seed: int) -> list[Job]:
    """Requests of many kinds, with the answers that ``llm`` gives to them."""
    rng = random.Random(seed)
    prompts: list[Any] = []
    kinds: list[dict[str, Any]] = []
    for number in range(JOBS):
        n = rng.choice([1, 1, 1, 2])
        greedy = n == 1 and rng.random() < 0.4
        kinds.append(
            {
                "temperature": 0.0 if greedy else 0.9,
                "seed": number,
                "n": n,
                "max_tokens": rng.randint(1, 16),
                "top_k": rng.choice([0, 20]),
                "top_p": rng.choice([1.0, 0.9]),
                "repetition_penalty": rng.choice([1.0, 1.0, 1.2]),
            }
        )
        words = rng.randint(1, 24)
        if llm.core.tokenizer is not None:
            prompts.append(" ".join(rng.choices(WORDS, k=words)))
        else:
            prompts.append([rng.randrange(3, llm.core.config.vocab_size) for _ in range(words)])
    outputs = llm.generate(
        [prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt} for prompt in prompts],
        [SamplingParams(**fields) for fields in kinds],
    )
    return [
        Job(
            {"prompt": prompt, "return_token_ids": True, **fields},
            tuple(tuple(choice.token_ids) for choice in output.outputs),
        )
        for prompt, fields, output in zip(prompts, kinds, outputs, strict=True)
    ]


async def _soak(
    address: Address,
    crowd: Crowd,
    jobs: Sequence[Job],
    report: ServeSoakReport,
    memory: Callable[[], int],
    say: Callable[[str], None],
) -> None:
    statuses: Counter[str] = Counter()
    until = time.monotonic() + 60 * crowd.minutes
    samples: list[int] = []
    warm_at: int | None = None
    seen: set[str] = set()
    report.all_kinds = len(jobs) + (GARBAGE_KINDS if crowd.garbage else 0) + (DROP_KINDS if crowd.drop else 0)

    async def client(number: int) -> None:
        rng = random.Random(crowd.seed * 100_003 + number)
        await asyncio.sleep(rng.random())
        while time.monotonic() < until:
            chance = rng.random()
            try:
                if chance < crowd.garbage:
                    await asyncio.wait_for(_send_garbage(address, rng, report, statuses, seen), PATIENCE)
                else:
                    drops = chance < crowd.garbage + crowd.drop
                    asking = _ask(address, rng, rng.choice(jobs), drops, report, statuses, seen)
                    await asyncio.wait_for(asking, PATIENCE)
            except (OSError, asyncio.IncompleteReadError, TimeoutError, ValueError, KeyError) as error:
                report.lost += 1
                if len(report.faults) < 20:
                    report.faults.append(repr(error)[:300])

    async def watch() -> None:
        nonlocal warm_at
        while True:
            if warm_at is None and len(seen) == report.all_kinds:
                warm_at = len(samples)
            samples.append(memory())
            if len(samples) % 30 == 0:
                say(f"{report.answered} answers, {report.lost} lost, {samples[-1] >> 20} MiB")
            await asyncio.sleep(LOOK)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(client(number) for number in range(crowd.clients)))
    watching.cancel()
    grown = memory_growth(samples, warm_at)
    report.memory_early, report.memory_late, report.memory_slack = grown.early, grown.late, grown.slack
    report.kinds = len(seen)
    report.statuses = dict(statuses)
    await _read_rest(address, report)


async def _ask(
    address: Address,
    rng: random.Random,
    job: Job,
    drops: bool,
    report: ServeSoakReport,
    statuses: Counter[str],
    seen: set[str],
) -> None:
    stream = rng.random() < 0.5
    body = json.dumps({**job.body, "stream": stream}).encode()
    report.sent += 1
    if drops and not stream:
        report.dropped += 1
        await abandon(address, "/v1/completions", body, 2 * rng.random())
        seen.add("dropped")
        return
    async with opened(address, "POST", "/v1/completions", body) as response:
        statuses[str(response.status)] += 1
        if response.status == 429:
            report.busy += 1
            await asyncio.sleep(float(response.headers["retry-after"]))
            return
        if response.status != 200:
            raise ValueError((await response.read()).decode(errors="replace"))
        if drops:
            report.dropped += 1
            seen.add("dropped while it streamed")
            async for _ in response.events():
                return
            return
        got: dict[int, list[int]] = {}
        if stream:
            report.streamed += 1
            async for _, event in response.events():
                if "error" in event:
                    raise ValueError(event["error"])
                _add_tokens(got, event["choices"])
        else:
            _add_tokens(got, json.loads(await response.read())["choices"])
    report.answered += 1
    seen.add(f"job {job.body['seed']}")
    report.tokens += sum(map(len, got.values()))
    if tuple(tuple(got.get(index, ())) for index in range(len(job.expected))) != job.expected:
        report.different += 1
        if len(report.faults) < 20:
            report.faults.append(f"different: {job.body} gave {got}, not {job.expected}"[:600])


def _add_tokens(got: dict[int, list[int]], choices: Sequence[dict[str, Any]]) -> None:
    for choice in choices:
        got.setdefault(choice["index"], []).extend(choice["token_ids"])


async def _send_garbage(
    address: Address, rng: random.Random, report: ServeSoakReport, statuses: Counter[str], seen: set[str]
) -> None:
    """Send what no server can answer; it has to be refused, with nothing lost but this connection."""
    report.garbage += 1
    kind = rng.randrange(GARBAGE_KINDS)
    body = _garbage(kind, rng)
    if rng.random() < 0.2:  # not even HTTP, or less of it than was announced
        _, writer = await asyncio.open_connection(address.host, address.port)
        announced = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n"
        writer.write(rng.choice([b"", announced]) + body)
        await writer.drain()
        writer.transport.abort()
        return
    async with opened(address, "POST", "/v1/completions", body) as response:
        statuses[str(response.status)] += 1
        answer = json.loads(await response.read())
        if not 400 <= response.status < 500 or not answer["error"]["message"]:
            report.garbage_taken += 1
    seen.add(f"garbage {kind}")


def _garbage(kind: int, rng: random.Random) -> bytes:
    match kind:
        case 0:
            return rng.randbytes(rng.randint(0, 2000))
        case 1:
            return b"[" * rng.randint(1, 50_000)
        case 2:
            return b'{"prompt": "' + b"x" * rng.randint(1, 100_000)
        case 3:
            return json.dumps({"prompt": [rng.randint(-9, 1 << 40)]}).encode()
        case 4:
            return json.dumps({"prompt": "x", rng.choice(WORDS): 1}).encode()
    return json.dumps({"prompt": "word " * 5000}).encode()


async def _read_rest(address: Address, report: ServeSoakReport) -> None:
    """The server's own figures, once they have come to rest."""
    names = {"kv_usage": "kv_cache_usage_perc", "running": "num_requests_running", "waiting": "num_requests_waiting"}
    for _ in range(100):
        text = (await get(address, "/metrics"))[1].decode()
        for name, metric in names.items():
            found = re.search(rf"^vllm:{metric}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
            setattr(report, name, float(found[1]) if found else -1.0)
        if report.kv_usage == report.running == report.waiting == 0:
            return
        await asyncio.sleep(0.1)
