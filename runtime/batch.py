"""A step's rows as the graph's inputs: the one place where plain integers become arrays."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trtforge.runtime.executors.base import StepArrays
from trtforge.runtime.manifest import Manifest, Rope
from trtforge.runtime.request import Request, Step


class Batcher:
    """Turns steps into StepArrays for one engine."""

    def __init__(self, manifest: Manifest) -> None:
        self._tokens_per_block = manifest.kv.tokens_per_block
        self._num_groups = len(manifest.kv.groups)
        self._rotations = tuple(RotationTable(rope) for rope in manifest.ropes)
        self._generation: _Generation | None = None  # the latest step's, if it was one

    def arrays(self, step: Step) -> StepArrays:
        """T tokens of B rows; a row's logits are those of its last `num_logits` tokens. Valid until the next
        step's.
        """
        arrays = self._generation.arrays(step) if self._generation else None
        if arrays is None and all(row.count == row.num_logits == 1 for row in step.rows):
            requests = [row.request for row in step.rows]
            self._generation = _Generation(
                requests, self._num_groups, self._tokens_per_block, self._rotations
            )
            arrays = self._generation.arrays(step)
        if arrays is None:
            self._generation = None
            arrays = self._of_any_rows(step)
        return arrays

    def _of_any_rows(self, step: Step) -> StepArrays:
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
            cos_sin=tuple(table.rows(positions, int(positions.max())) for table in self._rotations),
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


class _Generation:
    """The arrays of steps in which the same requests have one token each: what most steps are.

    The same arrays serve all of them, written item by item. As many calls into NumPy would cost more: some
    microseconds each, and several times that when a step of the model has just had the CPU's caches for its
    weights.
    """

    def __init__(
        self,
        requests: list[Request],
        num_groups: int,
        tokens_per_block: int,
        rotations: "tuple[RotationTable, ...]",
    ) -> None:
        count = len(requests)
        self._requests = requests
        self._rotations = rotations
        self._groups = [_Blocks(requests, g, tokens_per_block) for g in range(num_groups)]
        self._arrays = StepArrays(
            token_ids=np.empty(count, np.int32),
            positions=np.empty(count, np.int32),
            cos_sin=tuple(np.empty((count, rotation.dim), np.float32) for rotation in rotations),
            slot_mapping=tuple(group.slots for group in self._groups),
            query_start=np.arange(count + 1, dtype=np.int32),
            kv_lengths=np.empty(count, np.int32),
            block_tables=tuple(group.tables for group in self._groups),
            logit_rows=np.arange(count, dtype=np.int32),
        )
        a = self._arrays
        self._items = tuple(x.data for x in (a.token_ids, a.positions, a.kv_lengths))

    def arrays(self, step: Step) -> StepArrays | None:
        """Those of a step of these requests in this order, one token each; None for any other step."""
        if len(step.rows) != len(self._requests):
            return None
        token_ids, positions, kv_lengths = self._items
        last = 0
        for i, (request, start, count, num_logits) in enumerate(step.rows):
            if request is not self._requests[i] or count != 1 or num_logits != 1:
                return None
            at = start - len(request.prompt_ids)
            token_ids[i] = request.prompt_ids[start] if at < 0 else request.output_ids[at]
            positions[i] = start
            kv_lengths[i] = start + 1
            if start > last:
                last = start
        for rotation, cos_sin in zip(self._rotations, self._arrays.cos_sin, strict=True):
            rotation.rows(self._arrays.positions, last, cos_sin)
        wider = [group for group in self._groups if group.follow(step)]
        if wider:
            self._arrays = replace(self._arrays, block_tables=tuple(group.tables for group in self._groups))
        return self._arrays


class _Blocks:
    """The block tables of some requests in one KV group, as the array `tables` [B, max_blocks], and the slots [B] of
    one token each.

    A request's table is a list that only grows, or else another list: so who it is and how long says if it changed.
    """

    def __init__(self, requests: list[Request], group: int, tokens_per_block: int) -> None:
        self._group = group
        self._tokens_per_block = tokens_per_block
        self._known = [(r.block_tables[group], 0) for r in requests]  # of each table how much is in the array
        self.tables = np.zeros((len(requests), max(len(table) for table, _ in self._known)), np.int32)
        self.slots = np.empty(len(requests), np.int64)
        self._items = self.slots.data

    def follow(self, step: Step) -> bool:
        """Take in a step's rows, one token each. True if `tables` is another array now, a wider one."""
        before, size = self.tables, self._tokens_per_block
        for i, (request, start, _, _) in enumerate(step.rows):
            table = request.block_tables[self._group]
            known, length = self._known[i]
            if table is not known or len(table) != length:
                self._update(i, table)
            self._items[i] = table[start // size] * size + start % size
        return self.tables is not before

    def _update(self, i: int, table: list[int]) -> None:
        width = self.tables.shape[1]
        if len(table) > width:
            wider = np.zeros((len(self._known), len(table)), np.int32)
            wider[:, :width] = self.tables
            self.tables = wider
        known, length = self._known[i]
        start = length if table is known else 0
        self.tables[i, start : len(table)] = table[start:]
        self._known[i] = (table, len(table))


class RotationTable:
    """Rows of cos_sin for one kind of RoPE, computed once per position: [cos | sin] * attention_factor in
    FP32, the angles too, as the models that were trained with them compute them.
    """

    def __init__(self, rope: Rope) -> None:
        self._inv_freq = np.array(rope.inv_freq, np.float32)  # [rotary_dim / 2]
        self._factor = np.float32(rope.attention_factor)
        self._table = np.empty((0, rope.rotary_dim), np.float32)

    @property
    def dim(self) -> int:
        return self._table.shape[1]

    def rows(
        self, positions: NDArray[np.int32], last: int, out: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]:
        """[T, rotary_dim], in `out` if it is given. last: the largest of the positions."""
        if last >= len(self._table):
            angles = np.arange(max(256, 2 * last), dtype=np.float32)[:, None] * self._inv_freq
            self._table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * self._factor
        # None of them lies outside; mode "raise" would go through a buffer of its own to be sure.
        return self._table.take(positions, axis=0, out=out, mode="clip")
