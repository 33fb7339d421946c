"""Counts what the engine's thread does, into Metrics that any thread may read."""

import threading
import time
from collections.abc import Sequence
from copy import deepcopy

from trtforge.runtime.metrics import Metrics
from trtforge.runtime.output import OutputStream
from trtforge.runtime.request import FinishReason, Step
from trtforge.runtime.scheduler import Scheduler

#: How much the latest request weighs in the mean time that a request takes.
_SMOOTHING = 0.1
_RETRY_MS = (100, 60_000)


class Recorder:
    """Reads the scheduler's state between two steps. Only `refused`, `snapshot` and `retry_after_ms` may be
    called from other threads than the engine's.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._lock = threading.Lock()
        self._seconds_per_request = 1.0
        self._last_lap = 0.0
        self.laps = {"plan": 0.0, "run": 0.0, "sample": 0.0, "send": 0.0}  # seconds
        self._metrics = Metrics(
            max_requests=scheduler.limits.max_batch_size,
            max_blocks=min(pool.num_blocks for pool in scheduler.pools),
            tokens_per_block=scheduler.tokens_per_block,
        )

    def snapshot(self, *, healthy: bool, unseen: int) -> Metrics:
        """unseen: requests that wait and that the scheduler does not have yet."""
        with self._lock:
            metrics = deepcopy(self._metrics)
        metrics.plan_seconds, metrics.run_seconds, metrics.sample_seconds, metrics.send_seconds = (
            self.laps.values()
        )
        metrics.healthy = healthy
        metrics.waiting_requests += unseen
        return metrics

    def refused(self) -> None:
        with self._lock:
            self._metrics.requests_refused += 1

    def retry_after_ms(self, queued: int) -> int:
        """When a place may be free: the time that a request has taken lately, for each batch before this
        one.
        """
        batches = 1 + queued // self._scheduler.limits.max_batch_size
        low, high = _RETRY_MS
        return int(min(max(low, 1000 * self._seconds_per_request * batches), high))

    def start(self) -> None:
        """The engine's thread goes to work: the first lap begins."""
        self._last_lap = time.perf_counter()

    def lap(self, part: str) -> None:
        """The time since the lap before was for plan, run, sample or send."""
        now = time.perf_counter()
        self.laps[part] += now - self._last_lap
        self._last_lap = now

    def planned(self, step: Step) -> None:
        """A step is about to run."""
        for row in step.rows:
            if not row.request.first_scheduled_ns:
                row.request.first_scheduled_ns = time.monotonic_ns()

    def stepped(self, step: Step) -> None:
        """A step has run and is about to be committed."""
        m, pools = self._metrics, self._scheduler.pools
        slots = sum(pool.num_used for pool in pools) * self._scheduler.tokens_per_block
        # Every running request has blocks for all its tokens in every group, if it has a row or not.
        filled = sum(len(r.prompt_ids) + len(r.output_ids) for r in self._scheduler.running) * len(pools)
        prompt_tokens = sum(r.count for r in step.rows if r.start < len(r.request.prompt_ids))
        with self._lock:
            m.steps += 1
            m.step_rows += len(step.rows)
            m.computed_tokens += step.num_tokens
            m.context_tokens = prompt_tokens
            m.used_slots += slots
            m.wasted_slots += slots - filled

    def given(self, streams: Sequence[tuple[OutputStream, int]]) -> None:
        """So many new tokens of each request are given out; it may have ended. Then the gauges, as the scheduler
        stands now.
        """
        m = self._metrics
        with self._lock:
            for stream, num_new in streams:
                m.output_tokens += num_new
                if num_new and stream.num_given == num_new:
                    m.ttft_seconds.observe(stream.latency_ns / 1e9)
                elif num_new:
                    m.inter_token_seconds.observe(stream.latency_ns / 1e9 / num_new, num_new)
                if stream.request.finish_reason is not None:
                    self._ended(stream)
            self._publish()

    def _publish(self) -> None:
        m, s = self._metrics, self._scheduler
        fullest = max(s.pools, key=lambda pool: pool.num_used / pool.num_blocks)
        context = sum(not r.output_ids for r in s.running)
        m.waiting_requests = len(s.waiting)
        m.paused_requests = sum(r.num_preemptions > 0 for r in s.waiting) if s.num_preemptions else 0
        m.context_requests = context
        m.generation_requests = len(s.running) - context
        m.max_blocks = fullest.num_blocks
        m.used_blocks = fullest.num_used
        m.peak_used_blocks = max(pool.peak_used for pool in s.pools)
        m.preemptions = s.num_preemptions
        if not s.running:
            m.context_tokens = 0

    def _ended(self, stream: OutputStream) -> None:
        m, request = self._metrics, stream.request
        if request.finish_reason is FinishReason.ERROR:
            m.requests_failed += 1
        elif request.finish_reason is FinishReason.CANCELLED:
            m.requests_cancelled += 1
        else:
            m.requests_finished += 1
            seconds = time.monotonic() - request.arrival
            self._seconds_per_request += _SMOOTHING * (seconds - self._seconds_per_request)
        m.prompt_tokens += len(request.prompt_ids)
        m.input_token_len.observe(len(request.prompt_ids))
        m.output_token_len.observe(stream.num_given)
