"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), in the half-split form of Llama."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mainspring.kernels.kv_cache import check_slots, flat_cache, store
from mainspring.kernels.library import Prepared, register
from mainspring.kernels.norm import Normalisation


def rope_table(inv_freq: Tensor, max_positions: int, attention_scaling: float = 1.0) -> Tensor:
    """Tabulate the rotation of every position.

    Args:
        inv_freq: ``[head_dim / 2]``, radians per position.
        max_positions: how many positions, from 0.
        attention_scaling: factor on cosine and sine (yarn and longrope use one).

    Returns:
        ``[max_positions, head_dim]`` fp32 on the device of ``inv_freq``: the cosines in the first half of a
        row, the sines in the second.
    """
    positions = torch.arange(max_positions, dtype=torch.float32, device=inv_freq.device)
    angles = torch.outer(positions, inv_freq.float())
    return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(attention_scaling)


class Rotation:
    """The rotation of given ``positions``, ready to be applied to anything ``[tokens, heads, head_dim]``."""

    def __init__(self, cos_sin: Tensor, positions: Tensor) -> None:
        self._table, self._positions = cos_sin, positions
        tokens, half = positions.shape[0], cos_sin.shape[1] // 2
        self._shape, self._stride, self._half = (tokens, 1, 1, half), (2 * half, half, half, 1), half
        self._signs = torch.tensor([[-1.0], [1.0]], device=cos_sin.device)

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of ``x``: both halves ``[tokens, heads, 2, head_dim / 2]``, the second, the first."""
        both = x.unflatten(-1, (2, self._half))
        return both, both[:, :, 1:], both[:, :, :1]

    def apply(self, both: Tensor, second: Tensor, first: Tensor) -> Tensor:
        """The rotated halves, new, contiguous and in fp32: (a, b) -> (a cos - b sin, b cos + a sin)."""
        turn = self._table.index_select(0, self._positions)
        cos = turn.as_strided(self._shape, self._stride)
        sin = turn.as_strided(self._shape, self._stride, self._half)
        other = torch.cat((second, first), dim=2)
        if other.dtype != turn.dtype:
            both, other = both.to(turn.dtype), other.to(turn.dtype)
        return torch.mul(both, cos).addcmul_(other, self._signs * sin)


def prepare_apply_rope(
    q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor, out: Sequence[Tensor] | None = None
) -> Prepared:
    """:func:`apply_rope` in plain torch: in fp32, rounded once."""
    turned = tuple(out or (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k)))
    rotation = Rotation(cos_sin, positions)
    pairs = [(rotation.halves(x), target.unflatten(-1, (2, -1))) for x, target in zip((q, k), turned, strict=True)]

    def run() -> None:
        for halves, target in pairs:
            target.copy_(rotation.apply(*halves))

    return run, turned


class RopeAndCache:
    """:func:`rope_and_cache` over given tensors, in plain torch."""

    def __init__(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        num_kv_heads, head_dim = k_cache.shape[2:]
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        self.num_heads = heads.shape[1] - 2 * num_kv_heads
        self._q, self._k, self._v = heads.split((self.num_heads, num_kv_heads, num_kv_heads), dim=1)
        self._q_and_k = heads[:, :-num_kv_heads]
        self._rotation, self._slots = Rotation(cos_sin, positions), slots
        self._caches = flat_cache(k_cache), flat_cache(v_cache)
        self._norms: tuple[Normalisation, Normalisation] | None = None
        if q_weight is not None and k_weight is not None:
            self._norms = Normalisation(q_weight, eps), Normalisation(k_weight, eps)
        self._halves = self._rotation.halves(self._q_and_k)
        rows, total, width = self._q_and_k.shape
        self._stride = (total * width, width, 1)
        self._q_shape, self._k_shape = (rows, self.num_heads, width), (rows, num_kv_heads, width)
        self._k_offset = self.num_heads * width

    def __call__(self) -> Tensor:
        """Write the keys and values; returns the queries ``[tokens, num_heads, head_dim]`` in fp32, a view."""
        halves = self._halves
        if self._norms is not None:
            normed = torch.empty_like(self._q_and_k, memory_format=torch.contiguous_format)
            self._norms[0](self._q, normed[:, : self.num_heads])
            self._norms[1](self._k, normed[:, self.num_heads :])
            halves = self._rotation.halves(normed)
        turned = self._rotation.apply(*halves)
        k = turned.as_strided(self._k_shape, self._stride, self._k_offset)
        store(k if k.dtype == self._v.dtype else k.to(self._v.dtype), self._v, *self._caches, self._slots)
        return turned.as_strided(self._q_shape, self._stride)


def prepare_rope_and_cache(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    out: Sequence[Tensor] | None = None,
) -> Prepared:
    """:func:`rope_and_cache` in plain torch."""
    work = RopeAndCache(qkv, cos_sin, positions, slots, k_cache, v_cache, q_weight, k_weight, eps)
    shape = (qkv.shape[0], work.num_heads, k_cache.shape[3])
    (q,) = out or (torch.empty(shape, dtype=qkv.dtype, device=qkv.device),)

    def run() -> None:
        q.copy_(work())

    return run, (q,)


_apply_rope = register(
    "apply_rope(Tensor q, Tensor k, Tensor cos_sin, Tensor positions) -> (Tensor, Tensor)",
    prepare=prepare_apply_rope,
    cuda="mainspring.kernels.triton.rope:apply_rope",
)
_rope_and_cache = register(
    "rope_and_cache(Tensor qkv, Tensor cos_sin, Tensor positions, Tensor slots, Tensor(a!) k_cache, "
    "Tensor(b!) v_cache, Tensor? q_weight=None, Tensor? k_weight=None, float eps=0.0) -> Tensor",
    prepare=prepare_rope_and_cache,
    cuda="mainspring.kernels.triton.rope:rope_and_cache",
)


def apply_rope(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions.

    Args:
        q: ``[tokens, num_heads, head_dim]``; may be a view with any token stride.
        k: ``[tokens, num_kv_heads, head_dim]``; likewise.
        cos_sin: ``[max_positions, head_dim]`` fp32 from :func:`rope_table`.
        positions: ``[tokens]`` int32 or int64, each within the table.

    Returns:
        The rotated ``(q, k)``, new and contiguous.
    """
    rotated_q, rotated_k = _apply_rope(q, k, cos_sin, positions)
    return rotated_q, rotated_k


def rope_and_cache(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Normalise (where weights are given) and rotate queries and keys; write keys and values to the cache.

    One kernel for what lies between the QKV product and attention.

    Args:
        qkv: ``[tokens, (num_heads + 2 * num_kv_heads) * head_dim]``: queries, keys, values.
        cos_sin: ``[max_positions, head_dim]`` fp32 from :func:`rope_table`.
        positions: ``[tokens]`` int32 or int64, each within the table.
        slots: ``[tokens]`` int64; -1 skips the token's key and value.
        k_cache: ``[num_blocks, block_size, num_kv_heads, head_dim]``, contiguous; written.
        v_cache: like ``k_cache``; written.
        q_weight: ``[head_dim]``, weight of an RMS norm over each query head before the rotation, or None.
        k_weight: likewise for key heads; both are given or neither.
        eps: of the norms.

    Returns:
        The queries, ``[tokens, num_heads, head_dim]``, new.

    Raises:
        ValueError: one norm weight is given without the other.
    """
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight and k_weight go together: give both or neither")
    check_slots(slots, qkv.shape[0])
    q: Tensor = _rope_and_cache(qkv, cos_sin, positions, slots, k_cache, v_cache, q_weight, k_weight, eps)
    return q
