"""What the loop adds to a recorded step: one chain of matrix-vector products, replayed by the CPU and repeated by the
device.

    python benchmarks/loop_step.py                 # on a GPU: 114 kernels of a 0.6B decoder's shapes, in bf16
    python benchmarks/loop_step.py --products 8 --size 64

Both times are the device's. The loop's are the stamps that it takes anyway. For the graph, a tiny loop of no more than
a flag takes one stamp in front of a row of replays and one behind; its own time, measured the same way, is taken off.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import numpy as np
import torch

from mainspring.graphs import CpuGraph, CudaGraph, Loop, Mailbox


def make_step(products: int, size: int, device: str) -> tuple[Callable[[], None], torch.Tensor]:
    """A step of `products` products with distinct weights, and the flag that its last kernel writes."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = [(4 * size, size), (size, 2 * size), (6 * size, size), (size, 3 * size)]
    layers = max(1, products // 4)
    weights = [torch.randn(n, k, dtype=dtype, device=device) / k**0.5 for _ in range(layers) for n, k in shapes]
    inputs = {k: torch.randn(k, dtype=dtype, device=device) for _, k in shapes}
    outputs = {n: torch.empty(n, dtype=dtype, device=device) for n, _ in shapes}
    flag = torch.ones(1, dtype=torch.int32, device=device)

    def step() -> None:
        for weight in weights:
            torch.mv(weight, inputs[weight.shape[1]], out=outputs[weight.shape[0]])
        flag.fill_(1)

    return step, flag


def graph_times(graph: CudaGraph | CpuGraph, mailbox: Mailbox, steps: int, repeats: int) -> list[float]:
    """Microseconds of one replay, from stamps on the device before and after `steps` of them, `repeats` times."""
    kind = type(graph)
    flag = torch.ones(1, dtype=torch.int32, device=mailbox.device)
    clock = Loop(kind.capture(lambda: flag.fill_(1)), flag=flag, mailbox=mailbox, name="clock")

    def between(replays: int) -> int:
        first = clock.launch(1)
        if mailbox.device.type == "cpu":
            clock.join()
        for _ in range(replays):
            graph.replay()
        second = clock.launch(1)
        clock.join()
        return int(clock.stamps(second)[0] - clock.stamps(first)[-1])

    between(3)
    empty = statistics.median(between(0) for _ in range(repeats))
    times = [(between(steps) - empty) / steps / 1e3 for _ in range(repeats)]
    clock.release()
    return times


def loop_times(loop: Loop, steps: int, repeats: int) -> list[float]:
    """Microseconds from the end of one iteration to the end of the next, medians of `repeats` launches."""
    times = []
    for _ in range(repeats + 1):
        loop.launch(steps)
        loop.join()
        times.append(float(np.median(np.diff(loop.stamps()[1:]))) / 1e3)
    return times[1:]  # without the first launch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--products", type=int, default=112 if cuda else 8, help="matrix-vector products in the step")
    parser.add_argument("--size", type=int, default=1024 if cuda else 64, help="hidden size")
    parser.add_argument("--steps", type=int, default=500 if cuda else 50, help="steps of a measurement")
    parser.add_argument("--repeats", type=int, default=9, help="measurements")
    parser.add_argument("--words", type=int, default=16, help="int32 words of a record")
    options = parser.parse_args()
    device = "cuda" if cuda else "cpu"
    if (why := Loop.available(device)) is not None:
        raise SystemExit(f"no loop on {device}: {why}")

    step, flag = make_step(options.products, options.size, device)
    graph = (CudaGraph if cuda else CpuGraph).capture(step, name="step")
    record = torch.zeros(options.words, dtype=torch.int32, device=device)
    # Nobody reads meanwhile, so the ring holds every record of the run.
    mailbox = Mailbox(device, record_shape=(options.words,), depth=(options.repeats + 2) * options.steps)
    loop = Loop(graph, flag=flag, mailbox=mailbox, record=record, name="step")
    replayed = graph_times(graph, mailbox, options.steps, options.repeats)
    looped = loop_times(loop, options.steps, options.repeats)
    graph_us, loop_us = statistics.median(replayed), statistics.median(looped)
    result = {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "operations": graph.num_operations,
        "graph_us": round(graph_us, 2),
        "graph_us_range": [round(min(replayed), 2), round(max(replayed), 2)],
        "loop_us": round(loop_us, 2),
        "loop_us_range": [round(min(looped), 2), round(max(looped), 2)],
        "loop_adds_us": round(loop_us - graph_us, 2),
        "ratio": round(loop_us / graph_us, 4),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
