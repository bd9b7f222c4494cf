"""Tune the skinny products on this GPU and time the products of whole decode steps.

    python benchmarks/sweep_gemv.py --out DIR --budget 420 --models qwen3-0.6b --rows 1

For each model and number of rows: every candidate tile of every product is checked against fp64 and timed
over the layers' distinct weights; the best are tried in the whole chain, one product at a time; the
winners, and the chain in its variants (library, bare products, unfused, fused, without PDL), are printed,
and saved as JSON after each model. ``--save`` also writes the table that the engine chooses tiles from.
``--help`` lists the rest.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import triton  # noqa: E402

from benchmarks.gemv_candidates import CANDIDATES  # noqa: E402
from benchmarks.gemv_chain import (  # noqa: E402
    EPS,
    PRODUCTS,
    SHAPES,
    Chain,
    StepWeights,
    read_bandwidth,
    record,
    time_graph,
)
from benchmarks.gemv_compile import Compilers, Job  # noqa: E402
from mainspring.kernels.triton.gemv_common import Epilogue, Prologue, WeightOperand  # noqa: E402
from mainspring.kernels.triton.gemv_ops import head_argmax, reference_matmul, skinny_matmul  # noqa: E402
from mainspring.kernels.triton.gemv_plan import Tile  # noqa: E402
from mainspring.kernels.triton.gemv_tables import TABLES, table_path, write_table  # noqa: E402

LIBRARY = Tile("library")
FUSIONS = ("norm", "swiglu", "residual", "head")
ERROR_LIMIT = 6e-3


class Sweep:
    """One model and number of rows on one GPU."""

    def __init__(
        self, weights: StepWeights, rows: int, bandwidth: float, deadline: float, most: int,
        compilers: Compilers | None, kernels: list[str],
    ) -> None:  # fmt: skip
        """``deadline`` is a ``time.monotonic()`` value after which nothing new is started."""
        self.weights, self.rows, self.bandwidth, self.deadline, self.most = (
            weights,
            rows,
            bandwidth,
            deadline,
            most,
        )
        self.compilers, self.kernels = compilers, kernels
        self.shape = weights.shape
        self.device = weights.norms.device
        self.failures: list[str] = []
        self.measured: dict[str, list[dict[str, Any]]] = {}

    def late(self, until: float | None = None) -> bool:
        """Whether the time is up."""
        return time.monotonic() > (self.deadline if until is None else until)

    def candidates(self, product: str) -> list[Tile]:
        """Tiles to try for a product, the kernels taking turns, so that each has had some when time is up."""
        n, k = self.shape.shape(product)
        rows = [list(CANDIDATES[name](n, k, self.rows, self.most)) for name in self.kernels]
        return [tile for turn in zip_longest(*rows) for tile in turn if tile is not None]

    def operands(self, product: str) -> list[WeightOperand]:
        """The product's distinct weights."""
        return [self.weights.head] if product == "head" else [layer[product] for layer in self.weights.layers]

    def compile(self, jobs: list[Job], seconds: float) -> set[Job]:
        """Compile ahead, in parallel; returns the jobs that failed."""
        if self.compilers is None:
            return set()
        failed = self.compilers.run(jobs, seconds)
        if 2 * len(failed) > len(jobs):
            print(f"  compiling ahead does not work here: {next(iter(failed.values()))}")
            return set()
        self.failures += [f"{job.n}x{job.k} {job.tile.short()}: {problem}" for job, problem in failed.items()]
        return set(failed)

    def tune(self, product: str, keep: int, until: float) -> list[Tile]:
        """Check and time candidates over the layers' weights, until time is up; the fastest first."""
        n, k = self.shape.shape(product)
        operands = self.operands(product)
        x = torch.randn((self.rows, k), device=self.device, dtype=torch.bfloat16)
        out = torch.empty((self.rows, n), device=self.device, dtype=torch.bfloat16)
        expected = reference_matmul(x, operands[0])
        tiles = self.candidates(product)
        jobs = [Job(self.rows, n, k, tile) for tile in tiles]
        failed = {job.tile for job in self.compile(jobs, 0.8 * (until - time.monotonic()))}
        tiles = [tile for tile in tiles if tile not in failed]
        copies = 3 if product == "head" else 1
        results: list[tuple[float, Tile]] = []
        for tile in [LIBRARY, *tiles]:
            if self.late(until):
                break
            try:
                out.fill_(float("nan"))
                self.run(x, operands[0], tile, out)
                error = float((out.double() - expected).norm() / expected.norm())
                if not error < ERROR_LIMIT:
                    raise ArithmeticError(f"relative error {error:.1e}")

                def chain(tile: Tile = tile) -> None:
                    for operand in operands * copies:
                        self.run(x, operand, tile, out)

                results.append((time_graph(record(chain), 10, 3) / len(operands * copies) * 1e3, tile))
            except Exception as problem:
                self.failures.append(f"{product} {tile.short()}: {str(problem)[-200:]}")
                if "CUDA error" in str(problem) and "resources" not in str(problem):
                    print(f"  {self.failures[-1]}\n  the GPU context is lost: leave that tile out, start again")
                    raise
        results.sort(key=lambda pair: pair[0])
        nbytes = operands[0].nbytes
        self.measured[product] = [
            {"tile": tile.to_dict(), "microseconds": micro, "terabytes_per_s": nbytes / micro / 1e6}
            for micro, tile in results
        ]
        library = next((micro for micro, tile in results if tile == LIBRARY), float("nan"))
        print(
            f"  {product} {n}x{k}: floor {nbytes / self.bandwidth * 1e6:.2f} us, torch.mm {library:.2f}, "
            f"{len(results) - 1} of {len(tiles)} tiles, {len(self.failures)} failures so far",
            flush=True,
        )
        for micro, tile in results[:4]:
            print(f"    {micro:7.2f} us  {nbytes / micro / 1e6:5.2f} TB/s  {tile.short()}")
        own = [tile for _, tile in results if tile != LIBRARY]
        best = own[:keep]
        for kernel in ("vector", "dot", "mma", "ring"):
            if kernel not in {tile.kernel for tile in best}:
                best += [tile for tile in own if tile.kernel == kernel][:1]
        return [*best, LIBRARY]

    @staticmethod
    def run(x: torch.Tensor, operand: WeightOperand, tile: Tile, out: torch.Tensor) -> None:
        """One product."""
        if tile.kernel == "library":
            torch.mm(x, operand.tensor.T, out=out)
        else:
            skinny_matmul(x, operand, tile, out=out)

    def descend(self, best: dict[str, list[Tile]]) -> dict[str, Tile]:
        """Try each product's best tiles in the layers' chain, the others held."""
        chosen = {product: tiles[0] for product, tiles in best.items()}

        def layers(tiles: dict[str, Tile]) -> float:
            chain = Chain(self.weights, self.rows, tiles, bare=True, products=PRODUCTS)
            return time_graph(record(chain.step), 10, 3)

        record_time = layers(chosen)
        for product in PRODUCTS:
            for tile in best[product][1:]:
                if self.late():
                    return chosen
                trial = layers({**chosen, product: tile})
                if trial < record_time:
                    record_time, chosen = trial, {**chosen, product: tile}
        print(f"  layers alone {record_time:.4f} ms: " + "; ".join(f"{p} {t.short()}" for p, t in chosen.items()))
        return chosen

    def fused_jobs(self, tiles: dict[str, Tile]) -> list[Job]:
        """What the variants need beside the plain products."""
        jobs = []
        for product, tile in tiles.items():
            n, k = self.shape.shape(product)
            for pdl in (True, False):
                plain = Job(self.rows, n, k, tile, pdl=pdl)
                normed = replace(plain, prologue=Prologue.NORM)
                jobs += [plain] if product in ("o", "down") else [plain, normed]
                if product in ("o", "down"):
                    jobs.append(replace(plain, residual=True))
                if product == "gate_up":
                    jobs += [replace(job, epilogue=Epilogue.SWIGLU) for job in (plain, normed)]
                if product == "head":
                    jobs += [replace(job, epilogue=Epilogue.ARGMAX) for job in (plain, normed)]
        return jobs

    def check_fused(self, tiles: dict[str, Tile]) -> dict[str, float]:
        """Relative error of every fused product against fp64, and whether the arg-max agrees."""
        dtype, rows = torch.bfloat16, self.rows
        layer, norms = self.weights.layers[0], self.weights.norms
        errors: dict[str, float] = {}

        def check(name: str, product: str, prologue: Prologue, epilogue: Epilogue, residual: bool) -> None:
            weight = layer[product]
            width = weight.columns * (2 if prologue == Prologue.SILU else 1)
            x = torch.randn((rows, width), device=self.device, dtype=dtype)
            columns = weight.rows // (2 if epilogue == Epilogue.SWIGLU else 1)
            beside = torch.randn((rows, columns), device=self.device, dtype=dtype) if residual else None
            out = torch.full((rows, columns), float("nan"), device=self.device, dtype=dtype)
            arguments: dict[str, Any] = {"residual": beside, "norm_weight": norms, "eps": EPS}
            skinny_matmul(x, weight, tiles[product], out=out, prologue=prologue, epilogue=epilogue, **arguments)
            wanted = reference_matmul(x, weight, prologue=prologue, epilogue=epilogue, **arguments)
            errors[name] = float((out.double() - wanted).norm() / wanted.norm())

        cases = {
            "norm+qkv": ("qkv", Prologue.NORM, Epilogue.PLAIN, False),
            "o+residual": ("o", Prologue.PLAIN, Epilogue.PLAIN, True),
            "norm+gate_up+silu": ("gate_up", Prologue.NORM, Epilogue.SWIGLU, False),
            "down+residual": ("down", Prologue.PLAIN, Epilogue.PLAIN, True),
            "silu+down+residual": ("down", Prologue.SILU, Epilogue.PLAIN, True),
        }
        for name, case in cases.items():
            try:
                check(name, *case)
            except Exception as problem:
                self.failures.append(f"{name}: {str(problem)[-200:]}")
                errors[name] = float("nan")
        try:
            x = torch.randn((rows, self.shape.hidden), device=self.device, dtype=dtype)
            arguments: dict[str, Any] = {"norm_weight": norms, "eps": EPS, "prologue": Prologue.NORM}
            token = head_argmax(x, self.weights.head, tiles["head"], **arguments)
            logits = skinny_matmul(x, self.weights.head, tiles["head"], **arguments)
            errors["arg-max rows that differ"] = float((token != logits.argmax(-1)).sum())
        except Exception as problem:
            self.failures.append(f"head arg-max: {str(problem)[-200:]}")
        return errors

    def chain(self, tiles: dict[str, Tile], fuse: frozenset[str]) -> Chain:
        """The whole chain with own kernels."""
        return Chain(self.weights, self.rows, tiles, fuse)

    def variants(self, chosen: dict[str, Tile], tiles: dict[str, Tile]) -> dict[str, float]:
        """Milliseconds of the whole chain in each variant."""
        every = frozenset(FUSIONS)
        library = {product: LIBRARY for product in tiles}
        chains: dict[str, Callable[[], Chain]] = {
            "bare torch.mm": lambda: Chain(self.weights, self.rows, library, bare=True),
            "bare chosen": lambda: Chain(self.weights, self.rows, chosen, bare=True),
            "bare ours": lambda: Chain(self.weights, self.rows, tiles, bare=True),
            "bare ours, no PDL": lambda: Chain(self.weights, self.rows, tiles, bare=True, pdl=False),
            "whole torch": lambda: Chain(self.weights, self.rows, library),
            "whole ours, unfused": lambda: Chain(self.weights, self.rows, tiles),
            "whole ours, all fused": lambda: Chain(self.weights, self.rows, tiles, every),
            "whole ours, all fused, no PDL": lambda: Chain(self.weights, self.rows, tiles, every, pdl=False),
            **{
                f"whole ours, {part} not fused": partial(self.chain, tiles, every - set(part.split(" and ")))
                for part in ("norm", "swiglu", "norm and residual", "head")
            },
        }  # fmt: skip
        if chosen == tiles:
            del chains["bare chosen"]
        times: dict[str, float] = {}
        for name, make in chains.items():
            if self.late():
                break
            try:
                chain = make()
                step = chain.step_library if name == "whole torch" else chain.step
                times[name] = time_graph(record(step))
            except Exception as problem:
                self.failures.append(f"{name}: {str(problem)[-300:]}")
        return times

    def entry(self, product: str, tile: Tile) -> dict[str, Any]:
        """A line of the table that the engine reads."""
        n, k = self.shape.shape(product)
        micro = {str(m["tile"]): m["microseconds"] for m in self.measured[product]}
        return {
            "n": n,
            "k": k,
            "rows": self.rows,
            "dtype": "bfloat16",
            "kind": "DENSE",
            "tile": tile.to_dict(),
            "microseconds": round(micro.get(str(tile.to_dict()), float("nan")), 3),
            "library_microseconds": round(micro.get(str(LIBRARY.to_dict()), float("nan")), 3),
        }

    def report(self) -> dict[str, Any]:
        """Everything for this model and number of rows, printed as it comes."""
        floor = self.shape.step_bytes / self.bandwidth * 1e3
        print(f"\n== {self.shape.name}, {self.rows} rows: {self.shape.step_bytes / 1e9:.2f} GB, floor {floor:.3f} ms")
        begin = time.monotonic()
        share = 0.65 * (self.deadline - begin) / 5
        best = {
            product: self.tune(product, 5, begin + share * (place + 1))
            for place, product in enumerate((*PRODUCTS, "head"))
        }
        missing = [product for product, tiles in best.items() if tiles == [LIBRARY]]
        if missing:
            print(f"  no tile works for {missing}; last failures: {self.failures[-3:]}")
            return {"measured": self.measured, "failures": self.failures}
        head = Tile.from_dict(self.measured["head"][0]["tile"])
        chosen = {**self.descend({p: best[p] for p in PRODUCTS}), "head": head}
        # A fused step needs own kernels everywhere, also where the library's product alone is faster.
        own = {p: best[p][0] if tile == LIBRARY else tile for p, tile in chosen.items()}
        self.compile(self.fused_jobs(own), 0.5 * (self.deadline - time.monotonic()))
        errors = self.check_fused(own)
        print("  fused, relative error: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
        times = self.variants(chosen, own)
        for failure in self.failures[:6]:
            print("  failed: " + failure.replace("\n", " ")[:160])
        for name, milliseconds in times.items():
            rate = self.shape.step_bytes / milliseconds / 1e9
            print(f"  {name:34s} {milliseconds:8.4f} ms  {rate:5.2f} TB/s  {milliseconds / floor:5.2f} x floor")
        return {
            "model": self.shape.name,
            "rows": self.rows,
            "floor_ms": floor,
            "entries": [self.entry(product, tile) for product, tile in chosen.items()],
            "milliseconds": times,
            "errors": errors,
            "measured": self.measured,
            "failures": self.failures,
        }


def main() -> None:
    """Read the command line, sweep, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b"], choices=SHAPES)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--budget", type=float, default=480.0, help="seconds in all")
    parser.add_argument("--candidates", type=int, default=24, help="tiles of each kernel to try for a product")
    parser.add_argument("--kernels", nargs="+", default=["mma", "ring", "vector", "dot"], choices=CANDIDATES)
    parser.add_argument("--save", action="store_true", help="write the table of tiles, into --out and the package")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for sweep_gemv.json")
    options = parser.parse_args()
    begin = time.monotonic()
    compilers = Compilers() if torch.cuda.is_available() else None
    device = torch.device("cuda")
    pool = torch.empty(
        max(SHAPES[name].step_bytes for name in options.models) // 2, dtype=torch.bfloat16, device=device
    )
    pool.normal_()
    bandwidth = read_bandwidth(pool)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "read_bandwidth": bandwidth,
        "sweeps": [],
    }
    print(f"{result['device']}, torch {torch.__version__}, Triton {triton.__version__}, "
          f"reads {bandwidth / 1e12:.2f} TB/s")  # fmt: skip
    pairs = [(name, rows) for rows in options.rows for name in options.models]
    for position, (name, rows) in enumerate(pairs):
        left = options.budget - (time.monotonic() - begin)
        if left < 10:
            print(f"time is up before {name}, {rows} rows")
            break
        share = time.monotonic() + left / (len(pairs) - position)
        try:
            weights = StepWeights.draw(SHAPES[name], pool)
            result["sweeps"].append(
                Sweep(weights, rows, bandwidth, share, options.candidates, compilers, options.kernels).report()
            )
        except Exception:
            print(f"{name}, {rows} rows failed:\n{traceback.format_exc()[-1500:]}")
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "sweep_gemv.json").write_text(json.dumps(result, indent=1))
        if options.save and "entries" in result["sweeps"][-1]:
            remarks = {key: result[key] for key in ("device", "torch", "triton", "read_bandwidth")}
            for folder in {options.out, TABLES}:
                write_table(table_path(result["device"], folder), remarks, result["sweeps"][-1]["entries"])
        print(f"  [{time.monotonic() - begin:.0f} s]", flush=True)
    if compilers is not None:
        compilers.close()


if __name__ == "__main__":
    main()
