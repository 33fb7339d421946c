"""The blocks of one KV group's pool: who holds which, as plain integers."""

from collections import Counter
from collections.abc import Iterable, Sequence


class BlockPool:
    """Reference-counted blocks 0..num_blocks-1. A block is free when nobody holds it.

    Who takes a block from here writes it before reading it: blocks are not cleared.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, num_blocks
        self.num_blocks = num_blocks
        self.peak_used = 0
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is warm in the cache

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one reference. The caller has looked at `num_free`."""
        assert 0 <= count <= len(self._free), f"{count} blocks asked, {len(self._free)} free"
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """One more holder for each of these blocks, which somebody holds."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is free"
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less for each of these blocks; those that nobody holds any more are free."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is free already"
            self._references[block] -= 1
            if not self._references[block]:
                self._free.append(block)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """The invariants, given every block table there is; AssertionError names the one that is broken.

        Every block is free or held; the free list holds each free block once; each block's references are the
        tables that it is in, so nothing leaks and nothing is freed that is in use; no table has a block
        twice.
        """
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free list"
        held: Counter[int] = Counter()
        for table in tables:
            assert len(set(table)) == len(table), f"a block is twice in one table: {table}"
            held.update(table)
        for block, references in enumerate(self._references):
            assert references == held[block], (
                f"block {block}: {references} references, in {held[block]} tables"
            )
            assert (block in free) == (references == 0), (
                f"block {block}: {references} references, free list wrong"
            )
        assert self.num_free + self.num_used == self.num_blocks
