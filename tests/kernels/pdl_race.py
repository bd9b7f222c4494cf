"""A race between a kernel and the one in front of it, which lets its dependents start and then idles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

DELAY = 10_000_000  # nanoseconds: far above the time a launch takes on the CPU


@triton.jit
def _late_copy_kernel(source_ptr, target_ptr, count, nanoseconds, BLOCK: tl.constexpr):
    """Let dependents start, wait, idle, then copy bytes."""
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    begin = tl.extra.cuda.globaltimer()
    now = begin
    while now - begin < nanoseconds:
        now = tl.extra.cuda.globaltimer()
    # A clock never runs backwards, but the compiler cannot know: the copy has to stay behind the loop.
    skew = tl.where(now < begin, 1, 0)
    for start in range(0, count, BLOCK):
        at = start + skew + tl.arange(0, BLOCK)
        tl.store(target_ptr + at, tl.load(source_ptr + at, mask=at < count), mask=at < count)


def late_copy(source: torch.Tensor, target: torch.Tensor, nanoseconds: int = DELAY) -> None:
    """Copy ``source`` to ``target``, both contiguous, after idling."""
    raw, to = source.view(-1).view(torch.uint8), target.view(-1).view(torch.uint8)
    _late_copy_kernel[(1,)](raw, to, raw.numel(), nanoseconds, BLOCK=1024, num_warps=4, launch_pdl=True)


@dataclass
class Case:
    """A kernel under test: ``run(wait, pdl)`` reads ``source`` and writes ``target``."""

    source: torch.Tensor
    target: torch.Tensor
    run: Callable[[bool, bool], object]


def other_values(x: torch.Tensor) -> torch.Tensor:
    """New contents for a tensor: normal numbers, or small integers above 0."""
    return torch.randn_like(x) if x.is_floating_point() else torch.randint_like(x, 1, 8)


@contextmanager
def placed(target: torch.Tensor) -> Iterator[None]:
    """Whoever asks for a new tensor of the target's shape and dtype gets the target."""
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like

    def fits(x: torch.Tensor) -> torch.Tensor:
        return target if x.shape == target.shape and x.dtype == target.dtype else x

    def placed_new(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return fits(new_empty(x, *args, **kwargs))

    def placed_like(*args: Any, **kwargs: Any) -> torch.Tensor:
        return fits(empty_like(*args, **kwargs))

    torch.Tensor.new_empty, torch.empty_like = placed_new, placed_like  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.new_empty, torch.empty_like = new_empty, empty_like  # type: ignore[method-assign]


def perform(work: Callable[[], None], recorded: bool) -> None:
    """Run ``work`` on a stream of its own, or record and replay it."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    if not recorded:
        with torch.cuda.stream(stream):
            work()
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
        graph.replay()
    torch.cuda.synchronize()


def compiled(case: Case) -> Case:
    """Compile everything, so that nothing stands between two launches."""
    for wait in (True, False):
        case.run(wait, True)
    case.run(True, False)
    late_copy(case.source, torch.empty_like(case.source), 0)
    late_copy(case.target, torch.empty_like(case.target), 0)
    return case


def check_reads(case: Case, recorded: bool) -> None:
    """The kernel must see what the one in front writes late; without its wait it must not."""
    case = compiled(case)
    old, new = case.source.clone(), other_values(case.source)
    case.source.copy_(new)
    case.target.zero_()
    case.run(True, False)
    wanted = case.target.clone()

    def answer(wait: bool) -> torch.Tensor:
        case.source.copy_(old)
        case.target.zero_()

        def work() -> None:
            late_copy(new, case.source)
            case.run(wait, True)

        perform(work, recorded)
        return case.target.clone()

    assert torch.equal(answer(wait=True), wanted)
    assert not torch.equal(answer(wait=False), wanted), "right without its wait: the test proves nothing"


def check_writes(case: Case, recorded: bool) -> None:
    """The kernel must not write what the one in front still reads; without its wait it must."""
    case = compiled(case)
    old = torch.full_like(case.target, 7)

    def seen(wait: bool) -> torch.Tensor:
        case.target.copy_(old)
        kept = torch.zeros_like(old)

        def work() -> None:
            late_copy(case.target, kept)
            case.run(wait, True)

        perform(work, recorded)
        return kept

    assert torch.equal(seen(wait=True), old), "overwrote what the kernel in front was still to read"
    assert not torch.equal(seen(wait=False), old), "right without its wait: the test proves nothing"


def check_done(case: Case) -> None:
    """A kernel two places behind relies on the one between: done must mean that all before it are done.

    On an H200 that holds even for a kernel that does not wait, so the wait is left out here: what waits for it still
    sees the work of the first.
    """
    case = compiled(case)
    new = torch.randn(256, device="cuda")
    buffer, kept = torch.zeros_like(new), torch.zeros_like(new)

    def work() -> None:
        late_copy(new, buffer)
        case.run(False, True)
        late_copy(buffer, kept, 0)

    perform(work, recorded=True)
    assert torch.equal(kept, new)
