"""Time decode attention where it stands: between the QKV product and the output product, as one CUDA graph.

    python benchmarks/sweep_attention.py --models qwen3-0.6b --batch 1 16 64 --context 256

For each model, batch and context: the layers' chain with the attention kernel under several plans (splits, keys at a
time, warps), with and without fetching keys before the wait, less the same chain without attention; in microseconds a
layer, beside the floor of reading the layer's keys and values. The plan that the engine would choose is marked.
``--save FILE`` appends what was measured as JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import triton  # noqa: E402

from benchmarks.gemv_chain import SHAPES, StepShape, read_bandwidth, record, time_graph  # noqa: E402
from mainspring.kernels.linear import LinearWeight, linear  # noqa: E402
from mainspring.kernels.seats import embed  # noqa: E402
from mainspring.kernels.triton.attention_plan import SplitPlan, plan_splits  # noqa: E402
from mainspring.kernels.triton.decode_attention import rope_and_decode_attention  # noqa: E402

BLOCK_SIZE = 16


class Layers:
    """Weights, caches and inputs of all layers; every row has ``context`` keys."""

    def __init__(self, shape: StepShape, batch: int, context: int, max_keys: int) -> None:
        """Draw everything; blocks of different rows and layers lie scattered as they do in use."""
        device, dtype = torch.device("cuda"), torch.bfloat16
        self.shape, self.batch = shape, batch
        self.x = torch.randn(batch, shape.hidden, device=device, dtype=dtype)
        self.ids = torch.arange(batch, device=device)

        def weight(product: str) -> LinearWeight:
            n, k = shape.shape(product)
            return LinearWeight(torch.randn(n, k, device=device, dtype=dtype) * k**-0.5)

        self.weights = [(weight("qkv"), weight("o")) for _ in range(shape.layers)]
        blocks = -(-context // BLOCK_SIZE)
        num_blocks = batch * blocks + 1
        size = (num_blocks, BLOCK_SIZE, shape.kv_heads, shape.head_dim)
        self.caches = [
            tuple(torch.randn(size, device=device, dtype=dtype) for _ in range(2)) for _ in range(shape.layers)
        ]
        order = torch.randperm(num_blocks - 1, device=device).int() + 1
        self.tables = torch.zeros(batch, -(-max_keys // BLOCK_SIZE), device=device, dtype=torch.int32)
        self.tables[:, :blocks] = order.view(batch, blocks)
        self.lengths = torch.full((batch,), context, device=device, dtype=torch.int32)
        self.positions = torch.full((batch,), context - 1, device=device, dtype=torch.int64)
        last = self.tables[:, (context - 1) // BLOCK_SIZE].long()
        self.slots = last * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
        self.cos_sin = torch.rand(max_keys, shape.head_dim, device=device)
        norm = torch.ones(shape.head_dim, device=device, dtype=dtype)
        self.norm = norm if shape.name.startswith("qwen3") else None

    def step(self, plan: SplitPlan | None, settled: bool, attention: bool = True) -> torch.Tensor:
        """All layers' QKV product, attention and output product."""
        x = embed(self.ids, self.x)
        q_size = self.shape.heads * self.shape.head_dim
        for (qkv_weight, o_weight), (k_cache, v_cache) in zip(self.weights, self.caches, strict=True):
            qkv = linear(x, qkv_weight)
            if attention:
                seen = rope_and_decode_attention(
                    qkv, self.cos_sin, self.positions, self.slots, k_cache, v_cache, self.tables, self.lengths,
                    self.shape.head_dim**-0.5, 0, self.norm, self.norm, 1e-6, settled, plan or 0,
                )  # fmt: skip
                x = linear(seen.view(self.batch, q_size), o_weight)
            else:
                x = linear(qkv[:, :q_size], o_weight)
        return x


def prefer_shared_memory(percent: int) -> None:
    """Ask for the same division of an SM's memory for every Triton kernel that is loaded from now on."""
    driver = ctypes.CDLL("libcuda.so.1")

    def loaded(module: object, function: int, *rest: object) -> None:
        driver.cuFuncSetAttribute(ctypes.c_void_p(function), 9, percent)

    triton.knobs.runtime.kernel_load_end_hook.add(loaded)


