"""``mainspring bench serve``: a server under load."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from mainspring.cli.bench_output import Output

_RATES = "Rates"
_CROWD = "A crowd, in place of rates"


def serve(
    model: Annotated[
        str, Option(help="qwen3-0.6b, llama-3.2-1b, llama-3.1-8b, tiny (random weights), smollm2, or a model folder.")
    ] = "qwen3-0.6b",
    dtype: Annotated[str, Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, Option(help="cuda, cuda:1, cpu ...")] = None,
    launch_mode: Annotated[
        str, Option(metavar="MODE,MODE", help="Launch modes of the server, one after the other.")
    ] = "graph",
    max_num_seqs: Annotated[int | None, Option(help="Most answers that are decoded at a time.")] = None,
    request_rate: Annotated[
        str, Option(metavar="1,8,32", help="Requests per second, one rate after the other.", rich_help_panel=_RATES)
    ] = "1,8,32,128",
    seconds: Annotated[float, Option(help="Seconds for which requests arrive.", rich_help_panel=_RATES)] = 10.0,
    input_len: Annotated[int, Option(help="Tokens in a prompt.", rich_help_panel=_RATES)] = 128,
    output_len: Annotated[int, Option(help="Tokens in an answer.", rich_help_panel=_RATES)] = 64,
    sampled: Annotated[
        bool, Option("--sampled", help="Sample with temperature and top-p.", rich_help_panel=_RATES)
    ] = False,
    peer: Annotated[
        list[str] | None,
        Option("--peer", metavar="vllm", help="Measure this server too, on the same model.", rich_help_panel=_RATES),
    ] = None,
    base_url: Annotated[
        str | None,
        Option(metavar="URL", help="A server that runs already, of any kind.", rich_help_panel=_RATES),
    ] = None,
    api_key: Annotated[str | None, Option(help="The key that it asks for.", rich_help_panel=_RATES)] = None,
    vocab_size: Annotated[
        int, Option(help="Ids that its model has at least; prompts are random ids.", rich_help_panel=_RATES)
    ] = 32000,
    clients: Annotated[
        int | None, Option(help="Clients that ask without pause; answers are compared.", rich_help_panel=_CROWD)
    ] = None,
    minutes: Annotated[float, Option(help="For how long.", rich_help_panel=_CROWD)] = 5.0,
    drop: Annotated[float, Option(help="Share of requests that are left midway.", rich_help_panel=_CROWD)] = 0.1,
    garbage: Annotated[float, Option(help="Share of requests that are none.", rich_help_panel=_CROWD)] = 0.1,
    seed: Annotated[int, Option(help="Of the traffic.")] = 0,
    json: Annotated[
        str | None,
        Option("--json", metavar="[FILE]", help="Append records to the list in this file; see bench latency."),
    ] = None,
) -> None:
    """Times to the first token (TTFT) and between tokens (ITL) of a server under random traffic.

    The server is a process of its own, and works on token ids. With --clients it is a soak instead: every answer has to
    be the one that the engine gives offline, and nothing may be lost or leaked; exit status 1 otherwise.
    """
    from mainspring.bench.peers.base import find_server
    from mainspring.bench.serve import Traffic, serve_elsewhere, serve_peer, serve_rates
    from mainspring.bench.shapes import open_model
    from mainspring.engine.limits import choose_device

    seats = [] if max_num_seqs is None else ["--max-num-seqs", str(max_num_seqs)]
    output = Output(json)
    if clients is not None:
        _soak(model, dtype, device, max_num_seqs, clients, minutes, drop, garbage, seed, output)
        return
    try:
        rates = tuple(float(rate) for rate in request_rate.split(","))
    except ValueError:
        raise ValueError(f"--request-rate is {request_rate!r}; write 1,8,32") from None
    traffic = Traffic(rates, input_len, output_len, seconds, sampled, seed)
    where = choose_device(device)
    try:
        if base_url is not None:
            for record in serve_elsewhere(base_url, traffic, vocab_size, api_key):
                output.add(where, "serve", record)
            return
        for name in peer or ():
            find_server(name)  # before the first minute is spent
        with open_model(model) as opened:
            modes = launch_mode.split(",")
            for record in serve_rates(opened, traffic, modes, dtype, device, seats):
                output.add(where, "serve", record)
            for name in peer or ():
                for record in serve_peer(name, opened, traffic, modes, dtype, str(where), max_num_seqs or 256):
                    output.add(where, "serve", record)
    finally:
        output.show("serve_table")


def _soak(
    model: str,
    dtype: str,
    device: str | None,
    seats: int | None,
    clients: int,
    minutes: float,
    drop: float,
    garbage: float,
    seed: int,
    output: Output,
) -> None:
    from mainspring.bench.serve_soak import Crowd, soak_server
    from mainspring.bench.shapes import open_model
    from mainspring.cli.terminal import note
    from mainspring.engine.limits import choose_device

    crowd = Crowd(clients, minutes, drop, garbage, seed)
    with open_model(model) as opened:
        report = soak_server(opened, crowd, dtype, device, seats or 16, note)
    output.add(choose_device(device), "serve soak", report)
    note(str(report))
    if not report.ok:
        raise SystemExit(1)
