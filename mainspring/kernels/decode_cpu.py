"""Decode attention on the CPU: the keys of all rows in pieces of one size, so that few operations serve any batch.

A row's keys are cut into pieces of :data:`PIECE` from its first one on. Every product has the shape of one piece and
one key head, so that its bits do not depend on how many rows there are or how long the others are. Pieces of one row
are joined by their log-sum-exp, as in Flash-Decoding (Dao et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mainspring.kernels.library import Prepared
from mainspring.kernels.rope import RopeAndCache

#: Keys of a piece.
PIECE = 64
#: Bytes of keys that are copied out of the cache at a time, as much as caches close to a core hold.
SLAB_BYTES = 2**20


@dataclass(frozen=True)
class Pieces:
    """Where the keys of a batch lie: one entry a piece, rows in order, pieces of a row in order.

    Attributes:
        slots: ``[pieces * kv_heads, PIECE]`` int64: where each key lies, ``slot * kv_heads + head``. Where a row has no
            more keys its last one stands, so that nothing is read that is not the row's own.
        bias: ``[pieces * kv_heads, 1, PIECE]``: 0, or -inf where a row has no more keys.
        rows: ``[pieces]`` int64, row of each piece; None where every row has exactly one piece.
        order: ``[pieces]`` int64, place of each piece among those of its row.
        most: pieces of the row with the most; 0 where no row has a key.
    """

    slots: Tensor
    bias: Tensor
    rows: Tensor | None
    order: Tensor
    most: int


def cut(tables: Tensor, seq_lens: Tensor, block_size: int, kv_heads: int, window: int) -> Pieces:
    """The pieces of rows with block tables ``[b, max_blocks]`` and lengths ``[b]``."""
    lengths: list[int] = seq_lens.tolist()
    rows, order, starts, ends = [], [], [], []
    for row, length in enumerate(lengths):
        first = max(0, length - window) if window > 0 else 0
        for place, start in enumerate(range(first, length, PIECE)):
            rows.append(row)
            order.append(place)
            starts.append(start)
            ends.append(length)
    at = torch.tensor([rows, starts, ends], dtype=torch.int64, device="cpu").unsqueeze(-1)
    positions = at[1] + torch.arange(PIECE, device="cpu")
    bias = torch.zeros(positions.shape, device="cpu").masked_fill_(positions >= at[2], -torch.inf)
    positions = torch.minimum(positions, at[2] - 1)
    blocks = tables[at[0], torch.div(positions, block_size, rounding_mode="floor")].to(torch.int64)
    slots = blocks * block_size + positions % block_size
    heads = torch.arange(kv_heads, device="cpu").view(1, kv_heads, 1)
    most = max(order, default=-1) + 1
    return Pieces(
        slots=(slots.unsqueeze(1) * kv_heads + heads).view(-1, PIECE),
        bias=bias.repeat_interleave(kv_heads, 0).view(-1, 1, PIECE),
        rows=None if rows == list(range(len(lengths))) else at[0, :, 0].contiguous(),
        order=torch.tensor(order, dtype=torch.int64, device="cpu"),
        most=most,
    )


class _LastCut:
    """The pieces of the last call, which serve all layers of a step: they are asked for with equal arguments."""

    def __init__(self) -> None:
        self._held: tuple[Tensor, Tensor, tuple[int, int, int], Pieces] | None = None

    def __call__(self, tables: Tensor, seq_lens: Tensor, block_size: int, kv_heads: int, window: int) -> Pieces:
        held, settings = self._held, (block_size, kv_heads, window)
        if held is not None and settings == held[2] and torch.equal(seq_lens, held[1]) and torch.equal(tables, held[0]):
            return held[3]
        pieces = cut(tables, seq_lens, block_size, kv_heads, window)
        self._held = (tables.clone(), seq_lens.clone(), settings, pieces)
        return pieces


_last_cut = _LastCut()


class DecodeAttention:
    """Decode attention over given caches, tables and lengths, for queries in fp32.

    Everything is computed in fp32. ``out`` ``[b, heads, head_dim]`` is where the result goes.
    """

    def __init__(
        self,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        scale: float,
        window: int,
        out: Tensor,
    ) -> None:
        block_size, kv_heads, head_dim = k_cache.shape[1:]
        self._tables, self._seq_lens = block_tables, seq_lens
        self._settings = (block_size, kv_heads, window)
        self._scale, self._out = scale, out
        self._keys, self._values = k_cache.view(-1, head_dim), v_cache.view(-1, head_dim)
        batch, heads = out.shape[:2]
        self._shape = (batch, kv_heads, heads // kv_heads, head_dim)
        self._by_matrix = out.view(-1, heads // kv_heads, head_dim)
        self._slab = max(1, SLAB_BYTES // (kv_heads * PIECE * head_dim * 4))

    def __call__(self, q: Tensor) -> None:
        """Attend with ``q`` ``[b, heads, head_dim]`` fp32."""
        pieces = _last_cut(self._tables, self._seq_lens, *self._settings)
        queries = q.reshape(self._by_matrix.shape)
        if pieces.rows is None and pieces.most == 1 and self._out.dtype == q.dtype and len(q) <= self._slab:
            self._attend(queries, pieces.slots, pieces.bias, self._by_matrix)
        elif pieces.most == 0:
            self._out.zero_()
        else:
            self._out.copy_(self._join(queries.view(self._shape), pieces).view(self._out.shape))

    def _attend(self, queries: Tensor, slots: Tensor, bias: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What queries ``[n, group, head_dim]`` see in the pieces that ``slots`` and ``bias`` name, and the scores."""
        k = self._gathered(self._keys, slots)
        v = self._gathered(self._values, slots)
        scores = torch.bmm(queries, k.mT)
        torch.add(bias, scores, alpha=self._scale, out=scores)
        return torch.bmm(torch.softmax(scores, -1), v, out=out), scores

    @staticmethod
    def _gathered(cache: Tensor, slots: Tensor) -> Tensor:
        taken = torch.embedding(cache, slots)
        return taken if taken.dtype == torch.float32 else taken.float()

    def _join(self, queries: Tensor, pieces: Pieces) -> Tensor:
        """What queries ``[b, kv_heads, group, head_dim]`` see: pieces weighed by their part of their row's sum."""
        _, kv_heads, group, head_dim = self._shape
        if pieces.rows is not None:
            queries = queries.index_select(0, pieces.rows)
        queries = queries.reshape(-1, group, head_dim)
        seen, sums = torch.empty_like(queries), queries.new_empty(queries.shape[:2])
        for at in range(0, len(queries), self._slab * kv_heads):
            here = slice(at, at + self._slab * kv_heads)
            _, scores = self._attend(queries[here], pieces.slots[here], pieces.bias[here], seen[here])
            torch.logsumexp(scores, -1, out=sums[here])
        seen, sums = seen.view(-1, kv_heads, group, head_dim), sums.view(-1, kv_heads, group, 1)
        rows = torch.arange(len(seen), device="cpu") if pieces.rows is None else pieces.rows
        places = rows * pieces.most + pieces.order
        whole = sums.new_full((self._shape[0] * pieces.most, *sums.shape[1:]), -torch.inf).index_copy_(0, places, sums)
        # Not torch.softmax, whose bits depend on how many rows and pieces there are: a maximum is exact in any order,
        # and index_add_ adds the pieces of a row one after the other.
        highest = whole.view(-1, pieces.most, *sums.shape[1:]).amax(1)
        parts = torch.exp(sums - highest.index_select(0, rows))
        total = parts.new_zeros((self._shape[0], *parts.shape[1:])).index_add_(0, rows, parts)
        weights = parts / total.index_select(0, rows)
        return seen.new_zeros(self._shape).index_add_(0, rows, seen.mul_(weights))


def prepare_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int = 0,
    out: Sequence[Tensor] | None = None,
) -> Prepared:
    """:func:`mainspring.kernels.attention.decode_attention` on the CPU."""
    (attended,) = out or (torch.empty(q.shape, dtype=q.dtype, device=q.device),)
    attend = DecodeAttention(k_cache, v_cache, block_tables, seq_lens, scale, window, attended)
    return lambda: attend(q.float()), (attended,)


def prepare_rope_and_decode_attention(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int = 0,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    settled: bool = False,
    out: Sequence[Tensor] | None = None,
) -> Prepared:
    """:func:`mainspring.kernels.attention.rope_and_decode_attention` on the CPU; queries stay in fp32 throughout."""
    rotate = RopeAndCache(qkv, cos_sin, positions, slots, k_cache, v_cache, q_weight, k_weight, eps)
    shape = (qkv.shape[0], rotate.num_heads, k_cache.shape[3])
    (attended,) = out or (torch.empty(shape, dtype=qkv.dtype, device=qkv.device),)
    attend = DecodeAttention(k_cache, v_cache, block_tables, seq_lens, scale, window, attended)
    return lambda: attend(rotate()), (attended,)
