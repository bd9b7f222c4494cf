"""Record any torch module for a ladder of batch sizes, and replay it for batches of every size.

    python examples/any_module.py

On a machine with a GPU these are CUDA graphs; without one, recordings of torch's operations with the same contract.
"""

import torch

from mainspring.graphs import GraphRunner, Input, Ladder

device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 10)).to(device).eval()

runner = GraphRunner(
    lambda x: model(x),
    inputs={"x": Input((64,), torch.float32)},
    ladder=Ladder([1, 2, 4, 8]),
    device=device,
)
runner.capture()

for rows in (1, 3, 8, 13):
    x = torch.randn(rows, 64, device=device)
    with torch.no_grad():
        difference = (runner(x=x) - model(x)).abs().max().item()
    print(f"{rows:2d} rows: largest difference from the module itself {difference:.1e}")

counters = runner.counters
print("replays per rung:", dict(sorted(counters.replays.items())), "padded rows:", counters.padded_rows)
for size, report in sorted(counters.captures.items()):
    print(f"rung {size}: {report.operations} operations, recorded in {1e3 * report.seconds:.1f} ms")
