"""From what was asked for to a setting that can be measured: the model found, the bandwidth known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mainspring.bench.bandwidth import read_bandwidth
from mainspring.bench.latency import Setting
from mainspring.bench.shapes import open_model
from mainspring.bench.workload import Workload
from mainspring.engine.limits import choose_device
from mainspring.models.loader import load_config, resolve_dtype
from mainspring.models.source import resolve


@contextmanager
def open_setting(
    name: str, dtype: str, device: str | None, workload: Workload, *, measure_bandwidth: bool = True
) -> Iterator[Setting]:
    """Find the model, check the workload against it, and measure the read bandwidth.

    Without ``measure_bandwidth`` it is taken as infinite: no floors then.
    """
    with open_model(name) as model:
        where = choose_device(device)
        config = load_config(resolve(model.path, weights=model.load_format != "dummy"))
        workload.max_model_len(config)
        yield Setting(
            model=model,
            config=config,
            dtype=resolve_dtype(dtype, config, where),
            device=where,
            workload=workload,
            bandwidth=read_bandwidth(where) if measure_bandwidth else float("inf"),
        )
