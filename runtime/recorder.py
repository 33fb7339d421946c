"""Counts what the engine's thread does, into Metrics that any thread may read."""

import threading
import time
from collections.abc import Callable
from copy import deepcopy

from trtforge.runtime.metrics import Metrics
from trtforge.runtime.output import OutputStream
from trtforge.runtime.request import FinishReason, Request, Step
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
        self._metrics = Metrics(
            max_requests=scheduler.limits.max_batch_size,
            max_blocks=min(pool.num_blocks for pool in scheduler.pools),
            tokens_per_block=scheduler.tokens_per_block,
        )

    def snapshot(self, *, healthy: bool, unseen: int) -> Metrics:
        """unseen: requests that wait and that the scheduler does not have yet."""
        with self._lock:
            metrics = deepcopy(self._metrics)
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

    def lap(self) -> Callable[[str], None]:
        """A watch: called with plan, run, sample or send, it adds the time since the call before to that."""
        last = time.perf_counter()

        def lap(part: str) -> None:
            nonlocal last
            now = time.perf_counter()
            name = f"{part}_seconds"
            with self._lock:
                setattr(self._metrics, name, getattr(self._metrics, name) + now - last)
            last = now

        return lap

    def planned(self, step: Step) -> None:
        """A step is about to run."""
        now = time.monotonic_ns()
        for row in step.rows:
            row.request.first_scheduled_ns = row.request.first_scheduled_ns or now

    def stepped(self, step: Step) -> None:
        """A step has run and is about to be committed."""
        m = self._metrics
        slots = sum(pool.num_used for pool in self._scheduler.pools) * self._scheduler.tokens_per_block
        filled = sum(_filled_slots(r, self._scheduler.tokens_per_block) for r in self._scheduler.running)
        with self._lock:
            m.steps += 1
            m.step_rows += len(step.rows)
            m.computed_tokens += step.num_tokens
            m.context_tokens = sum(r.count for r in step.rows if r.start < len(r.request.prompt_ids))
            m.used_slots += slots
            m.wasted_slots += slots - filled

    def given(self, stream: OutputStream, num_new: int) -> None:
        """`num_new` tokens of a request are given out; it may have ended."""
        m, request = self._metrics, stream.request
        with self._lock:
            m.output_tokens += num_new
            if num_new and stream.num_given == num_new:
                m.ttft_seconds.observe(stream.latency_ns / 1e9)
            elif num_new:
                m.inter_token_seconds.observe(stream.latency_ns / 1e9 / num_new, num_new)
            if request.finish_reason is not None:
                self._ended(stream)

    def publish(self) -> None:
        """The gauges, as the scheduler stands now."""
        m, s = self._metrics, self._scheduler
        fullest = max(s.pools, key=lambda pool: pool.num_used / pool.num_blocks)
        context = sum(not r.output_ids for r in s.running)
        with self._lock:
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


def _filled_slots(request: Request, tokens_per_block: int) -> int:
    """Slots of all groups in which a token of the request is, or is about to be."""
    return sum(min(request.num_tokens, len(table) * tokens_per_block) for table in request.block_tables)
