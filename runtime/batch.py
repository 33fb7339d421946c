"""A step's rows as the graph's inputs: the one place where plain integers become arrays."""

import numpy as np
from numpy.typing import NDArray

from trtforge.runtime.executors.base import StepArrays
from trtforge.runtime.manifest import Manifest, Rope
from trtforge.runtime.request import Step


class Batcher:
    """Turns steps into StepArrays for one engine."""

    def __init__(self, manifest: Manifest) -> None:
        self._tokens_per_block = manifest.kv.tokens_per_block
        self._num_groups = len(manifest.kv.groups)
        self._rotations = tuple(RotationTable(rope) for rope in manifest.ropes)

    def arrays(self, step: Step) -> StepArrays:
        """T tokens of B rows; a row's logits are those of its last `num_logits` tokens."""
        rows = step.rows
        counts = np.array([r.count for r in rows], np.int32)  # [B]
        starts = np.array([r.start for r in rows], np.int32)  # [B]
        query_start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        token_ids = [t for r in rows for t in r.request.tokens(r.start, r.start + r.count)]
        request = np.repeat(np.arange(len(rows)), counts)  # [T], of B
        positions = np.arange(step.num_tokens, dtype=np.int32) + (starts - query_start[:-1])[request]
        tables = tuple(self._block_tables(step, g) for g in range(self._num_groups))
        return StepArrays(
            token_ids=np.array(token_ids, np.int32),
            positions=positions,
            cos_sin=tuple(table.rows(positions) for table in self._rotations),
            slot_mapping=tuple(self._slots(table, request, positions) for table in tables),
            query_start=query_start,
            kv_lengths=starts + counts,
            block_tables=tables,
            logit_rows=np.array(
                [
                    end - back
                    for r, end in zip(rows, query_start[1:], strict=True)
                    for back in _last(r.num_logits)
                ],
                np.int32,
            ),
        )

    def _block_tables(self, step: Step, group: int) -> NDArray[np.int32]:
        """[B, max_blocks]: the longest table's width, the others padded with block 0, which nothing reads."""
        tables = [r.request.block_tables[group] for r in step.rows]
        padded = np.zeros((len(tables), max(map(len, tables))), np.int32)
        for i, table in enumerate(tables):
            padded[i, : len(table)] = table
        return padded

    def _slots(
        self, tables: NDArray[np.int32], request: NDArray[np.int64], positions: NDArray[np.int32]
    ) -> NDArray[np.int64]:
        block, offset = np.divmod(positions, self._tokens_per_block)
        slots: NDArray[np.int64] = tables[request, block].astype(np.int64) * self._tokens_per_block + offset
        return slots


def _last(num_logits: int) -> range:
    """How far before a row's end its logits are, in order."""
    return range(num_logits, 0, -1)


class RotationTable:
    """Rows of cos_sin for one kind of RoPE, computed once per position: [cos | sin] * attention_factor in
    FP32, the angles too, as the models that were trained with them compute them.
    """

    def __init__(self, rope: Rope) -> None:
        self._inv_freq = np.array(rope.inv_freq, np.float32)  # [rotary_dim / 2]
        self._factor = np.float32(rope.attention_factor)
        self._table = np.empty((0, rope.rotary_dim), np.float32)

    def rows(self, positions: NDArray[np.int32]) -> NDArray[np.float32]:
        """[T, rotary_dim]"""
        last = int(positions.max())
        if last >= len(self._table):
            angles = np.arange(max(256, 2 * last), dtype=np.float32)[:, None] * self._inv_freq
            self._table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * self._factor
        return self._table[positions]
