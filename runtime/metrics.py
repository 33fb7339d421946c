"""What the engine counts: a snapshot that Triton's metrics, `--stats` and `bench` read.

Standard library only.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

#: Upper bounds of the histograms; the last bucket has none.
TOKEN_BOUNDS = (10, 50, 100, 500, 1000)  # facts/protocol: nv_llm_{input,output}_token_len
SECOND_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass
class Histogram:
    """Counts per bucket (not cumulative; the last has no bound) and the sum of what was observed."""

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass
class Metrics:
    """Gauges of this moment and counters since the engine opened.

    Blocks are those of the fullest KV group (one with every group alike in use is any of them).
    """

    healthy: bool = True
    # requests
    max_requests: int = 0  # max_batch_size
    waiting_requests: int = 0
    paused_requests: int = 0  # of the waiting ones, those that were preempted
    context_requests: int = 0  # running, still computing their prompt
    generation_requests: int = 0  # running, past their prompt
    context_tokens: int = 0  # prompt tokens in the latest step
    # KV blocks
    max_blocks: int = 0
    used_blocks: int = 0
    peak_used_blocks: int = 0
    tokens_per_block: int = 0
    reused_blocks: int = 0
    # counters
    steps: int = 0
    step_rows: int = 0  # requests summed over steps
    prompt_tokens: int = 0  # of the requests that ended
    output_tokens: int = 0  # tokens given out
    computed_tokens: int = 0  # tokens that went through the executor, recomputed ones too
    preemptions: int = 0
    swapped_blocks: int = 0
    prefix_hit_tokens: int = 0
    requests_finished: int = 0
    requests_failed: int = 0
    requests_cancelled: int = 0
    requests_refused: int = 0
    used_slots: int = 0  # token slots of used blocks, summed over steps
    wasted_slots: int = 0  # of them, those that no token of their request fills
    # seconds, summed over steps
    plan_seconds: float = 0.0
    run_seconds: float = 0.0
    sample_seconds: float = 0.0
    send_seconds: float = 0.0
    # distributions
    input_token_len: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS))
    output_token_len: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS))
    ttft_seconds: Histogram = field(default_factory=lambda: Histogram(SECOND_BOUNDS))
    inter_token_seconds: Histogram = field(default_factory=lambda: Histogram(SECOND_BOUNDS))

    @property
    def running_requests(self) -> int:
        return self.context_requests + self.generation_requests

    @property
    def active_requests(self) -> int:
        return self.running_requests + self.waiting_requests

    @property
    def free_blocks(self) -> int:
        return self.max_blocks - self.used_blocks

    @property
    def mean_batch(self) -> float:
        """Requests per step."""
        return self.step_rows / self.steps if self.steps else 0.0

    @property
    def kv_waste(self) -> float:
        """Share of the slots in used blocks that held nothing, over all steps."""
        return self.wasted_slots / self.used_slots if self.used_slots else 0.0

    def stats(self) -> dict[str, Any]:
        """What `generate --stats` writes."""
        return {
            "steps": self.steps,
            "preemptions": self.preemptions,
            "swapped_blocks": self.swapped_blocks,
            "prefix_hit_tokens": self.prefix_hit_tokens,
            "peak_used_blocks": self.peak_used_blocks,
            "final_used_blocks": self.used_blocks,
            "max_blocks": self.max_blocks,
            "mean_batch": self.mean_batch,
            "kv_waste": self.kv_waste,
        }

    def to_dict(self) -> dict[str, Any]:
        """Every field, plain values only: for a socket or a JSON line."""
        return asdict(self)
