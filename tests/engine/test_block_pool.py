from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainspring.engine.block_pool import BlockPool, BlockPoolError
from mainspring.engine.prefix_cache import chain_key, root_key


def keys_of(pool: BlockPool, count: int, salt: str | None = None) -> list[bytes]:
    keys = [pool.root_key(salt)]
    for index in range(count):
        keys.append(pool.chain_key(keys[-1], [index] * pool.block_size))
    return keys[1:]


def test_every_block_but_the_null_block_is_given_once() -> None:
    pool = BlockPool(5, 4)
    blocks = pool.allocate(4)
    assert sorted(blocks) == [1, 2, 3, 4]
    assert pool.num_free == 0
    pool.check([blocks])
    pool.release(blocks)
    assert pool.num_free == pool.num_usable_blocks == 4
    assert pool.num_usable_tokens == 16


def test_asking_for_more_than_is_free_takes_nothing() -> None:
    pool = BlockPool(4, 4)
    held = pool.allocate(2)
    with pytest.raises(BlockPoolError, match="2 blocks asked for, 1 free"):
        pool.allocate(2)
    pool.check([held])


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "message"),
    [(1, 16, "num_blocks 1 < 2 .* more memory"), (0, 16, "num_blocks 0"), (8, 0, "block_size 0 < 1")],
)
def test_a_pool_without_a_usable_block_is_refused(num_blocks: int, block_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockPool(num_blocks, block_size)


@pytest.mark.parametrize("block_id", [0, 3])
def test_releasing_what_is_not_held_is_an_error(block_id: int) -> None:
    pool = BlockPool(4, 4)
    pool.allocate(1)
    with pytest.raises(BlockPoolError, match=f"block {block_id} released but not held"):
        pool.release([block_id])


def test_publishing_what_is_not_held_is_an_error() -> None:
    pool = BlockPool(4, 4)
    with pytest.raises(BlockPoolError, match="block 1 published but not held"):
        pool.publish(1, b"key")


def test_the_least_recently_used_prefix_is_evicted_from_its_end() -> None:
    pool = BlockPool(7, 4)
    tables = [pool.allocate(3), pool.allocate(3)]
    keys = [keys_of(pool, 3, salt) for salt in ("a", "b")]
    for table, chain in zip(tables, keys, strict=True):
        for block_id, key in zip(table, chain, strict=True):
            pool.publish(block_id, key)
    pool.release(tables[0])
    pool.release(tables[1])
    assert (pool.num_free, pool.num_cached) == (6, 6)
    hits, unheld = pool.lookup(keys[0])  # "a" is used again: now "b" is the older one
    assert (hits, unheld) == (tables[0], 3)
    pool.acquire(hits)
    assert pool.lookup(keys[0]) == (tables[0], 0)
    pool.release(hits)
    assert pool.allocate(4) == [*reversed(tables[1]), tables[0][2]]
    assert pool.lookup(keys[1]) == ([], 0)
    assert pool.lookup(keys[0]) == (tables[0][:2], 2)
    assert pool.counters.evicted_blocks == 4


def test_empty_blocks_are_used_before_any_is_evicted() -> None:
    pool = BlockPool(4, 4)
    (cached,) = pool.allocate(1)
    key = keys_of(pool, 1)[0]
    pool.publish(cached, key)
    pool.release([cached])
    assert cached not in pool.allocate(2)
    assert pool.lookup([key]) == ([cached], 1)
    assert pool.counters.evicted_blocks == 0


def test_of_two_blocks_with_equal_content_the_first_stays_known() -> None:
    pool = BlockPool(4, 4)
    first, second = pool.allocate(2)
    key = keys_of(pool, 1)[0]
    pool.publish(first, key)
    pool.publish(second, key)
    assert pool.lookup([key]) == ([first], 0)
    pool.release([first, second])
    assert pool.num_cached == 1
    pool.check([])


def test_a_lookup_ends_at_the_first_unknown_block() -> None:
    pool = BlockPool(5, 4)
    blocks = pool.allocate(3)
    keys = keys_of(pool, 3)
    pool.publish(blocks[0], keys[0])
    pool.publish(blocks[2], keys[2])
    assert pool.lookup(keys) == (blocks[:1], 0)


def test_forgotten_content_is_never_found_again() -> None:
    pool = BlockPool(5, 4)
    keys = keys_of(pool, 3)
    held, parked = pool.allocate(2)
    pool.publish(held, keys[0])
    pool.publish(parked, keys[1])
    pool.release([parked])
    pool.forget_cached()
    assert pool.lookup(keys) == ([], 0)
    assert keys_of(pool, 3)[0] != keys[0]
    pool.check([[held]])
    pool.release([held])
    assert (pool.num_free, pool.num_cached) == (4, 0)


def test_keys_tell_apart_everything_that_kv_depends_on() -> None:
    root = root_key(None, 0)
    roots = [root, root_key("", 0), root_key("a", 0), root_key(None, 1)]
    assert len(set(roots)) == 4
    first = chain_key(root, [1, 2])
    different = [
        chain_key(root, [2, 1]),
        chain_key(root, [1, 3]),
        chain_key(roots[2], [1, 2]),
        chain_key(first, [1, 2]),
        chain_key(root, [1, 2 + 2**32]),
        chain_key(chain_key(root, [1]), [2]),
    ]
    assert len({first, *different}) == 7
    assert first == chain_key(root_key(None, 0), [1, 2])


@given(st.data(), st.integers(2, 10))
def test_random_use_keeps_the_books(data: st.DataObject, num_blocks: int) -> None:
    pool = BlockPool(num_blocks, 4)
    keys = keys_of(pool, 6)
    content: dict[int, bytes] = {}
    tables: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["allocate", "hit", "publish", "release"]))
        if action == "allocate" and pool.num_free:
            tables.append(pool.allocate(data.draw(st.integers(1, pool.num_free))))
            for block_id in tables[-1]:
                content.pop(block_id, None)
        elif action == "hit":
            hits, unheld = pool.lookup(keys)
            free = pool.num_free
            pool.acquire(hits)
            assert pool.num_free == free - unheld
            assert [content[block_id] for block_id in hits] == keys[: len(hits)]
            tables.append(hits)
        elif action == "publish" and tables:
            for block_id, key in zip(data.draw(st.sampled_from(tables)), keys, strict=False):
                if block_id not in content:
                    content[block_id] = key
                    pool.publish(block_id, key)
        elif action == "release" and tables:
            pool.release(tables.pop(data.draw(st.integers(0, len(tables) - 1))))
        pool.check(tables)
    for table in tables:
        pool.release(table)
    assert pool.num_free == num_blocks - 1


def test_the_check_finds_leaks_and_wrong_counts() -> None:
    pool = BlockPool(4, 4)
    table = pool.allocate(2)
    with pytest.raises(BlockPoolError, match="reference counts differ"):
        pool.check([table[:1]])
    with pytest.raises(BlockPoolError, match="reference counts differ"):
        pool.check([table, table])
    pool._empty.pop()
    with pytest.raises(BlockPoolError, match="are not those that no table holds"):
        pool.check([table])
