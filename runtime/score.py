"""Logits of a given sequence, one engine, no scheduler: what `verify` asks of an engine."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trtforge.plugins.errors import InvalidArgument
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
