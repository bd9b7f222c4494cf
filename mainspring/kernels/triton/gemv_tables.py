"""Which tile to use: from a table measured on this kind of GPU, or else by rule.

``benchmarks/sweep_gemv.py --save`` writes the tables, one file a kind of GPU, into
``mainspring/kernels/tables``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mainspring.kernels.triton.gemv_common import WeightKind, interpreting
from mainspring.kernels.triton.gemv_plan import Tile

TABLES = Path(__file__).resolve().parent.parent / "tables"


@dataclass(frozen=True)
class Entry:
    """What was fastest for one product: ``rows`` of x times a [n, k] weight."""

    n: int
    k: int
    rows: int
    dtype: str
    kind: str
    tile: Tile

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Entry:
        """Read one entry of a table file; keys it does not know are remarks."""
        names = ("n", "k", "rows", "dtype", "kind")
        return cls(**{name: values[name] for name in names}, tile=Tile.from_dict(values["tile"]))


def table_path(device_name: str, folder: Path = TABLES) -> Path:
    """The file for a GPU, such as ``gemv-nvidia-h200.json``."""
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return folder / f"gemv-{slug}.json"


def read_table(path: Path) -> tuple[Entry, ...]:
    """Entries of a table file; none where there is no such file.

    Raises:
        ValueError: naming the file, when it cannot be understood.
    """
    if not path.exists():
        return ()
    try:
        return tuple(Entry.from_dict(values) for values in json.loads(path.read_text())["entries"])
    except (KeyError, TypeError, ValueError) as problem:
        raise ValueError(f"{path} is no table of tiles ({problem!r}); delete it or measure it again") from problem


def write_table(path: Path, remarks: dict[str, Any], entries: Iterable[dict[str, Any]]) -> int:
    """Merge ``entries`` (as ``Entry.from_dict`` reads them) into a table file; returns how many it holds now.

    An entry replaces the one for the same product, rows, dtype and kind.
    """
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    old = json.loads(path.read_text())["entries"] if path.exists() else []
    for values in [*old, *entries]:
        entry = Entry.from_dict(values)
        kept[(entry.kind, entry.dtype, entry.n, entry.k, entry.rows)] = values
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("  " + json.dumps(kept[key]) for key in sorted(kept))
    path.write_text(json.dumps(remarks)[:-1] + ', "entries": [\n' + lines + "\n]}\n")
    return len(kept)


@cache
def _device_table(device_name: str) -> tuple[Entry, ...]:
    return read_table(table_path(device_name))


def default_tile(n: int, k: int, rows: int, dtype: torch.dtype, *, matrix_units: bool) -> Tile:
    """A tile by rule, for a product that no table knows: what won for its nearest neighbours on an H200.

    Args:
        n: rows of the weight.
        k: columns of the weight.
        rows: rows of x.
        dtype: of x.
        matrix_units: whether the ``mma`` kernel runs (NVIDIA GPUs from compute capability 8.0).
    """
    if dtype not in (torch.bfloat16, torch.float16):
        # Exact fp32 needs the vector units, which the library uses as well from a few rows on.
        return Tile("vector", 4, _power_below(k, 1024), 4, 2) if rows == 1 else Tile("library")
    if matrix_units and rows == 1 and n > 2048:
        return Tile("vector", 4, _power_below(k, 512), 1, 1) if k <= 1024 else Tile("vector", 4, 1024, 4, 2)
    if matrix_units and rows <= 16:
        if n >= 8192:
            return Tile("mma", 32, 256, 4, 1, split_k=4, inner=False)
        if rows > 1 and k >= 4096 and 2048 < n <= 4224:
            # One round of programs of 16 warps on an H200's 132 multiprocessors.
            return Tile("mma", 32, 512, 16, 2, split_k=16, inner=False)
        warps = 8 if k >= 2048 else 4
        block_n = 8 if rows <= 4 or n <= 2048 else 16
        return Tile("mma", block_n, 128 * warps, warps, 3 * 8 // block_n, split_k=warps, inner=rows == 1)
    if rows <= 8:
        return Tile("vector", 4, _power_below(k, 1024), 4, 2)
    return Tile("library")


def _power_below(k: int, limit: int) -> int:
    """The greatest power of two up to ``k``, between 32 and ``limit``."""
    return min(limit, max(32, 1 << (k.bit_length() - 1)))


def choose_tile(
    n: int,
    k: int,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    kind: WeightKind = WeightKind.DENSE,
    table: tuple[Entry, ...] | None = None,
) -> Tile:
    """The measured tile for a product, or the one by rule where none was measured.

    Of the measured numbers of rows the least that is not below ``rows`` counts. ``table`` is this device's
    when None.
    """
    on_gpu = device.type == "cuda" and not interpreting()
    if table is None:
        table = _device_table(torch.cuda.get_device_name(device)) if on_gpu else ()
    name = str(dtype).removeprefix("torch.")
    fitting = [
        entry
        for entry in table
        if (entry.n, entry.k, entry.dtype, entry.kind) == (n, k, name, kind.name) and entry.rows >= rows
    ]
    if fitting:
        return min(fitting, key=lambda entry: entry.rows).tile
    return default_tile(n, k, rows, dtype, matrix_units=on_gpu and torch.cuda.get_device_capability(device) >= (8, 0))
