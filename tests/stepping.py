"""Drives an executor by hand, without scheduler and batch builder: sequences grow by the rows of each step.

Blocks are dealt to a sequence one at a time in a shuffled order, so that no test passes by their being contiguous.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtforge.runtime.executors.base import Executor, StepArrays
from trtforge.runtime.manifest import Manifest, Rope

Logits = NDArray[np.float32]


@dataclass(eq=False)
class Cached:
    """A sequence's length in the cache, and its block table per KV group."""

    length: int = 0
    tables: list[list[int]] = field(default_factory=list)


class Stepper:
    """Owns the blocks of an executor that it allocates. `num_blocks` is per KV group."""

    def __init__(self, executor: Executor, num_blocks: int, seed: int = 0) -> None:
        self.executor = executor
        self.manifest: Manifest = executor.manifest
        groups = len(self.manifest.kv.groups)
        executor.allocate([num_blocks] * groups)
        rng = np.random.default_rng(seed)
        self._free = [[int(b) for b in rng.permutation(num_blocks)] for _ in range(groups)]

    def new(self) -> Cached:
        return Cached(tables=[[] for _ in self._free])

    def free(self, sequence: Cached) -> None:
        for free, table in zip(self._free, sequence.tables, strict=True):
            free.extend(table)
        sequence.length, sequence.tables = 0, [[] for _ in self._free]

    def step(self, rows: Sequence[tuple[Cached, Sequence[int], int]]) -> list[Logits]:
        """One step of (sequence, its next tokens, how many of their last rows of logits are wanted).

        Gives a copy of each one's logits [wanted, vocab].
        """
        arrays = self.arrays(rows)
        logits = self.executor.run(arrays).copy()
        ends = np.cumsum([wanted for *_, wanted in rows])
        return np.split(logits, ends[:-1])

    def logits(self, tokens: Sequence[int], chunk: int = 0) -> Logits:
        """All rows [T, vocab] of one sequence alone, `chunk` tokens a step (0: all at once)."""
        sequence = self.new()
        size = chunk or len(tokens)
        parts = [tokens[i : i + size] for i in range(0, len(tokens), size)]
        found = np.concatenate([self.step([(sequence, part, len(part))])[0] for part in parts])
        self.free(sequence)
        return found

    def arrays(self, rows: Sequence[tuple[Cached, Sequence[int], int]]) -> StepArrays:
        kv = self.manifest.kv
        positions = [np.arange(s.length, s.length + len(tokens)) for s, tokens, _ in rows]
        for sequence, tokens, _ in rows:
            sequence.length += len(tokens)
            for free, table in zip(self._free, sequence.tables, strict=True):
                while len(table) * kv.tokens_per_block < sequence.length:
                    table.append(free.pop())
        starts = np.cumsum([0, *(len(tokens) for _, tokens, _ in rows)])
        wanted = [np.arange(end - n, end) for (*_, n), end in zip(rows, starts[1:], strict=True)]
        flat = np.concatenate(positions)
        return StepArrays(
            token_ids=np.concatenate([np.asarray(t, np.int32) for _, t, _ in rows]),
            positions=flat.astype(np.int32),
            cos_sin=tuple(cos_sin(rope, flat) for rope in self.manifest.ropes),
            slot_mapping=tuple(
                np.concatenate(
                    [
                        np.asarray(s.tables[g])[p // kv.tokens_per_block] * kv.tokens_per_block
                        + p % kv.tokens_per_block
                        for (s, *_), p in zip(rows, positions, strict=True)
                    ]
                ).astype(np.int64)
                for g in range(len(kv.groups))
            ),
            query_start=starts.astype(np.int32),
            kv_lengths=np.array([s.length for s, *_ in rows], np.int32),
            block_tables=tuple(_padded([s.tables[g] for s, *_ in rows]) for g in range(len(kv.groups))),
            logit_rows=np.concatenate(wanted).astype(np.int32),
        )


def cos_sin(rope: Rope, positions: NDArray[Any]) -> Logits:
    """[T, rotary_dim]: cosines, then sines, in FP32 as transformers computes them."""
    angles = positions.astype(np.float32)[:, None] * np.asarray(rope.inv_freq, np.float32)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * np.float32(rope.attention_factor)


def _padded(tables: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """[B, max_blocks], zeros behind each table."""
    padded = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded
