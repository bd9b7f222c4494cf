"""How one skinny product is cut up: the tile, and the launch that follows from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from mainspring.kernels.triton.gemv_common import Epilogue, Prologue, WeightKind

KERNELS = ("vector", "dot", "mma", "ring", "library")


@dataclass(frozen=True)
class Tile:
    """The tunable part of a skinny product.

    Args:
        kernel: ``vector`` (multiply-add, up to 8 rows), ``dot`` (``tl.dot``, up to 64 rows), ``mma``
            (Gluon, weights in registers), ``ring`` (Gluon, weights in shared memory) or ``library``
            (``torch``).
        block_n: rows of W a tile holds, a power of two.
        block_k: elements of K a chunk holds, a power of two.
        warps: warps of a program.
        prefetch: chunks fetched before the wait, and kept in flight after it.
        per_sm: programs for each multiprocessor, each taking several tiles; 0 is one program a tile.
        inner: ``vector``: add up each thread's 8 products first, for an accumulator an eighth as large.
            ``mma``: with one row, spread x over the program's threads and pass it through shared memory.
        evict: L2 eviction policy of the weight loads, "" or "evict_first".
        split_k: ``dot`` and ``mma``: slices of a chunk's K that are summed at the end, one for each group
            of warps.
        stages: ``dot``: depth of the software pipeline behind the prefetch. ``ring``: chunks under way at a
            time.
    """

    kernel: str = "vector"
    block_n: int = 8
    block_k: int = 512
    warps: int = 4
    prefetch: int = 2
    per_sm: int = 0
    inner: bool = True
    evict: str = "evict_first"
    split_k: int = 1
    stages: int = 3

    def __post_init__(self) -> None:
        """Check the values that a table read from disk may have wrong."""
        if self.kernel not in KERNELS:
            raise ValueError(f"kernel {self.kernel!r} is not one of {', '.join(KERNELS)}")
        for name in ("block_n", "block_k", "warps", "split_k"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}")
        if self.prefetch < 1 or self.per_sm < 0 or self.stages < 1:
            raise ValueError(f"prefetch and stages must be at least 1 and per_sm at least 0, got {self}")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Tile:
        """Read back what ``to_dict`` gave; an unknown key is an error."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown tile settings {unknown}; known are {sorted(known)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """All settings, for JSON."""
        return asdict(self)

    def short(self) -> str:
        """A name for tables, such as ``vector n8 k512 w4 p2``."""
        if self.kernel == "library":
            return "torch.mm"
        text = f"{self.kernel} n{self.block_n} k{self.block_k} w{self.warps} p{self.prefetch}"
        text += f" x{self.per_sm}" if self.per_sm else ""
        text += f" s{self.split_k}" if self.split_k > 1 else ""
        text += f" st{self.stages}" if self.kernel in ("dot", "ring") else ""
        text += "" if self.inner or self.kernel in ("dot", "ring") else " flat"
        return text + (" keep" if not self.evict else "")


@dataclass(frozen=True)
class LaunchPlan:
    """One launch: sizes, what is fused, the tile and whether it depends programmatically."""

    rows: int
    n: int
    k: int
    kind: WeightKind
    prologue: Prologue
    epilogue: Epilogue
    has_bias: bool
    has_residual: bool
    tile: Tile
    multiprocessors: int
    pdl: bool
    wait: bool = True
    """False removes the wait: only for the test that shows it is needed."""
    compile_only: bool = False

    @property
    def tiles(self) -> int:
        """Tiles that cover N."""
        return -(-self.n // self.tile.block_n)

    @property
    def programs(self) -> int:
        """Programs launched."""
        if self.tile.per_sm == 0:
            return self.tiles
        return min(self.tiles, self.tile.per_sm * self.multiprocessors)

    @property
    def constants(self) -> dict[str, Any]:
        """The compile-time arguments that all kernels share."""
        return {
            "M": self.rows,
            "N": self.n,
            "K": self.k,
            "KIND": int(self.kind),
            "BLOCK_N": self.tile.block_n,
            "BLOCK_K": self.tile.block_k,
            "PROLOGUE": int(self.prologue),
            "EPILOGUE": int(self.epilogue),
            "HAS_BIAS": self.has_bias,
            "HAS_RESIDUAL": self.has_residual,
            "EVICT": self.tile.evict,
            "PDL": self.pdl,
            "WAIT": self.wait,
        }
