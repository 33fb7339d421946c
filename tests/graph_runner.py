"""Runs a plain graph, function bodies and all, in ONNX Runtime: the smallest engine that the contract allows.

It drives the graph as the runtime does: packed steps of several requests, chunks of prompts beside single decoded
tokens, blocks handed out in a scrambled order, and rotation rows made from the spec.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from trtforge.builder.spec import ModelSpec
from trtforge.plugins.kv_dtypes import KV_DTYPES
from trtforge.runtime.manifest import KVLayout, Rope

#: ONNX Runtime takes no bfloat16 arrays from numpy.
_NUMPY = {"FLOAT": np.float32, "FLOAT16": np.float16, "INT8": np.int8}


def rotation_rows(rope: Rope, positions: np.ndarray) -> np.ndarray:
    """cos_sin [T, rotary_dim], each operation rounded to float32 as transformers does."""
    angles = positions.astype(np.float32)[:, None] * np.array(rope.inv_freq, np.float32)
    return np.concatenate([np.cos(angles), np.sin(angles)], 1) * np.float32(rope.attention_factor)


class GraphRunner:
    """A graph, or the file of one, with pools for `num_requests` requests of up to `max_seq_len` tokens."""

    def __init__(
        self,
        graph: ir.Model | Path,
        spec: ModelSpec,
        kv: KVLayout,
        *,
        max_seq_len: int,
        num_requests: int = 2,
    ) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        model = graph if isinstance(graph, Path) else ir.to_proto(graph).SerializeToString()
        self.session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.spec, self.kv = spec, kv
        self.lengths = [0] * num_requests
        self.blocks_each = -(-max_seq_len // kv.tokens_per_block)
        # Block 0 belongs to nobody: unused table entries point at it.
        self.num_blocks = 1 + self.blocks_each * num_requests
        shuffled = np.random.default_rng(5).permutation(np.arange(1, self.num_blocks))
        self.tables = shuffled.reshape(num_requests, self.blocks_each).astype(np.int32)
        self.pools: dict[str, np.ndarray] = {}
        dtype = KV_DTYPES[kv.dtype]
        for g, group in enumerate(kv.groups):
            shape = (self.num_blocks, len(group.layers), 2, group.kv_heads, kv.tokens_per_block)
            self.pools[f"kv_pool.{g}"] = np.zeros((*shape, group.head_size), _NUMPY[dtype.onnx])
            if dtype.scales:
                self.pools[f"kv_scales.{g}"] = np.zeros((*shape, dtype.scales), np.float32)

    def step(self, chunks: Mapping[int, Sequence[int]]) -> dict[int, np.ndarray]:
        """Run the next tokens of some requests; gives each one's logits [tokens, vocab_size]."""
        logits = self.run(chunks, range(sum(len(c) for c in chunks.values())))
        ends = np.cumsum([len(c) for c in chunks.values()])
        return dict(zip(chunks, np.split(logits, ends[:-1]), strict=True))

    def run(self, chunks: Mapping[int, Sequence[int]], logit_rows: Sequence[int]) -> np.ndarray:
        """The same for some rows of the step: logits [rows, vocab_size]."""
        requests = list(chunks)
        starts = [self.lengths[r] for r in requests]
        for r in requests:
            self.lengths[r] += len(chunks[r])
        positions = [np.arange(s, self.lengths[r]) for r, s in zip(requests, starts, strict=True)]
        size = self.kv.tokens_per_block
        slots = [
            self.tables[r][p // size] * np.int64(size) + p % size
            for r, p in zip(requests, positions, strict=True)
        ]
        packed = np.concatenate(positions).astype(np.int32)
        query_start = np.cumsum([0] + [len(chunks[r]) for r in requests]).astype(np.int32)
        tables = self.tables[requests].copy()
        for row, r in zip(tables, requests, strict=True):
            row[-(-self.lengths[r] // size) :] = 0
        feeds: dict[str, Any] = {
            "token_ids": np.concatenate([np.asarray(chunks[r]) for r in requests]).astype(np.int32),
            "positions": packed,
            "query_start": query_start,
            "kv_lengths": np.array([self.lengths[r] for r in requests], np.int32),
            "logit_rows": np.array(logit_rows, np.int32),
            **{f"cos_sin.{i}": rotation_rows(rope, packed) for i, rope in enumerate(self.spec.ropes)},
            **{f"slot_mapping.{g}": np.concatenate(slots) for g in range(len(self.kv.groups))},
            **{f"block_tables.{g}": tables for g in range(len(self.kv.groups))},
            **self.pools,
        }
        logits, *pools = self.session.run(None, feeds)
        self.pools = dict(zip(self.pools, pools, strict=True))
        return np.asarray(logits)

    def generate(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, chunk: int
    ) -> tuple[list[list[int]], list[np.ndarray]]:
        """Prefill in chunks, each request joining one step after the one before, then decode greedily.

        Gives each request's tokens, prompt included, and the logits of every one of them.
        """
        tokens = [list(p) for p in prompts]
        totals = [len(p) + new_tokens for p in prompts]
        logits: list[list[np.ndarray]] = [[] for _ in prompts]
        step = 0
        while any(length < total for length, total in zip(self.lengths, totals, strict=True)):
            active = [r for r in range(len(prompts)) if r <= step and self.lengths[r] < totals[r]]
            for r, rows in self.step({r: tokens[r][self.lengths[r] :][:chunk] for r in active}).items():
                logits[r].append(rows)
                if self.lengths[r] == len(tokens[r]) < totals[r]:
                    tokens[r].append(int(rows[-1].argmax()))
            step += 1
        return tokens, [np.concatenate(rows) for rows in logits]
