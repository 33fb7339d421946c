"""The engine's counters as Triton metrics: the `nv_trt_llm_*` and `nv_llm_*` families that load balancers read by
name, and ours beside them. Each update of a metric is a message to the server, so they are sent a few times a
second, and only those that changed.
"""

import ctypes
import math
import os
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtforge.runtime.metrics import SECOND_BOUNDS, TOKEN_BOUNDS, Metrics
from trtforge.runtime.request import RequestOutput


@dataclass(frozen=True)
class Family:
    """label: the label that tells its metrics apart; values: label value -> what to read."""

    name: str
    kind: str  # GAUGE or COUNTER
    description: str
    label: str
    values: dict[str, Callable[[Metrics], float]]


def resident_bytes(_: Metrics) -> float:
    """Of this process; the second field of statm counts pages."""
    return float(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def none(_: Metrics) -> float:
    return 0.0


def used_share(m: Metrics) -> float:
    return m.used_blocks / m.max_blocks if m.max_blocks else 0.0


FAMILIES = (
    Family(
        "nv_trt_llm_request_metrics",
        "GAUGE",
        "TRT LLM request metrics",
        "request_type",
        {
            "active": lambda m: m.active_requests,
            "max": lambda m: m.max_requests,
            "scheduled": lambda m: m.running_requests,
            "context": lambda m: m.context_requests,
            "waiting": lambda m: m.waiting_requests,
        },
    ),
    Family(
        "nv_trt_llm_runtime_memory_metrics",
        "GAUGE",
        "TRT LLM runtime memory metrics",
        "memory_type",
        {"cpu": resident_bytes, "gpu": none, "pinned": none},
    ),
    Family(
        "nv_trt_llm_kv_cache_block_metrics",
        "GAUGE",
        "TRT LLM KV cache block metrics",
        "kv_cache_block_type",
        {
            "max": lambda m: m.max_blocks,
            "free": lambda m: m.free_blocks,
            "used": lambda m: m.used_blocks,
            "tokens_per": lambda m: m.tokens_per_block,
            "reused": lambda m: m.reused_blocks,
            "fraction": used_share,
        },
    ),
    Family(
        "nv_trt_llm_inflight_batcher_metrics",
        "GAUGE",
        "TRT LLM inflight_batcher-specific metrics",
        "inflight_batcher_specific_metric",
        {
            "total_context_tokens": lambda m: m.context_tokens,
            "generation_requests": lambda m: m.generation_requests,
            "micro_batch_id": none,
            "paused_requests": lambda m: m.paused_requests,
        },
    ),
    Family(
        "nv_trt_llm_general_metrics",
        "GAUGE",
        "General TRT LLM metrics",
        "general_type",
        {"timestamp": lambda _: math.floor(time.time()), "iteration_counter": lambda m: m.steps},
    ),
    Family(
        "nv_trt_llm_disaggregated_serving_metrics",
        "COUNTER",
        "TRT LLM disaggregated serving metrics",
        "disaggregated_serving_type",
        {"kv_cache_transfer_ms": none, "request_count": none},
    ),
    Family(
        "trtforge_engine_healthy",
        "GAUGE",
        "1 while the engine's thread runs",
        "",
        {"": lambda m: float(m.healthy)},
    ),
    Family(
        "trtforge_requests_total",
        "COUNTER",
        "Requests that ended, by how",
        "outcome",
        {
            "finished": lambda m: m.requests_finished,
            "failed": lambda m: m.requests_failed,
            "cancelled": lambda m: m.requests_cancelled,
            "refused": lambda m: m.requests_refused,
        },
    ),
    Family(
        "trtforge_steps_total",
        "COUNTER",
        "Steps, and the requests summed over them; their quotient is the mean batch",
        "count",
        {"steps": lambda m: m.steps, "requests": lambda m: m.step_rows},
    ),
    Family(
        "trtforge_tokens_total",
        "COUNTER",
        "Tokens, by kind",
        "kind",
        {
            "prompt": lambda m: m.prompt_tokens,
            "output": lambda m: m.output_tokens,
            "computed": lambda m: m.computed_tokens,
            "prefix_hit": lambda m: m.prefix_hit_tokens,
        },
    ),
    Family("trtforge_preemptions_total", "COUNTER", "Requests put back", "", {"": lambda m: m.preemptions}),
    Family(
        "trtforge_step_seconds_total",
        "COUNTER",
        "Time in steps, by phase",
        "phase",
        {
            "plan": lambda m: m.plan_seconds,
            "run": lambda m: m.run_seconds,
            "sample": lambda m: m.sample_seconds,
            "send": lambda m: m.send_seconds,
        },
    ),
)


@dataclass(frozen=True)
class Distribution:
    """One observation for each request that ended; read gives None for one that has none."""

    name: str
    description: str
    labels: dict[str, str]
    bounds: Sequence[float]
    read: Callable[[RequestOutput], float | None]


def first_token_seconds(o: RequestOutput) -> float | None:
    t = o.timings
    return (t["first_token_ns"] - t["arrival_ns"]) / 1e9 if "first_token_ns" in t else None


def seconds_per_token(o: RequestOutput) -> float | None:
    t, tokens = o.timings, o.num_output_tokens - 1
    return (
        (t["last_token_ns"] - t["first_token_ns"]) / 1e9 / tokens
        if "last_token_ns" in t and tokens > 0
        else None
    )


DISTRIBUTIONS = (
    Distribution(
        "nv_llm_input_token_len",
        "Prompt tokens of a request",
        {"response_metric_type": "total_input_tokens"},
        TOKEN_BOUNDS,
        lambda o: o.num_prompt_tokens,
    ),
    Distribution(
        "nv_llm_output_token_len",
        "Output tokens of a request",
        {"response_metric_type": "total_output_tokens"},
        TOKEN_BOUNDS,
        lambda o: o.num_output_tokens,
    ),
    Distribution("trtforge_ttft_seconds", "Time to the first token", {}, SECOND_BOUNDS, first_token_seconds),
    Distribution(
        "trtforge_seconds_per_token",
        "Mean time of a request's later tokens",
        {},
        SECOND_BOUNDS,
        seconds_per_token,
    ),
)


#: Of gauges that have not changed.
UPDATES_PER_REFRESH = 10


class Reporter:
    """Keeps Triton's metrics equal to the engine's. `pb_utils` is the backend's module."""

    def __init__(self, pb_utils: Any, model: str, version: str) -> None:
        own = {"model": model, "version": version}
        self._values: list[tuple[str, Any, Callable[[Metrics], float]]] = []
        self._sent: dict[int, float] = {}
        self._updates = 0
        self._families = []  # a metric lives as long as its family
        for f in FAMILIES:
            family = pb_utils.MetricFamily(
                name=f.name, description=f.description, kind=getattr(pb_utils.MetricFamily, f.kind)
            )
            self._families.append(family)
            for value, read in f.values.items():
                labels = own | ({f.label: value} if f.label else {})
                self._values.append((f.kind, family.Metric(labels=labels), read))
        self._distributions: list[tuple[Any, Distribution]] = []
        for d in DISTRIBUTIONS:
            family = pb_utils.MetricFamily(
                name=d.name, description=d.description, kind=pb_utils.MetricFamily.HISTOGRAM
            )
            self._families.append(family)
            buckets = [float(b) for b in d.bounds]
            self._distributions.append((family.Metric(labels=own | d.labels, buckets=buckets), d))
        self._ended: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()

    def ended(self, output: RequestOutput) -> None:
        """A request ended, by its last output; returns at once, the next update counts it."""
        if output.error is None:
            self._ended.put(output)

    def update(self, metrics: Metrics) -> None:
        """Gauges are sent again now and then: an older process of the same model has the same metrics, and writes
        them as it ends."""
        self._updates += 1
        again = self._updates % UPDATES_PER_REFRESH == 0
        for i, (kind, metric, read) in enumerate(self._values):
            value, sent = float(read(metrics)), self._sent.get(i)
            if kind == "GAUGE" and (again or value != sent):
                metric.set(value)
            elif kind == "COUNTER" and value != (sent or 0.0):
                metric.increment(value - (sent or 0.0))
            self._sent[i] = value
        while not self._ended.empty():
            output = self._ended.get()
            for metric, d in self._distributions:
                if (seen := d.read(output)) is not None:
                    metric.observe(float(seen))

    def abandon(self) -> None:
        """Leave the metrics on Triton's page when the process ends.

        Freed then, they crash it, for what they tell the server with is gone; freed before, they take the values from
        under a newer process of the same model, which crashes the server.
        """
        metrics = [m for _, m, _ in self._values] + [m for m, _ in self._distributions]
        for held in (*metrics, *self._families):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
