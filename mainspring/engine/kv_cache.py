"""The KV cache: one allocation for the life of the engine, sized by measuring what everything else takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mainspring.engine.errors import SettingsError


@dataclass(frozen=True)
class KVCacheSpec:
    """Shape of a paged KV cache: ``[layers, 2, blocks, block_size, kv_heads, head_dim]``."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes over all layers, keys and values."""
        return 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


def allocate_kv_cache(spec: KVCacheSpec, num_blocks: int, device: torch.device) -> torch.Tensor:
    """One zeroed allocation for all layers; block 0 is the null block. Raises ``SettingsError`` where it fails."""
    shape = (spec.num_layers, 2, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
    try:
        return torch.zeros(shape, dtype=spec.dtype, device=device)
    except (RuntimeError, TypeError) as error:  # TypeError: a size past 64 bits
        raise SettingsError(
            f"{device} does not give {num_blocks * spec.block_bytes} bytes for {num_blocks} KV blocks; lower "
            f"block_size, kv_cache_memory, num_gpu_blocks_override or gpu_memory_utilization"
        ) from error


def layer_views(cache: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """``(keys, values)`` of each layer, each ``[blocks, block_size, kv_heads, head_dim]``, views of ``cache``."""
    return [(layer[0], layer[1]) for layer in cache]
