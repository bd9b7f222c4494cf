"""What one forward pass reads beside weights and KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ModelInputs:
    """The tokens of one step and where their keys and values live; every tensor is on the model's device.

    T is the number of tokens, n the number of sequences, MB the columns of the block table. In a decode step
    (`query_starts` is None) each sequence has exactly one token, so T = n.

    token_ids     [T] int64 positions     [T] int64      place of each token in its sequence, from 0 slots
    [T] int64      block * block_size + offset where its key and value go; -1 writes nothing (padding)
    block_tables  [n, MB] int32  block numbers of each sequence; 0 is the null block seq_lens      [n] int32
    keys of each sequence, this step's included; 0 is a padded row query_starts  [n + 1] int32  sequence i
    owns tokens query_starts[i]:query_starts[i + 1]; None in a decode step
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_starts: Tensor | None = None
