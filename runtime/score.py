"""Logits of a given sequence, one engine, no scheduler: what `verify` asks of an engine."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trtforge.plugins.errors import InvalidArgument
from trtforge.plugins.kv_codec import e4m3_value
from trtforge.plugins.kv_dtypes import KV_DTYPES
from trtforge.runtime.batch import Batcher
from trtforge.runtime.executors import open_executor
from trtforge.runtime.manifest import Manifest
from trtforge.runtime.request import Request, Rows, SamplingParams, Step

Logits = NDArray[np.float32]  # [rows, vocab]


class Scorer:
    """Runs one sequence at a time through an engine's executor, over a pool that holds just that."""

    def __init__(self, engine_dir: Path, *, threads: int | None = None) -> None:
        self._executor = open_executor(engine_dir, threads=threads)
        self.manifest: Manifest = self._executor.manifest
        self._batcher = Batcher(self.manifest)
        self._blocks = -(-self.manifest.limits.max_seq_len // self.manifest.kv.tokens_per_block)
        self._executor.allocate([self._blocks] * len(self.manifest.kv.groups))

    def logits(self, token_ids: Sequence[int], rows_at_once: int = 128) -> Iterator[Logits]:
        """Of every position, in pieces of [rows_at_once, vocab] at most; a piece is valid until the next."""
        request = self._request(token_ids)
        size = min(rows_at_once, self.manifest.limits.max_num_tokens)
        for start in range(0, len(token_ids), size):
            count = min(size, len(token_ids) - start)
            yield self._run(Rows(request, start, count, num_logits=count))

    def greedy(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that the engine likes best after these; no token ends it."""
        request = self._request(token_ids, extra=count)
        best: list[int] = []
        for logits in self._prefill(request):
            best = [int(logits[-1].argmax())]
        while len(best) < count:
            request.output_ids.append(best[-1])
            logits = self._run(Rows(request, request.num_tokens - 1, 1, num_logits=1))
            best.append(int(logits[-1].argmax()))
        return best

    def cached(self, layer: int, tokens: int) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
        """K (rotated) and V of one layer as the cache has them, FP32 [tokens, kv_heads, head_size]: those of the
        sequence that ran last. None if this executor's pools cannot be looked into."""
        pools = getattr(self._executor, "pools", None)
        if pools is None:
            return None
        kv = self.manifest.kv
        group = next(g for g, members in enumerate(kv.groups) if layer in members.layers)
        place = kv.groups[group].layers.index(layer)
        bits = pools[f"kv_pool.{group}"][
            :, place
        ]  # [blocks, 2, kv_heads, tokens_per_block, head_size * bytes]
        values = decode(bits, kv.dtype)
        if KV_DTYPES[kv.dtype].scales:
            values = values * pools[f"kv_scales.{group}"][:, place]
        _, _, kv_heads, _, head_size = values.shape
        by_token = values.transpose(1, 0, 3, 2, 4).reshape(2, -1, kv_heads, head_size)  # block i is the i-th
        return by_token[0, :tokens], by_token[1, :tokens]

    def close(self) -> None:
        self._executor.close()

    def _prefill(self, request: Request) -> Iterator[Logits]:
        """Steps over the prompt; each gives the logits of its last token."""
        size = self.manifest.limits.max_num_tokens
        for start in range(0, len(request.prompt_ids), size):
            count = min(size, len(request.prompt_ids) - start)
            yield self._run(Rows(request, start, count, num_logits=1))

    def _run(self, rows: Rows) -> Logits:
        return self._executor.run(self._batcher.arrays(Step((rows,))))

    def _request(self, token_ids: Sequence[int], extra: int = 0) -> Request:
        limit = self.manifest.limits.max_seq_len
        if not 0 < len(token_ids) + extra <= limit:
            raise InvalidArgument(f"{len(token_ids)} + {extra} tokens: the engine takes 1 to {limit}")
        tables = [list(range(self._blocks)) for _ in self.manifest.kv.groups]
        return Request(
            "score", list(token_ids), SamplingParams(), seed=0, max_tokens=extra, block_tables=tables
        )


def decode(bits: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """Cache bits [..., head_size * bytes] as numbers before scaling, FP32 [..., head_size]."""
    if dtype == "fp8":
        return np.array([e4m3_value(code) for code in range(256)], np.float32)[bits]
    if dtype == "bf16":
        return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return bits.view({"fp32": np.float32, "fp16": np.float16, "int8": np.int8}[dtype]).astype(np.float32)
