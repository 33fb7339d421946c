"""The executor's contract: a step's arrays in, logits out. It knows neither requests nor OpenVINO."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trtforge.plugins.errors import EngineFailure
from trtforge.runtime.manifest import Manifest


class ExecutorLost(EngineFailure):
    """The executor cannot run again: the engine ends all requests and is no longer healthy. Any other
    exception of `run` ends the requests of that step alone.
    """


@dataclass(frozen=True)
class StepArrays:
    """The graph's inputs for one step (see docs/graph.md): T tokens of B requests, R rows of logits, G KV
    groups. One object may serve many steps, with new values in its arrays: whoever keeps it past `run` copies.
    """

    token_ids: NDArray[np.int32]  # [T]
    positions: NDArray[np.int32]  # [T]
    cos_sin: tuple[NDArray[np.float32], ...]  # per RoPE kind, [T, rotary_dim]
    slot_mapping: tuple[NDArray[np.int64], ...]  # per group, [T]: block * tokens_per_block + offset
    query_start: NDArray[np.int32]  # [B + 1]
    kv_lengths: NDArray[np.int32]  # [B]: tokens in the cache after this step
    block_tables: tuple[NDArray[np.int32], ...]  # per group, [B, max_blocks]
    logit_rows: NDArray[np.int32]  # [R]: indices into T


class Executor(Protocol):
    """Runs steps over KV pools that it owns."""

    manifest: Manifest

    def allocate(self, num_blocks: Sequence[int]) -> None:
        """Make the pools, `num_blocks[g]` blocks for group g; once, before the first run."""

    def run(self, arrays: StepArrays, meanwhile: Callable[[], None] = lambda: None) -> NDArray[np.float32]:
        """Compute one step: K and V of its tokens are written to their slots; logits FP32 [R, vocab] come
        back, valid until the next run. On an exception no caller may rely on the slots of this step.

        meanwhile: called once, in the caller's thread: while other threads compute already, where an executor can
        do that, or else before it computes.
        """

    def close(self) -> None:
        """Free pools and engine; safe to call twice."""
