"""Which full KV blocks are known by content, so that a later prompt can read instead of compute them.

A block's key is a SHA-256 over its parent's key and all of its token ids; the first parent is made from the
request's salt. Equal keys therefore mean equal tokens from position 0 to the end of the block, under the same
salt, and so equal KV. (Chained block hashes as in vLLM's automatic prefix caching.)
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256


@dataclass
class PrefixCacheCounters:
    """Totals since the start: prompt tokens looked up, tokens found, cached blocks evicted."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    evicted_blocks: int = 0


def root_key(salt: str | None, epoch: int) -> bytes:
    """The parent key of a first block, 32 bytes; differs by ``salt`` (None differs from "") and ``epoch``."""
    salt_bytes = b"" if salt is None else b"\x01" + salt.encode("utf-8", "surrogatepass")
    return sha256(b"root" + epoch.to_bytes(8, "little") + salt_bytes).digest()


def chain_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key, 32 bytes, of the full block that holds ``token_ids`` after the block of key ``parent``."""
    return sha256(parent + array("q", token_ids).tobytes()).digest()


class PrefixCache:
    """Key to block and back, and the blocks that nobody holds in the order in which they are evicted.

    Knows nothing of reference counts: `BlockPool` tells it when a block is no longer held (`park`) or held
    again (`unpark`). A parked block keeps its content until `evict` takes it.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.counters = PrefixCacheCounters()
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._parked: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_parked(self) -> int:
        """Cached blocks that no request holds."""
        return len(self._parked)

    def parked_blocks(self) -> list[int]:
        """The parked blocks, next to be evicted first."""
        return list(self._parked)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._key_of

    def lookup(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest run of ``keys``, from the first, that are all cached."""
        found = []
        for key in keys:
            block_id = self._block_of.get(key)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def publish(self, block_id: int, key: bytes) -> None:
        """Make a full block known. Where another block has this key already, that one stays the known one."""
        if key not in self._block_of and block_id not in self._key_of:
            self._block_of[key] = block_id
            self._key_of[block_id] = key

    def park(self, block_id: int) -> None:
        """Nobody holds this cached block any more; it becomes the last to be evicted."""
        self._parked[block_id] = None

    def unpark(self, block_id: int) -> None:
        """A request holds this parked block again."""
        del self._parked[block_id]

    def evict(self) -> int:
        """Forget the least recently used parked block and hand it out for new content."""
        block_id, _ = self._parked.popitem(last=False)
        del self._block_of[self._key_of.pop(block_id)]
        self.counters.evicted_blocks += 1
        return block_id

    def forget(self) -> list[int]:
        """Forget every block and return those that were parked. Keys made before this never match again."""
        parked = list(self._parked)
        self._parked.clear()
        self._block_of.clear()
        self._key_of.clear()
        self.epoch += 1
        return parked