def plans(batch: int, kv_heads: int, max_keys: int, quick: bool) -> Iterator[SplitPlan]:
    """What to try."""
    programs = batch * kv_heads
    if quick:
        for block_n, warps, stages in ((16, 1, 4), (16, 1, 2), (32, 2, 3), (32, 2, 0)):
            splits = max(1, -(-264 // programs))
            yield SplitPlan(splits, block_n if splits > 1 else 512, block_n, warps, stages)
            if programs < 528:
                yield SplitPlan(-(-528 // programs), 64, block_n, warps, stages)
        for target, run, block_n, warps in (
            (396, 32, 32, 2),
            (528, 32, 32, 2),
            (264, 64, 64, 4),
            (396, 64, 64, 4),
            (528, 64, 64, 4),
            (264, 32, 32, 4),
            (528, 32, 32, 4),
        ):
            yield SplitPlan(-(-target // programs), run, block_n, warps, 0)
        return
    for block_n, warps, stages in ((16, 1, 4), (32, 1, 3), (32, 2, 3), (64, 2, 2), (64, 4, 3), (32, 2, 0)):
        tried = set()
        for target in (132, 264, 528):
            splits = max(1, min(-(-target // programs), -(-max_keys // block_n), 128))
            if splits not in tried:
                yield SplitPlan(splits, block_n if programs < target else max(512, block_n), block_n, warps, stages)
            tried.add(splits)
        if programs < 528:
            yield SplitPlan(-(-528 // programs), 64, block_n, warps, stages)


def measure(shape: StepShape, batch: int, context: int, max_keys: int, bandwidth: float, quick: bool) -> dict[str, Any]:
    """One model, batch and context; prints a table."""
    layers = Layers(shape, batch, context, max_keys)
    without = time_graph(record(partial(layers.step, None, False, False)), 10, 3)
    floor = batch * context * shape.kv_heads * shape.head_dim * 4 / bandwidth * 1e6
    chosen = plan_splits(batch, shape.kv_heads, max_keys, 2 * shape.head_dim, ring=True)
    print(
        f"\n== {shape.name}, {batch} rows of {context} keys (of {max_keys}): products alone "
        f"{without / shape.layers * 1e3:.2f} us a layer, floor of attention {floor:.2f} us"
    )
    results = []
    for plan in dict.fromkeys([chosen, *plans(batch, shape.kv_heads, max_keys, quick)]):
        try:
            took = [
                (time_graph(record(partial(layers.step, plan, settled)), 10, 3) - without) / shape.layers * 1e3
                for settled in ((True, False) if plan == chosen else (True,))
            ] + [float("nan")]
        except Exception as problem:
            print(f"  {plan}: {str(problem)[-150:]}")
            continue
        results.append((took[0], took[1], plan))
    for early, late, plan in sorted(results, key=lambda result: result[0]):
        mark = f"  <- the engine's; {late:.2f} us fetching after the wait" if plan == chosen else ""
        print(
            f"  {early:7.2f} us: splits {plan.splits}, runs of {plan.min_split}, {plan.block_n} keys at a time, "
            f"{plan.warps} warps, {plan.stages} stages{mark}",
            flush=True,
        )
    return {
        "model": shape.name, "batch": batch, "context": context, "max_keys": max_keys, "floor_us": floor,
        "plans": [{**vars(plan), "early_us": early, "late_us": late} for early, late, plan in results],
    }  # fmt: skip


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b"], choices=SHAPES)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--context", nargs="+", type=int, default=[256])
    parser.add_argument("--max-keys", type=int, default=8192 + 512, help="keys that a row may have")
    parser.add_argument("--quick", action="store_true", help="only a few plans")
    parser.add_argument(
        "--carveout", type=int, default=-1, help="percent of an SM's memory that is to be shared memory"
    )
    parser.add_argument("--save", type=Path, help="append the measurements to this JSON list")
    options = parser.parse_args()
    if options.carveout >= 0:
        prefer_shared_memory(options.carveout)
    bandwidth = read_bandwidth(torch.empty(1 << 31, dtype=torch.bfloat16, device="cuda").normal_())
    print(f"{torch.cuda.get_device_name()}, reads {bandwidth / 1e12:.2f} TB/s")
    records = []
    with torch.no_grad():
        for name in options.models:
            for batch in options.batch:
                for context in options.context:
                    records.append(measure(SHAPES[name], batch, context, options.max_keys, bandwidth, options.quick))
                    torch.cuda.empty_cache()
    if options.save:
        old = json.loads(options.save.read_text()) if options.save.exists() else []
        options.save.write_text(json.dumps([*old, *records], indent=1) + "\n")


if __name__ == "__main__":
    main()
