"""Record a transformer block with a dynamic batch; compare it with eager bit for bit, read and audit what was recorded.

    python examples/transformer_block.py

The module is torch's own encoder layer; any other is recorded the same way. On a machine with a GPU these are CUDA
graphs; without one, recordings of torch's operations with the same contract.
"""

import torch

from mainspring.graphs import FixedBuffers, GraphRunner, Input, Ladder

TOKENS, WIDTH = 16, 64
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
block = torch.nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=128, dropout=0.0, batch_first=True)
block = block.to(device).eval()

# Names for the weights: whatever moves later is then told by its name.
buffers = FixedBuffers(device)
for name, weight in block.named_parameters():
    buffers.adopt(name, weight)

runner = GraphRunner(
    lambda x, scale: block(x) * scale[:, None, None],
    inputs={"x": Input((TOKENS, WIDTH), torch.float32), "scale": Input((), torch.float32, pad=1.0)},
    ladder=Ladder.default(12),
    device=device,
    buffers=buffers,
    verify=True,  # each rung replays random inputs beside an eager run as soon as it is recorded
)
runner.capture()
print("verified rungs:", runner.counters.verified)

with torch.no_grad():
    for rows in (1, 3, 7, 12, 30):
        x, scale = torch.randn(rows, TOKENS, WIDTH, device=device), torch.rand(rows, device=device)
        difference = (runner(x=x, scale=scale) - block(x) * scale[:, None, None]).abs().max().item()
        print(f"{rows:2d} rows: largest difference from the module itself {difference:.1e}")

if runner.can_be_read:
    rung = runner.recording().rung(12)
    print(f"rung 12 has {len(rung.operations)} operations at {len(rung.addresses)} addresses:")
    for operation in rung.operations[:4]:
        used = ", ".join(use.owner for use in operation.uses)
        print(f"  {operation.index} {operation.name}: {used}")
    print("audit:", runner.audit())
