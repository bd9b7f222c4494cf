"""Tiles come from the measured table where it has them, and from the rule where it has not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from mainspring.kernels.triton.gemv_plan import Tile  # noqa: E402
from mainspring.kernels.triton.gemv_tables import (  # noqa: E402
    TABLES,
    Entry,
    choose_tile,
    default_tile,
    read_table,
    table_path,
    write_table,
)

CPU = torch.device("cpu")


def entry(rows: int, tile: Tile, n: int = 64) -> dict[str, object]:
    return {"n": n, "k": 32, "rows": rows, "dtype": "bfloat16", "kind": "DENSE", "tile": tile.to_dict()}


def test_written_table_reads_back_and_later_entries_replace(tmp_path: Path) -> None:
    path = table_path("NVIDIA H200", tmp_path)
    assert path.name == "gemv-nvidia-h200.json"
    first, second, third = Tile(block_n=2), Tile(block_n=4), Tile("dot", 16)
    assert write_table(path, {"device": "x"}, [entry(1, first), entry(4, second)]) == 2
    assert write_table(path, {"device": "x"}, [entry(1, third)]) == 2
    assert [(e.rows, e.tile) for e in read_table(path)] == [(1, third), (4, second)]


def test_least_measured_rows_that_suffice_are_chosen() -> None:
    table = tuple(Entry.from_dict(entry(rows, Tile(block_n=rows))) for rows in (1, 4, 16))
    for rows, wanted in ((1, 1), (2, 4), (4, 4), (5, 16), (16, 16)):
        assert choose_tile(64, 32, rows, torch.bfloat16, CPU, table=table) == Tile(block_n=wanted)
    assert choose_tile(64, 32, 17, torch.bfloat16, CPU, table=table) == Tile("library")
    assert choose_tile(65, 32, 1, torch.bfloat16, CPU, table=table) == default_tile(
        65, 32, 1, torch.bfloat16, matrix_units=False
    )


@pytest.mark.parametrize("k", [32, 576, 1024, 1536, 14336])
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16, 17, 64, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("matrix_units", [False, True])
def test_rule_gives_a_tile_whose_kernel_takes_it(k: int, rows: int, dtype: torch.dtype, matrix_units: bool) -> None:
    tile = default_tile(256, k, rows, dtype, matrix_units=matrix_units)
    limits = {"vector": 8, "mma": 16, "dot": 64, "library": 1 << 30}
    assert rows <= limits[tile.kernel]
    if tile.kernel == "mma":
        assert dtype != torch.float32
        assert tile.block_k >= 32 * tile.warps


def test_broken_table_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "gemv-x.json"
    path.write_text('{"entries": [{"n": 1}]}')
    with pytest.raises(ValueError, match=r"gemv-x\.json"):
        read_table(path)
    assert read_table(tmp_path / "none.json") == ()


def test_tables_that_come_with_the_project_can_be_read() -> None:
    for path in TABLES.glob("gemv-*.json"):
        assert read_table(path)
