"""Captures one run of a callable on a GPU, after a warm-up run or, where it can do without, before any."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from mainspring.graphs.capture import capture_error, watched_streams
from mainspring.graphs.cpu_program import tensors_in
from mainspring.graphs.errors import CaptureError
from mainspring.graphs.loading import NotLoaded, loading_raises
from mainspring.graphs.outside import OutsideObserver, OutsideTensor
from mainspring.graphs.pool import GraphPool

__all__ = ["Captured", "Discarded", "capture_run"]

logger = logging.getLogger(__name__)

_BROKEN: list[torch.cuda.CUDAGraph] = []
"""Captures that CUDA invalidated: the host allocator keeps pointing at them, so they are never freed."""


@dataclass(frozen=True, slots=True)
class Discarded:
    """A capture that was thrown away, and repeated after a warm-up run.

    Attributes:
        reason: what it lacked.
        invalidated: CUDA broke it, which costs the pool its memory.
    """

    reason: str
    invalidated: bool = False


@dataclass(frozen=True, slots=True)
class Captured:
    """One captured run.

    Attributes:
        graph: not instantiated yet.
        handle: torch's name for the memory pool in which it lies.
        outputs: what the callable returned.
        outside: memory that the run took from outside, by references that do not hold it.
        pool_bytes_added: bytes by which the allocator's reserve grew during the capture.
        runs: of the callable before the captured one.
        discarded: the capture that this one is instead of.
    """

    graph: torch.cuda.CUDAGraph
    handle: tuple[int, int]
    outputs: Any
    outside: tuple[OutsideTensor, ...]
    pool_bytes_added: int
    runs: int
    discarded: Discarded | None = None


def capture_run(fn: Callable[[], Any], pool: GraphPool, name: str, warmup: int) -> Captured:
    """Run `fn` `warmup` times on the current stream, then capture one more run there.

    Without a warm-up run the first run is captured. It is thrown away, and captured again after a warm-up run, where it
    needed a kernel that was not loaded, failed in any way, drew from a random generator, or left something behind in
    the pool that it did not return, as what makes a table when it is first needed does. Then it is also replayed once,
    so that what was left behind has its contents.

    Raises:
        CaptureError: see `CudaGraph.capture`.
    """
    discarded = None
    grown = 0
    if warmup == 0:
        before = _reserved()
        first = _first_run(fn, pool, name)
        if isinstance(first, Captured):
            return first
        discarded = first
        grown = max(_reserved() - before, 0)
        logger.debug("recording %s again, after a run: %s", name, discarded.reason)
    runs = max(1, warmup)
    outside = _warm_up(fn, runs, name)
    torch.cuda.synchronize()
    before = _reserved()
    graph, handle, outputs = _record(fn, pool, name)
    added = _reserved() - before + grown
    kept = tuple(tensor for tensor in outside if tensor.change() is None)
    return Captured(graph, handle, outputs, kept, added, runs, discarded)


def _reserved() -> int:
    """Bytes that torch's allocator has of the current device."""
    stats = torch.cuda.memory_stats_as_nested_dict()
    return int(stats["reserved_bytes"]["all"]["current"]) if stats else 0


def _first_run(fn: Callable[[], Any], pool: GraphPool, name: str) -> Captured | Discarded:
    """Capture a run of `fn` that no other preceded, or tell why there must be one."""
    before, handle = _reserved(), pool.handle
    held = pool.held(handle)
    cpu_state = torch.random.get_rng_state()
    observer = OutsideObserver()

    def observed() -> Any:
        with observer:
            return fn()

    with loading_raises() as is_told:
        if not is_told:
            return Discarded("this version of Triton does not tell when it loads a kernel")
        made = _record_or_discard(observed, pool, name)
    if isinstance(made, Discarded):
        if made.invalidated and pool.held(handle) - held:
            raise CaptureError(
                f"recording {name!r} failed: CUDA broke the capture of a first run ({made.reason}), and what that run "
                "made and kept was never computed; record with a warm-up run (warmup=1)"
            )
        return made
    graph, _, outputs = made
    returned = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(outputs)}
    reason = ""
    if observer.draws or not torch.equal(cpu_state, torch.random.get_rng_state()):
        reason = f"{observer.draws or 'something'} may draw from a random generator"
    elif pool.held(handle) - held - returned:
        reason = "it made something that it did not return and that somebody holds"
    if not reason:
        return Captured(graph, handle, outputs, tuple(observer.found()), _reserved() - before, 0)
    _replay_once(graph)
    graph.reset()
    pool.retire_if_empty(handle)
    return Discarded(reason)


