"""The matrix products of one decode step as one CUDA graph: shapes, weights, chains of kernels and their
timing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from mainspring.kernels.triton.gemv_common import (
    Epilogue,
    Prologue,
    WeightOperand,
    launch,
    pdl_launch_dependents,
    pdl_supported,
    pdl_wait,
    silu,
)
from mainspring.kernels.triton.gemv_ops import head_argmax, skinny_matmul
from mainspring.kernels.triton.gemv_plan import Tile

EPS = 1e-6
PRODUCTS = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True)
class StepShape:
    """The sizes of a decoder that its matrix products depend on."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    def shape(self, product: str) -> tuple[int, int]:
        """(N, K) of a product: qkv, o, gate_up, down or head."""
        q = self.heads * self.head_dim
        return {
            "qkv": (q + 2 * self.kv_heads * self.head_dim, self.hidden),
            "o": (self.hidden, q),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "head": (self.vocab, self.hidden),
        }[product]

    def elements(self, product: str) -> int:
        """Weights of one product."""
        n, k = self.shape(product)
        return n * k

    @property
    def step_bytes(self) -> int:
        """Bytes of bf16 weights that one step reads."""
        layer = sum(self.elements(product) for product in PRODUCTS)
        return 2 * (layer * self.layers + self.elements("head"))


