import random

import pytest

from trtforge.runtime.block_pool import BlockPool


def test_blocks_are_handed_out_once_and_come_back() -> None:
    pool = BlockPool(8)
    a, b = pool.allocate(3), pool.allocate(5)
    assert sorted(a + b) == list(range(8))
    assert (pool.num_free, pool.num_used, pool.peak_used) == (0, 8, 8)
    pool.release(a)
    pool.check_integrity([b])
    assert (pool.num_free, pool.peak_used) == (3, 8)
    assert sorted(pool.allocate(3)) == sorted(a)


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.retain(table)
    pool.check_integrity([table, table])
    pool.release(table)
    assert pool.num_free == 1
    pool.release(table)
    assert pool.num_free == 2
    pool.check_integrity([])


@pytest.mark.parametrize("misuse", ["allocate too many", "release twice", "retain a free one"])
def test_misuse_is_caught_where_it_happens(misuse: str) -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(AssertionError):
        if misuse == "allocate too many":
            pool.allocate(3)
        elif misuse == "release twice":
            pool.release(table)
        else:
            pool.retain(table)


@pytest.mark.parametrize(
    "damage", ["leak", "in use and free", "twice free", "twice in a table", "one reference less"]
)
def test_integrity_names_each_kind_of_damage(damage: str) -> None:
    pool = BlockPool(6)
    tables = [pool.allocate(2), pool.allocate(1)]
    pool.check_integrity(tables)
    if damage == "leak":
        tables.pop()
    elif damage == "in use and free":
        pool._free.append(tables[0][0])
    elif damage == "twice free":
        pool._free.append(pool._free[0])
    elif damage == "twice in a table":
        tables[0].append(tables[0][0])
    else:
        pool._references[tables[0][0]] -= 1
    with pytest.raises(AssertionError):
        pool.check_integrity(tables)


def test_a_hundred_thousand_random_operations() -> None:
    rng, pool = random.Random(5), BlockPool(16)
    tables: list[list[int]] = []
    for i in range(100_000):
        what = rng.random()
        if what < 0.45 and (count := rng.randint(0, 4)) <= pool.num_free:
            tables.append(pool.allocate(count))
        elif what < 0.55 and 0 < len(tables) < 24:
            shared = list(rng.choice(tables))
            pool.retain(shared)
            tables.append(shared)
        elif tables:
            pool.release(tables.pop(rng.randrange(len(tables))))
        assert pool.num_used == len({b for table in tables for b in table})
        if i % 100 == 0:
            pool.check_integrity(tables)
    for table in tables:
        pool.release(table)
    assert pool.num_free == 16