def _record_or_discard(
    fn: Callable[[], Any], pool: GraphPool, name: str
) -> tuple[torch.cuda.CUDAGraph, tuple[int, int], Any] | Discarded:
    """Capture one run of `fn`; what goes wrong is told, and its frames, which hold what the run made, are gone."""
    handle = pool.handle
    try:
        return _record(fn, pool, name, replay_broken=True)
    except NotLoaded as missing:
        return Discarded(str(missing))
    except CaptureError as error:
        return Discarded(str(error), invalidated=handle in pool.abandoned)


def _replay_once(graph: torch.cuda.CUDAGraph) -> None:
    """Run what was captured, and wait for it."""
    graph.instantiate()
    graph.replay()
    torch.cuda.synchronize()


def _warm_up(fn: Callable[[], Any], runs: int, name: str) -> list[OutsideTensor]:
    """Run `fn` outside of a capture, see that it leaves the random generators alone, and tell what it uses."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    offset, cpu_state = generator.get_offset(), torch.random.get_rng_state()
    try:
        for _ in range(runs - 1):
            fn()
        with OutsideObserver() as observer:
            fn()
    except Exception as error:
        raise capture_error(name, error) from error
    if generator.get_offset() != offset or not torch.equal(cpu_state, torch.random.get_rng_state()):
        raise CaptureError(
            f"recording {name!r} failed: it draws from the random generator, whose state would not be "
            f"part of the recording. Compute random numbers from a seed and a counter that are tensors"
        )
    found: list[OutsideTensor] = observer.found()
    return found


@contextmanager
def _synchronizing_calls_raise() -> Iterator[None]:
    """Let torch raise where a call would synchronize, before CUDA sees it and invalidates the capture."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _record(
    fn: Callable[[], Any], pool: GraphPool, name: str, *, replay_broken: bool = False
) -> tuple[torch.cuda.CUDAGraph, tuple[int, int], Any]:
    """Capture one run of `fn` on the current stream.

    Args:
        fn: what is run.
        pool: whose memory to use.
        name: for error messages.
        replay_broken: where `fn` raises, replay what it did until then once.
    """
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    handle = pool.handle
    graph.capture_begin(
        pool=handle,  # type: ignore[arg-type]
        capture_error_mode="thread_local",
    )
    streams: dict[int, str] = {}
    try:
        with _synchronizing_calls_raise(), watched_streams(pool.stream) as streams:
            outputs = fn()
    except BaseException as error:
        _end_broken(graph, pool, handle, replay=replay_broken)
        if isinstance(error, Exception):
            raise capture_error(name, error) from error
        raise
    try:
        graph.capture_end()
    except RuntimeError as error:
        _end_broken(graph, pool, handle)
        raise capture_error(name, error, ", and ".join(streams.values()) or None) from error
    return graph, handle, outputs


def _end_broken(graph: torch.cuda.CUDAGraph, pool: GraphPool, handle: tuple[int, int], *, replay: bool = False) -> None:
    """End a capture that failed, so that the stream and the allocator are free for the next one; with `replay` run what
    was captured of it, if CUDA did not break it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it may well be empty
            graph.capture_end()
    except RuntimeError:
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), handle)
        pool.abandon_handle()
        _BROKEN.append(graph)
    else:
        if replay:
            _replay_once(graph)
    with suppress(RuntimeError):
        graph.reset()
    pool.retire_if_empty(handle)