SHAPES = {
    shape.name: shape
    for shape in (
        StepShape("qwen3-0.6b", 28, 1024, 3072, 16, 8, 128, 151936),
        StepShape("llama-3.2-1b", 16, 2048, 8192, 32, 8, 64, 128256),
        StepShape("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256),
        StepShape("tiny", 2, 64, 96, 4, 2, 16, 160),
    )
}


@dataclass
class StepWeights:
    """Distinct weights for each layer, carved out of one allocation."""

    shape: StepShape
    layers: list[dict[str, WeightOperand]] = field(default_factory=list)
    head: WeightOperand = field(init=False)
    norms: torch.Tensor = field(init=False)

    @classmethod
    def draw(cls, shape: StepShape, pool: torch.Tensor) -> StepWeights:
        """Fill the front of ``pool`` (bf16) with normal numbers that neither grow nor shrink what passes
        through.
        """
        gain = math.prod(shape.shape(product)[1] for product in PRODUCTS) ** 0.125
        used = pool[: shape.step_bytes // 2]
        for start in range(0, used.numel(), 1 << 30):
            used[start : start + (1 << 30)].normal_(0.0, 1.0 / gain)
        weights, at = cls(shape), 0

        def take(product: str) -> WeightOperand:
            nonlocal at
            n, k = shape.shape(product)
            at += n * k
            return WeightOperand.dense(used[at - n * k : at].view(n, k))

        weights.layers = [{product: take(product) for product in PRODUCTS} for _ in range(shape.layers)]
        weights.head = take("head")
        weights.norms = 1.0 + 0.1 * torch.randn(shape.hidden, device=pool.device, dtype=pool.dtype)
        return weights


@triton.jit
def _add_norm_kernel(
    x_ptr, add_ptr, weight_ptr, out_ptr, stride, eps,
    K: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    mask = columns < K
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    at = tl.program_id(0) * stride + columns
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(add_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(x_ptr + at, x.to(x_ptr.dtype.element_ty), mask=mask)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / K + eps)
    tl.store(out_ptr + at, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _silu_mul_kernel(x_ptr, out_ptr, stride, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < K
    row = tl.program_id(1)
    gate = tl.load(x_ptr + row * stride + columns, mask=mask).to(tl.float32)
    up = tl.load(x_ptr + row * stride + K + columns, mask=mask).to(tl.float32)
    tl.store(out_ptr + row * K + columns, (silu(gate) * up).to(out_ptr.dtype.element_ty), mask=mask)


@dataclass
class Chain:
    """The products of one decode step, in order, each reading what the one before wrote.

    Args:
        weights: of the whole step.
        rows: M.
        tiles: a tile for each product; ``Tile("library")`` is ``torch.mm``.
        fuse: of "norm", "swiglu", "residual", "head"; what is not named is a kernel of its own.
        bare: products only: no norm, activation, residual or arg-max at all.
        pdl: programmatic dependent launch.
        products: which products to run, in a layer and after it.
    """

    weights: StepWeights
    rows: int
    tiles: dict[str, Tile]
    fuse: frozenset[str] = frozenset()
    bare: bool = False
    pdl: bool = True
    products: tuple[str, ...] = (*PRODUCTS, "head")

    def __post_init__(self) -> None:
        """Allocate the activations."""
        if "norm" in self.fuse and "residual" not in self.fuse:
            raise ValueError("with the norm fused no kernel is left to add the residual: fuse it too, or neither")
        shape, device = self.weights.shape, self.weights.norms.device
        self.pdl = self.pdl and pdl_supported(device)

        def make(columns: int) -> torch.Tensor:
            return torch.randn((self.rows, columns), device=device, dtype=self.weights.norms.dtype)

        self.hidden, self.normed, self.branch = make(shape.hidden), make(shape.hidden), make(shape.hidden)
        self.qkv, self.gate_up = make(shape.shape("qkv")[0]), make(2 * shape.intermediate)
        self.active, self.logits = make(shape.intermediate), make(shape.vocab)
        self.token = torch.zeros(self.rows, dtype=torch.int32, device=device)
        slots = shape.vocab
        self.workspace = (
            torch.zeros((self.rows, slots), device=device),
            torch.zeros((self.rows, slots), dtype=torch.int32, device=device),
        )

    def product(
        self, name: str, layer: dict[str, WeightOperand], x: torch.Tensor, out: torch.Tensor,
        prologue: Prologue = Prologue.PLAIN, epilogue: Epilogue = Epilogue.PLAIN, residual: bool = False,
    ) -> None:  # fmt: skip
        """One product with what is fused into it."""
        tile, weight = self.tiles[name], layer[name]
        if tile.kernel == "library":
            torch.mm(x, weight.tensor.T, out=out)
            return
        skinny_matmul(
            x, weight, tile, out=out, residual=self.hidden if residual else None,
            norm_weight=self.weights.norms, eps=EPS, prologue=prologue, epilogue=epilogue, pdl=self.pdl,
        )  # fmt: skip

    def norm(self, add: bool) -> None:
        """hidden += branch where ``add``, then normed = RMSNorm(hidden)."""
        hidden = self.weights.shape.hidden
        launch(
            _add_norm_kernel, self.rows,
            (self.hidden, self.branch, self.weights.norms, self.normed, hidden, EPS),
            {"K": hidden, "BLOCK": triton.next_power_of_2(hidden), "ADD": add, "PDL": self.pdl},
            warps=4, pdl=self.pdl,
        )  # fmt: skip

    def activate(self) -> None:
        """active = silu(gate) * up."""
        width = self.weights.shape.intermediate
        options = {"launch_pdl": True} if self.pdl else {}
        _silu_mul_kernel[(triton.cdiv(width, 512), self.rows)](
            self.gate_up, self.active, 2 * width, K=width, BLOCK=512, PDL=self.pdl, num_warps=4, **options
        )

    def step_bare(self) -> None:
        """Only the products; each feeds the next with the front of what it wrote."""
        shape = self.weights.shape
        q, wide = shape.heads * shape.head_dim, shape.intermediate
        for layer in self.weights.layers:
            if "qkv" in self.products:
                self.product("qkv", layer, self.hidden, self.qkv)
            if "o" in self.products:
                self.product("o", layer, self.qkv[:, :q], self.branch)
            if "gate_up" in self.products:
                self.product("gate_up", layer, self.branch, self.gate_up)
            if "down" in self.products:
                self.product("down", layer, self.gate_up[:, :wide], self.hidden)
        if "head" in self.products:
            self.product("head", {"head": self.weights.head}, self.hidden, self.logits)

    def step(self) -> None:
        """The whole chain, but for attention."""
        if self.bare:
            self.step_bare()
            return
        q = self.weights.shape.heads * self.weights.shape.head_dim
        norm, residual = "norm" in self.fuse, "residual" in self.fuse
        prologue = Prologue.NORM if norm else Prologue.PLAIN
        branch = self.hidden if residual else self.branch
        pending = False
        for layer in self.weights.layers:
            for name, source, target in (
                ("qkv", self.hidden, self.qkv),
                ("gate_up", self.hidden, self.gate_up),
            ):
                if not norm:
                    self.norm(add=pending and not residual)
                swiglu = name == "gate_up" and "swiglu" in self.fuse
                self.product(
                    name, layer, source if norm else self.normed, self.active if swiglu else target,
                    prologue, Epilogue.SWIGLU if swiglu else Epilogue.PLAIN,
                )  # fmt: skip
                if name == "qkv":
                    self.product("o", layer, self.qkv[:, :q], branch, residual=residual)
                else:
                    if not swiglu:
                        self.activate()
                    self.product("down", layer, self.active, branch, residual=residual)
                pending = True
        if "head" not in self.products:
            return
        if not norm:
            self.norm(add=not residual)
        source = self.hidden if norm else self.normed
        if "head" in self.fuse:
            head_argmax(
                source, self.weights.head, self.tiles["head"], out=self.token, workspace=self.workspace,
                norm_weight=self.weights.norms, eps=EPS, prologue=prologue, pdl=self.pdl,
            )  # fmt: skip
        else:
            self.product("head", {"head": self.weights.head}, source, self.logits, prologue)
            torch.argmax(self.logits, dim=-1)

    def step_library(self) -> None:
        """The whole chain in torch's own kernels, as a recorded eager step would run it."""
        shape = self.weights.shape
        q, norms = shape.heads * shape.head_dim, self.weights.norms
        hidden = self.hidden
        for layer in self.weights.layers:
            normed = torch.nn.functional.rms_norm(hidden, (shape.hidden,), norms, EPS)
            qkv = torch.mm(normed, layer["qkv"].tensor.T)
            hidden = hidden + torch.mm(qkv[:, :q], layer["o"].tensor.T)
            normed = torch.nn.functional.rms_norm(hidden, (shape.hidden,), norms, EPS)
            gate, up = torch.mm(normed, layer["gate_up"].tensor.T).chunk(2, dim=-1)
            hidden = hidden + torch.mm(torch.nn.functional.silu(gate) * up, layer["down"].tensor.T)
        normed = torch.nn.functional.rms_norm(hidden, (shape.hidden,), norms, EPS)
        torch.argmax(torch.mm(normed, self.weights.head.tensor.T), dim=-1)


def record(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Run ``step`` twice to compile and warm it, then record it."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        step()
        step()
        stream.synchronize()
        # Not torch.cuda.graph(): it collects garbage each time, which takes longer than what is measured.
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            step()
        finally:
            graph.capture_end()
    torch.cuda.synchronize()
    return graph


def time_graph(graph: torch.cuda.CUDAGraph, replays: int = 20, repeats: int = 5) -> float:
    """Milliseconds a replay: the median over ``repeats`` of back-to-back runs of ``replays``."""
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / replays)
    return statistics.median(times)


@triton.jit
def _read_kernel(p_ptr, out_ptr, chunks, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        total += tl.load(p_ptr + tl.cast(chunk, tl.int64) * BLOCK + at)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, axis=0))


def read_bandwidth(pool: torch.Tensor, limit_bytes: int = 4 << 30) -> float:
    """Bytes a second of a plain kernel that reads ``pool`` (at most ``limit_bytes``) once: the ceiling."""
    words = pool.view(torch.int32)[: limit_bytes // 4]
    block, best = 8192, 0.0
    out = torch.empty(4096, dtype=torch.int32, device=pool.device)
    for per_sm in (4, 8):
        programs = per_sm * torch.cuda.get_device_properties(pool.device).multi_processor_count

        def read(programs: int = programs) -> None:
            _read_kernel[(programs,)](words, out, words.numel() // block, BLOCK=block, num_warps=8)

        milliseconds = time_graph(record(read), replays=5)
        best = max(best, words.numel() // block * block * 4 / milliseconds * 1e3)
    return best
