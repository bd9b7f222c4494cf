"""Let the device repeat a solver until it has converged, with one launch.

    python examples/solver_loop.py

Jacobi's method for a system of linear equations. Each iteration leaves its number and its residual in a mailbox, which
the CPU reads while the loop runs. On a machine with a GPU the loop is one CUDA graph; without one, a thread.
"""

import time

import torch

from mainspring.graphs import CpuGraph, CudaGraph, Loop, Mailbox

device = "cuda" if torch.cuda.is_available() and Loop.available("cuda") is None else "cpu"
torch.manual_seed(0)
size = 200
matrix = torch.rand(size, size, dtype=torch.float64) + 0.7 * size * torch.eye(size, dtype=torch.float64)
matrix = matrix.to(device)
right = torch.rand(size, dtype=torch.float64).to(device)

x = torch.zeros(size, dtype=torch.float64, device=device)
step = torch.zeros(1, dtype=torch.int32, device=device)
flag = torch.ones(1, dtype=torch.int32, device=device)
record = torch.zeros(2, dtype=torch.int32, device=device)
diagonal = matrix.diagonal().clone()


def sweep() -> None:
    """One iteration: a better x, how good it is, and whether to go on."""
    residual = right - matrix @ x
    x.add_(residual / diagonal)
    worst = residual.abs().max().reshape(1)
    step.add_(1)
    record[:1].copy_(step)
    record[1:].copy_(worst.float().view(torch.int32))  # a float's bits travel as an int32
    flag.copy_(worst > 1e-10)


kind = CudaGraph if device == "cuda" else CpuGraph
mailbox = Mailbox(device, record_shape=(2,), depth=16)
loop = Loop(kind.capture(sweep), flag=flag, mailbox=mailbox, record=record, name="jacobi")
x.zero_()  # recording ran the sweep
step.zero_()

end, launches, seen = None, 0, 0
while end is None or end.reason == "ring_full":  # the reader fell behind: go on from there
    loop.launch(max_steps=10_000)
    launches += 1
    running = True
    while running:
        running = loop.poll().running  # before the records, so that those of the last iteration are not missed
        for number, bits in mailbox.read():
            seen += 1
            if number % 20 == 1:
                print(f"iteration {number:3d}: largest residual {bits.view('float32'):.1e}")
        time.sleep(1e-4)
    end = loop.join()

print(f"{device}: ended by the {end.reason} after {seen} iterations")
print(f"largest error {(matrix @ x - right).abs().max().item():.1e}")
