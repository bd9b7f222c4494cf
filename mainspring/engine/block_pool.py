"""Who holds which block of the paged KV cache. Counts only: the memory itself is elsewhere.

A block is in exactly one of three states: held (reference count > 0), parked (count 0, content still known
to the prefix cache, evicted when needed), or empty. Block 0, the null block of padded rows, is never given.

A block may be given to its next holder while steps of its last holder are still running on the device. That
is safe because all steps run on one stream: what was launched earlier has read and written its blocks before
a later launch touches them.
"""

from __future__ import annotations

from collections.abc import Sequence

from mainspring.engine.prefix_cache import PrefixCache, PrefixCacheCounters, chain_key, root_key

NULL_BLOCK = 0


class BlockPoolError(RuntimeError):
    """The pool was used against its rules; always a defect in the caller, never a user's mistake."""


class BlockPool:
    """Hands out the blocks 1 .. ``num_blocks`` - 1 of ``block_size`` tokens each and takes them back.

    Shared blocks need no copy on write: only full blocks are ever shared, and nobody writes to a full block.

    Raises:
        ValueError: ``block_size`` < 1, or no block left beside the null block.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        if block_size < 1:
            raise ValueError(f"block_size {block_size} < 1; give a positive number of tokens per KV block")
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks {num_blocks} < 2 (the null block and one to use); "
                "give the KV cache more memory or lower block_size"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._ref_counts = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, NULL_BLOCK, -1))  # a stack, lowest id on top
        self._cache = PrefixCache()

    @property
    def num_usable_blocks(self) -> int:
        """All blocks that requests may hold: every one but the null block."""
        return self.num_blocks - 1

    @property
    def num_usable_tokens(self) -> int:
        """Tokens that fit into the whole pool."""
        return self.num_usable_blocks * self.block_size

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give now: empty ones and cached ones that nobody holds."""
        return len(self._empty) + self._cache.num_parked

    @property
    def num_cached(self) -> int:
        """Cached blocks that nobody holds (a part of `num_free`)."""
        return self._cache.num_parked

    @property
    def counters(self) -> PrefixCacheCounters:
        """The prefix cache's totals."""
        return self._cache.counters

    def ref_count(self, block_id: int) -> int:
        """How many requests hold this block."""
        return self._ref_counts[block_id]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, each held once: empty ones first, then the least recently used cached ones.

        Raises:
            BlockPoolError: ``count`` > `num_free`; nothing is taken then.
        """
        if count > self.num_free:
            raise BlockPoolError(f"{count} blocks asked for, {self.num_free} free; check num_free first")
        taken = [self._empty.pop() if self._empty else self._cache.evict() for _ in range(count)]
        for block_id in taken:
            self._ref_counts[block_id] = 1
        return taken

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Hold cached blocks, as `lookup` found them, once more each."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                self._cache.unpark(block_id)
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Give up one hold on each block of a request's table, in the table's order.

        The last block is released first, so that a long prefix is evicted from its end: a head without its
        tail can still be hit, a tail without its head cannot.

        Raises:
            BlockPoolError: a block is not held, or is the null block.
        """
        for block_id in reversed(block_ids):
            if self._ref_counts[block_id] < 1:
                raise BlockPoolError(f"block {block_id} released but not held")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] > 0:
                continue
            if block_id in self._cache:
                self._cache.park(block_id)
            else:
                self._empty.append(block_id)

    def lookup(self, keys: Sequence[bytes]) -> tuple[list[int], int]:
        """The cached blocks of the longest known run of ``keys``, and how many of them nobody holds.

        The second number is what `num_free` loses when these are acquired.
        """
        block_ids = self._cache.lookup(keys)
        return block_ids, sum(self._ref_counts[block_id] == 0 for block_id in block_ids)

    def publish(self, block_id: int, key: bytes) -> None:
        """Let later lookups of ``key`` find this held, full block, whose KV is written or launched.

        Raises:
            BlockPoolError: the block is not held.
        """
        if self._ref_counts[block_id] < 1:
            raise BlockPoolError(f"block {block_id} published but not held")
        self._cache.publish(block_id, key)

    def forget_cached(self) -> None:
        """Drop all cached content, as after a weight update or a step that may not have run.

        Held blocks stay held; they and what their holders publish later are never found by new requests.
        """
        self._empty.extend(self._cache.forget())

    def reset(self) -> None:
        """Take back every block from whoever holds it, and forget all cached content. Counters stay."""
        self._cache.forget()
        self._ref_counts = [0] * self.num_blocks
        self._empty = list(range(self.num_blocks - 1, NULL_BLOCK, -1))

    def root_key(self, salt: str | None) -> bytes:
        """The key before a request's first block; see `prefix_cache.root_key`."""
        return root_key(salt, self._cache.epoch)

    def chain_key(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """The key of a full block; see `prefix_cache.chain_key`."""
        return chain_key(parent, token_ids)

    def check(self, holders: Sequence[Sequence[int]]) -> None:
        """Verify the books against the block tables of all requests: O(num_blocks), for tests and debugging.

        Raises:
            BlockPoolError: a block is leaked, in two states, or its count is not that of its holders.
        """
        counts = [0] * self.num_blocks
        for table in holders:
            for block_id in table:
                counts[block_id] += 1
        free = sorted([*self._empty, *self._cache.parked_blocks()])
        if counts != self._ref_counts:
            wrong = [i for i in range(self.num_blocks) if counts[i] != self._ref_counts[i]]
            raise BlockPoolError(f"blocks {wrong}: reference counts differ from the tables that hold them")
        if free != [i for i in range(self.num_blocks) if i != NULL_BLOCK and counts[i] == 0]:
            raise BlockPoolError(f"free blocks {free} are not those that no table holds")
        if counts[NULL_BLOCK]:
            raise BlockPoolError("the null block was given to a request")
