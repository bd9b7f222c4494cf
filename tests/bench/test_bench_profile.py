"""One step's kernels, told apart and set beside their floors; the read kernel; checkpoints."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mainspring.bench.bandwidth import read_bandwidth
from mainspring.bench.checkpoint import write_checkpoint
from mainspring.bench.floor import weight_bytes
from mainspring.bench.latency import Setting
from mainspring.bench.profile import KernelEvent, breakdown, median_step
from mainspring.bench.report import short_name
from mainspring.bench.shapes import open_model
from mainspring.bench.workload import Workload
from mainspring.engine.errors import EngineError
from mainspring.models.loader import load_config, load_model
from mainspring.models.source import resolve

LAYER = (
    "_rms_norm_kernel",
    "_gemv_kernel",
    "_decode_kernel",
    "_combine_kernel",
    "_gemv_kernel",
    "nvjet_tst",
    "_mma_kernel",
)


def setting_of(folder: Path) -> Setting:
    workload = Workload((2,), input_len=10, output_len=4)
    with open_model(str(folder)) as model:
        config = load_config(resolve(folder))
    return Setting(model, config, torch.bfloat16, torch.device("cpu"), workload, bandwidth=1e6)


def step_of(*names: str) -> list[KernelEvent]:
    return [KernelEvent(name, float(number)) for number, name in enumerate(names, start=1)]


def test_products_are_told_by_their_order_and_have_the_floor_of_their_weights(tiny_folder: Path) -> None:
    setting = setting_of(tiny_folder)
    events = step_of(*LAYER * 2, "_gemv_kernel", "_reduce_argmax_kernel")
    rows = {(row.name, row.part): row for row in breakdown(events, setting, batch=2)}
    config = setting.config
    assert rows["_gemv_kernel", "qkv"].count == 2
    assert rows["_gemv_kernel", "qkv"].total_us == 2 + 9
    assert rows["_gemv_kernel", "qkv"].floor_us == 2 * 2 * (config.q_size + 2 * config.kv_size) * config.hidden_size
    assert (
        rows["_gemv_kernel", "o"].count == rows["nvjet_tst", "gate_up"].count == rows["_mma_kernel", "down"].count == 2
    )
    assert rows["_gemv_kernel", "head"].floor_us == 2 * config.vocab_size * config.hidden_size
    assert rows["_decode_kernel", "attention"].floor_us == 2 * 2 * 2 * config.kv_size * 12 * 2
    for helper in ("_combine_kernel", "_reduce_argmax_kernel", "_rms_norm_kernel"):
        assert rows[helper, ""].floor_us is None and rows[helper, ""].ratio is None
    assert sum(row.share for row in rows.values()) == pytest.approx(1)
    norms = config.hidden_size * (1 + 2 * config.num_layers) + 2 * config.head_dim * config.num_layers
    products = sum(row.floor_us or 0 for (_, part), row in rows.items() if part not in ("", "attention"))
    assert products == weight_bytes(config, 2) - 2 * norms


def test_where_products_cannot_be_told_apart_no_floor_is_claimed(tiny_folder: Path) -> None:
    rows = breakdown(step_of(*LAYER, "_gemv_kernel"), setting_of(tiny_folder), batch=2)
    assert {row.part for row in rows} == {""}


def test_median_step_takes_each_kernels_median() -> None:
    times = [3.0, 10.0, 1.0, 30.0, 2.0, 20.0]
    events = [KernelEvent("ab"[place % 2], time) for place, time in enumerate(times)]
    assert median_step(events, steps=3) == [KernelEvent("a", 2.0), KernelEvent("b", 20.0)]


@pytest.mark.parametrize("names", ["", "aba", "abba"])
def test_replays_that_differ_are_an_error(names: str) -> None:
    with pytest.raises(EngineError, match="which are not 2 equal steps"):
        median_step([KernelEvent(name, 1.0) for name in names], steps=2)


def test_long_kernel_names_are_shortened() -> None:
    name = "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<F>(int)::{lambda()#1}>(int, F)"
    assert short_name(name) == "at::native::elementwise_kernel"
    assert short_name("_gemv_kernel") == "_gemv_kernel"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_read_kernel_reads_every_element_once() -> None:
    code = """
import torch
from mainspring.bench.read_kernel import sum_by_program
for blocks, programs in ((1, 3), (37, 5), (40, 5)):
    # No sum leaves 32 bits: a GPU's wraps around, that of Triton's interpreter is an error before 3.9.
    source = torch.randint(-2**19, 2**19, (64 * blocks,), dtype=torch.int32)
    sums = torch.full((programs,), 77, dtype=torch.int32)
    sum_by_program(source, sums, 64, 4)
    assert int(sums.sum(dtype=torch.int64)) == int(source.sum(dtype=torch.int64)), (blocks, programs)
try:
    sum_by_program(source[1:], sums, 64, 4)
except ValueError:
    print("fine")
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "fine\n", done.stderr


def test_bandwidth_of_a_cpu_is_a_rate() -> None:
    assert 0 < read_bandwidth(torch.device("cpu"), 1 << 20) < float("inf")


@pytest.mark.gpu
def test_bandwidth_of_a_gpu_is_checked_against_the_sum() -> None:
    assert 1e11 < read_bandwidth(torch.device("cuda"), 256 << 20) < 1e14


def test_a_written_checkpoint_loads_as_the_model(tiny_folder: Path, tmp_path: Path) -> None:
    config = load_config(resolve(tiny_folder))
    target = tmp_path / "written"
    nbytes = write_checkpoint(config, tiny_folder / "config.json", target, torch.bfloat16)
    assert nbytes == weight_bytes(config, 2)
    model = load_model(resolve(target), dtype="bfloat16")
    assert load_config(resolve(target)) == config
    assert all(bool(parameter.isfinite().all()) and parameter.float().std() > 0 for parameter in model.parameters())
    with open_model(str(target)) as found:
        assert found.load_format == "auto"
