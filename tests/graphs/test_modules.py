"""Ordinary torch modules give the same bits replayed as eager, on every rung and for any number of rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mainspring.graphs import GraphRunner, Input, Ladder


class Block(nn.Module):
    """A transformer block over [batch, tokens, width]."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.norm2(x))


def attention_by_hand(x: Tensor) -> Tensor:
    scores = x @ x.transpose(-1, -2) / 5
    causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return scores.masked_fill(~causal, float("-inf")).softmax(-1) @ x


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)  # torch runs it as one fused operation


MODULES: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(32, 100), nn.GELU(), nn.Linear(100, 7)),
    "blocks": lambda: nn.Sequential(Block(), Block()),
    "attention by hand": lambda: attention_by_hand,
    "fused encoder layer": encoder_layer,
    "convolution": lambda: nn.Sequential(nn.Conv1d(6, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten()),
}
LADDER = Ladder.default(20)
ROW = (6, 32)


def runners(what: str, dtype: torch.dtype) -> tuple[GraphRunner, GraphRunner]:
    torch.manual_seed(0)
    fn = MODULES[what]()
    if isinstance(fn, nn.Module):
        fn = fn.to(dtype).eval()
    pair = [
        GraphRunner(
            lambda x: fn(x),
            inputs={"x": Input(ROW, dtype)},
            ladder=LADDER,
            device="cpu",
            enforce_eager=eager,
        )
        for eager in (False, True)
    ]
    pair[0].capture()
    return pair[0], pair[1]


@pytest.mark.parametrize("what", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_rung_replays_the_bits_of_eager(what: str, dtype: torch.dtype) -> None:
    graph, eager = runners(what, dtype)
    generator = torch.Generator().manual_seed(1)
    for rung in LADDER:
        for rows in {rung, max(1, rung - 1)}:
            x = torch.randn(rows, *ROW, generator=generator).to(dtype)
            assert torch.equal(graph(x=x), eager(x=x))
    assert set(graph.counters.replays) == set(LADDER)
    assert graph.counters.steps == eager.counters.eager_steps["enforce_eager"]


def test_torchs_own_fused_layer_is_recorded_as_what_eager_runs() -> None:
    graph, _ = runners("fused encoder layer", torch.float32)
    names = [operation.name for operation in graph.graphs[8].operations]
    assert "aten::_transformer_encoder_layer_fwd" in names


def test_random_batches_in_any_order_replay_the_bits_of_eager() -> None:
    graph, eager = runners("blocks", torch.float32)

    @given(st.lists(st.integers(1, 45), min_size=1, max_size=5), st.integers(0, 2**31))
    @settings(deadline=None, max_examples=30)
    def holds(batches: list[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for rows in batches:
            x = torch.randn(rows, *ROW, generator=generator)
            assert torch.equal(graph(x=x), eager(x=x))

    holds()


def test_a_replay_equals_the_module_itself_on_a_full_rung() -> None:
    torch.manual_seed(0)
    module = Block().eval()
    runner = GraphRunner(lambda x: module(x), inputs={"x": Input(ROW, torch.float32)}, ladder=LADDER, device="cpu")
    x = torch.randn(8, *ROW)
    with torch.no_grad():
        assert torch.equal(runner(x=x), module(x))
