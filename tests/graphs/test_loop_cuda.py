"""What only a GPU can show of a loop: streams, kernels of every kind in its body, errors of the device."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from loop_helpers import ENDLESS, WAIT, Counter, capture, value

from mainspring.graphs import CudaGraph, GraphError, GraphPool, Loop, LoopEnd, Mailbox

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_this_device_has_loops() -> None:
    assert Loop.available("cuda") is None


def test_work_behind_a_loop_on_its_stream_finds_it_done() -> None:
    counter = Counter("cuda", record=None)
    kept = torch.zeros(1, dtype=torch.int32, device="cuda")
    for steps in (1, 10, 100):
        counter.count.zero_()
        counter.loop.launch(steps)
        kept.copy_(counter.count)
        assert value(kept) == steps
    assert counter.loop.poll() == counter.loop.poll()
    assert counter.loop.join(WAIT) == LoopEnd(3, 100, "max_steps")


def test_launches_on_different_streams_run_one_after_another() -> None:
    mailbox = Mailbox("cuda", record_shape=(2, 1), depth=512)
    counter = Counter("cuda", mailbox)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                counter.loop.launch(20)
    counter.loop.join(WAIT)
    assert [int(record[0, 0]) for record in mailbox.read()] == list(range(1, 301))


def test_a_thread_that_never_used_cuda_can_launch_and_join() -> None:
    counter = Counter("cuda", record=None)
    torch.cuda.synchronize()
    ends: list[LoopEnd] = []

    def work() -> None:
        counter.loop.launch(12)
        ends.append(counter.loop.join(WAIT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ends == [LoopEnd(1, 12, "max_steps")]


def test_a_loop_is_not_launched_into_a_capture() -> None:
    counter = Counter("cuda", record=None)
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        x.add_(1)
        with pytest.raises(GraphError, match="being captured"):
            counter.loop.launch(1)
    counter.loop.launch(2)
    assert counter.loop.join(WAIT) == LoopEnd(1, 2, "max_steps")


def test_many_loops_share_a_pool_and_give_their_graphs_back() -> None:
    pool, mailbox = GraphPool("cuda"), Mailbox("cuda", record_shape=(2, 1))
    counters = [Counter("cuda", mailbox, tag=tag, pool=pool) for tag in range(35)]
    for counter in counters:
        counter.loop.launch(1)
        counter.loop.join(WAIT)
    assert [int(record[1, 0]) for record in mailbox.read()] == list(range(35))
    for counter in counters:
        counter.loop.release()
        counter.graph.release()
    torch.cuda.empty_cache()
    assert pool.nbytes == 0


@pytest.mark.parametrize("pdl", ["0", "1"])
def test_skinny_products_with_and_without_dependent_launch_leave_the_bits_of_replays(
    pdl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAINSPRING_PDL", pdl)
    gemv = pytest.importorskip("mainspring.kernels.triton.gemv_ops")
    common = pytest.importorskip("mainspring.kernels.triton.gemv_common")
    tables = pytest.importorskip("mainspring.kernels.triton.gemv_tables")
    tile = tables.choose_tile(1024, 1024, 1, torch.bfloat16, torch.device("cuda", torch.cuda.current_device()))
    torch.manual_seed(0)
    weights = [torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16) / 32 for _ in range(6)]
    x = torch.randn(1, 1024, device="cuda", dtype=torch.bfloat16)
    start, flag = x.clone(), torch.ones(1, dtype=torch.int32, device="cuda")

    def step() -> None:
        y = x
        for weight in weights:
            y = gemv.skinny_matmul(y, common.WeightOperand.dense(weight), tile)
        x.copy_(y)
        flag.copy_(x[0, :1].isfinite())

    graph = capture(step, "cuda")
    assert isinstance(graph, CudaGraph)
    x.copy_(start)
    for _ in range(20):
        graph.replay()
    expected = x.clone()
    looped = Loop(graph, flag=flag)
    x.copy_(start)
    looped.launch(20)
    assert looped.join(WAIT).iterations == 20
    assert torch.equal(x, expected)


def test_an_illegal_address_in_the_loop_is_an_error_that_names_the_launch() -> None:
    program = f"""
        import torch
        import triton, triton.language as tl
        from mainspring.graphs import CudaGraph, GraphError, Loop, LoopError

        @triton.jit
        def poke(where, value):
            address = tl.load(where)
            tl.store(address.to(tl.pointer_type(tl.int32)), value)

        room = torch.zeros(1, dtype=torch.int32, device="cuda")
        where = torch.full((1,), room.data_ptr(), dtype=torch.int64, device="cuda")
        flag = torch.ones(1, dtype=torch.int32, device="cuda")

        def step():
            poke[(1,)](where, 1)
            flag.fill_(1)

        loop = Loop(CudaGraph.capture(step), flag=flag, name="decode[8]")
        loop.launch(5)
        assert loop.join({WAIT}).reason == "max_steps"
        where.fill_(16)
        loop.launch({ENDLESS})
        try:
            loop.join({WAIT})
        except LoopError as error:
            assert error.fatal and error.launch == 2
            assert "launch 2 of 'decode[8]' failed" in str(error) and "illegal memory access" in str(error), error
        else:
            raise SystemExit("no error")
        for act in (lambda: loop.launch(1), loop.poll, lambda: loop.join({WAIT})):
            try:
                act()
            except GraphError as error:
                assert "launch 2 of 'decode[8]' failed" in str(error), error
            else:
                raise SystemExit("not refused")
        print("named", flush=True)
    """
    # triton.jit reads its function's source, so the program must be a file.
    done = run_file(program)
    assert "named" in done.stdout, done.stderr


def test_a_process_that_ends_while_a_loop_runs_ends_cleanly() -> None:
    program = f"""
        import torch
        from mainspring.graphs import CudaGraph, Loop
        flag = torch.ones(1, dtype=torch.int32, device="cuda")
        loop = Loop(CudaGraph.capture(lambda: flag.fill_(1)), flag=flag)
        loop.launch({ENDLESS})
        while loop.poll().iterations < 10: pass
        print("ended")
    """
    done = run_file(program)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


def test_a_fork_refuses_and_the_parent_goes_on() -> None:
    program = f"""
        import os, torch
        from mainspring.graphs import CudaGraph, GraphError, Loop
        flag = torch.ones(1, dtype=torch.int32, device="cuda")
        loop = Loop(CudaGraph.capture(lambda: flag.fill_(1)), flag=flag)
        loop.launch(3)
        loop.join({WAIT})
        child = os.fork()
        if child == 0:
            try:
                loop.launch(1)
            except GraphError as error:
                os._exit(7 if "spawn" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        loop.launch(3)
        print(loop.join({WAIT}).reason)
    """
    done = run_file(program)
    assert (done.returncode, done.stdout) == (0, "max_steps\n"), done.stderr


def run_file(program: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(textwrap.dedent(program))
        return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=240)
