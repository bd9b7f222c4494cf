"""``mainspring bench``: measure this machine."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Option, Typer
from typer.core import TyperGroup

from mainspring.cli.bench_output import DEFAULT_FILE, Kernels, Output
from mainspring.cli.bench_serve import serve
from mainspring.cli.command import command
from mainspring.cli.options import parse_sizes


class _BareJson(TyperGroup):
    """Lets ``--json`` stand without a file name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default in where the next word is another option, or none."""
        words = []
        for word, following in zip(args, [*args[1:], "--"], strict=False):  # no words have no following
            words.append(word)
            if word == "--json" and following.startswith("-"):
                words.append(DEFAULT_FILE)
        return super().parse_args(ctx, words)


bench = Typer(cls=_BareJson, no_args_is_help=True, help="Measure this machine: latency beside its floor, and start-up.")

Model = Annotated[
    str, Option(help="qwen3-0.6b, llama-3.2-1b, llama-3.1-8b, tiny (random weights), smollm2, or a model folder.")
]
Device = Annotated[str | None, Option(help="cuda, cuda:1, cpu ...")]
Dtype = Annotated[str, Option(help="auto, float32, bfloat16 or float16.")]
Batch = Annotated[str, Option(metavar="1,16", help="Batch sizes.")]
InputLen = Annotated[int, Option(help="Tokens in a prompt.")]
OutputLen = Annotated[int, Option(help="Decode steps that are measured.")]
Json = Annotated[
    str | None,
    Option(
        "--json",
        metavar="[FILE]",
        help="Append records to the list in this file; without a name, to one in benchmarks/results for the device.",
    ),
]


@command(bench)
def latency(
    model: Model = "qwen3-0.6b",
    batch: Batch = "1",
    input_len: InputLen = 128,
    output_len: OutputLen = 256,
    context: Annotated[
        int | None, Option(help="Mean context of the measured steps, in tokens; sets --input-len.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = None,
    launch_mode: Annotated[
        str, Option(metavar="MODE,MODE", help="loop, graph, eager, or several with commas.")
    ] = "graph",
    sampled: Annotated[
        bool, Option("--sampled", help="Sample with temperature and top-p instead of taking the likeliest token.")
    ] = False,
    repeats: Annotated[int, Option(help="Times that each batch is measured.")] = 3,
    peer: Annotated[
        list[str] | None, Option(help="Measure transformers or vllm as well; may be given several times.")
    ] = None,
    profile: Annotated[
        bool, Option("--profile", help="Show the kernels of one recorded step, each beside its floor (CUDA).")
    ] = False,
    json: Json = None,
) -> None:
    """Milliseconds per token of the decode step, beside the floor that this device's memory sets.

    The floor is what the step must read, at the read bandwidth measured in the same run. ``step`` is the recorded
    step alone, replayed in a row: what TPOT has above it is the CPU's.
    """
    from mainspring.bench.latency import check_modes, measure_engine
    from mainspring.bench.peers.base import modes_of
    from mainspring.bench.peers.measure import measure_peer
    from mainspring.bench.setting import open_setting
    from mainspring.bench.workload import Workload

    if context is not None:
        input_len = context - output_len // 2
    workload = Workload(tuple(parse_sizes(batch)), input_len, output_len, repeats=repeats, sampled=sampled)
    modes = check_modes(launch_mode)
    peers = [(name, mode) for name in peer or [] for mode in modes_of(name, modes)]
    if profile and "graph" not in modes:
        raise ValueError("--profile shows the kernels of a recorded step; have graph among --launch-mode")
    output = Output(json)
    kernels = None
    try:
        with open_setting(model, dtype, device, workload) as setting:
            kernels = Kernels(setting) if profile else None
            for mode in modes:
                for record in measure_engine(setting, mode, kernels):
                    output.add(setting.device, "latency", record)
            for name, mode in peers:
                for record in measure_peer(setting, name, mode):
                    output.add(setting.device, "latency", record)
    finally:
        # What was measured before something failed is shown all the same.
        output.show("latency_table")
        if kernels is not None:
            kernels.show()


@command(bench)
def busy(
    model: Model = "qwen3-0.6b",
    batch: Annotated[int, Option(help="Answers at a time.")] = 1,
    input_len: InputLen = 128,
    output_len: Annotated[int, Option(help="Tokens in an answer.")] = 256,
    dtype: Dtype = "auto",
    device: Device = None,
    launch_mode: Annotated[
        str, Option(metavar="MODE,MODE", help="loop, graph, eager, or several with commas.")
    ] = "loop,graph",
    repeats: Annotated[int, Option(help="Times that each mode answers, quiet and busy.")] = 5,
    json: Json = None,
) -> None:
    """Time of a whole answer on a quiet CPU, and on one that is kept busy.

    Busy is as many spinning processes as cores, and a Python thread in this process that holds the interpreter.
    """
    from mainspring.bench.busy import measure_busy
    from mainspring.bench.latency import check_modes
    from mainspring.bench.setting import open_setting
    from mainspring.bench.workload import Workload

    workload = Workload((batch,), input_len, output_len, repeats=repeats)
    output = Output(json)
    with open_setting(model, dtype, device, workload, measure_bandwidth=False) as setting:
        for record in measure_busy(setting, check_modes(launch_mode)):
            output.add(setting.device, "busy", record)
    output.show("busy_table")


@command(bench)
def startup(
    model: Model = "qwen3-0.6b",
    dtype: Dtype = "auto",
    device: Device = None,
    launch_mode: Annotated[str, Option(help="loop, graph or eager.")] = "graph",
    max_num_seqs: Annotated[int | None, Option(help="Largest batch, and so the top of the ladder.")] = None,
    weights: Annotated[
        str, Option(metavar="disk|dummy", help="For random weights: read them from disk, or make them in memory.")
    ] = "disk",
    json: Json = None,
) -> None:
    """Seconds from starting Python to the first token, with empty kernel caches (cold), then again (warm).

    Named shapes are first written to a temporary folder as a checkpoint of random weights.
    """
    from mainspring.bench.startup import startups

    output = Output(json)
    for where, record in startups(model, dtype, device, launch_mode, max_num_seqs, weights):
        output.add(where, "startup", record)
    output.show("startup_table")


@command(bench)
def cpu(
    model: Model = "smollm2",
    batch: Batch = "1,8",
    input_len: InputLen = 32,
    output_len: OutputLen = 32,
    dtype: Dtype = "float32",
    repeats: Annotated[int, Option(help="Pairs of runs.")] = 3,
    json: Json = None,
) -> None:
    """Tokens per second beside transformers' generate on the CPU, in alternating runs.

    A run answers a batch of random prompts, prefill included; the ratio is the median over pairs of runs made next to
    each other.
    """
    from mainspring.bench.compare import compare
    from mainspring.bench.setting import open_setting
    from mainspring.bench.workload import Workload

    workload = Workload(tuple(parse_sizes(batch)), input_len, output_len, repeats=repeats)
    output = Output(json)
    with open_setting(model, dtype, "cpu", workload, measure_bandwidth=False) as setting:
        for result in compare(setting):
            output.add(setting.device, "comparison", result)
    output.show("comparison_table")


@command(bench)
def soak(
    model: Model = "tiny",
    device: Device = None,
    dtype: Dtype = "float32",
    requests: Annotated[int, Option(help="Requests in all.")] = 5000,
    seats: Annotated[int, Option(help="Most answers that are decoded at a time.")] = 128,
    blocks: Annotated[int, Option(help="KV blocks of the small pool; too few for the seats.")] = 200,
    seed: Annotated[int, Option(help="Of the requests.")] = 0,
    launch_mode: Annotated[
        str | None, Option(metavar="eager|graph|loop", help="Of the engine with the small pool; the other is in graph.")
    ] = None,
    json: Json = None,
) -> None:
    """Random requests through a pool that forces preemption; greedy answers must equal those of a large pool.

    Ends with exit status 1 if an answer differs, a block is leaked or memory grows.
    """
    from mainspring.bench.shapes import open_model
    from mainspring.bench.soak import soak_model
    from mainspring.cli.terminal import note

    with open_model(model) as opened:
        where, report = soak_model(
            opened,
            device,
            dtype,
            requests=requests,
            seats=seats,
            blocks=blocks,
            seed=seed,
            launch_mode=launch_mode,
        )
    Output(json).add(where, "soak", report)
    note(str(report))
    if not report.ok:
        raise SystemExit(1)


command(bench)(serve)
