"""How fast an engine is, beside what the machine's memory would allow."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtforge.plugins.errors import InvalidArgument
from trtforge.runtime.config import EngineConfig
from trtforge.runtime.engine import Engine
from trtforge.runtime.manifest import Manifest
from trtforge.runtime.metrics import Metrics
from trtforge.runtime.request import GenerationRequest, RequestOutput, SamplingParams

_WARM_UP_TOKENS = 4
_PARTS = ("plan", "run", "sample", "send")
_BANDWIDTH_BYTES = 256 << 20  # far beyond any cache
_BANDWIDTH_ROUNDS = 7


@dataclass(frozen=True)
class Speeds:
    """Rates are of all requests together. Latencies in milliseconds: to the first token, between tokens.

    total_s: from when all were sent to the last token.
    """

    concurrency: int
    prompt_tokens: int
    output_tokens: int
    total_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    itl_ms_p50: float
    itl_ms_p99: float

    @classmethod
    def of(cls, start: float, times: Sequence[Sequence[float]], prompt_tokens: int) -> "Speeds":
        """start: when all were sent; times: of each request's tokens; in seconds on one clock."""
        firsts = [request[0] - start for request in times]
        gaps = [b - a for request in times for a, b in pairwise(request)]
        return cls(
            concurrency=len(times),
            prompt_tokens=prompt_tokens,
            output_tokens=max(map(len, times)),
            total_s=max(request[-1] for request in times) - start,
            prefill_tokens_per_s=len(times) * prompt_tokens / max(firsts),
            decode_tokens_per_s=steady_rate(times),
            ttft_ms_p50=1e3 * percentile(firsts, 50),
            ttft_ms_p99=1e3 * percentile(firsts, 99),
            itl_ms_p50=1e3 * percentile(gaps, 50),
            itl_ms_p99=1e3 * percentile(gaps, 99),
        )

    def to_dict(self) -> dict[str, Any]:
        return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in asdict(self).items()}

    def rows(self) -> list[tuple[str, str]]:
        requests = f"{self.concurrency} x ({self.prompt_tokens} + {self.output_tokens} tokens)"
        return [
            ("requests at once", requests),
            ("all answered", f"{self.total_s:.2f} s"),
            ("prefill", f"{self.prefill_tokens_per_s:.1f} tokens/s"),
            ("decode", f"{self.decode_tokens_per_s:.1f} tokens/s"),
            ("time to first token", f"p50 {self.ttft_ms_p50:.1f} ms, p99 {self.ttft_ms_p99:.1f} ms"),
            ("between tokens", f"p50 {self.itl_ms_p50:.1f} ms, p99 {self.itl_ms_p99:.1f} ms"),
        ]

    def table(self) -> str:
        return "\n".join(f"{name:<20}  {value}" for name, value in self.rows())


@dataclass(frozen=True)
class Report(Speeds):
    """And what only the engine itself can tell.

    load_to_first_token_s: from opening the engine to the first token of the warm-up, whose prompt is as long as
    the others. bytes_per_token: what a decoded token must read: its share of the weights, which a step reads
    once for all its requests, and the K and V of its own context. bandwidth_share: that, at the rate measured,
    of read_bytes_per_s. step_ms: of a step in which all requests decode; the shares of plan, run, sample and send
    are of it, and loop_share is that of all but run.
    """

    load_to_first_token_s: float
    bytes_per_token: int
    read_bytes_per_s: float
    bandwidth_share: float
    mean_batch: float
    step_ms: float
    plan_share: float
    run_share: float
    sample_share: float
    send_share: float
    loop_share: float

    def rows(self) -> list[tuple[str, str]]:
        shares = {part: getattr(self, f"{part}_share") for part in _PARTS}
        parts = ", ".join(f"{part} {share:.1%}" for part, share in shares.items())
        ms = ", ".join(
            f"{part} {share * self.step_ms:.3f}" for part, share in shares.items() if part != "run"
        )
        return [
            *super().rows(),
            ("load to first token", f"{self.load_to_first_token_s:.2f} s"),
            ("requests in a step", f"{self.mean_batch:.1f}"),
            ("bytes per token", f"{self.bytes_per_token / 1e6:.1f} MB"),
            ("memory", f"{self.bandwidth_share:.0%} of {self.read_bytes_per_s / 1e9:.1f} GB/s read"),
            ("time of a step", parts),
            ("beside the model", f"{self.loop_share:.1%} of {self.step_ms:.2f} ms a step: {ms} ms"),
        ]


class Arrivals:
    """A sink that notes when each request's tokens came, and waits for all of them.

    metrics: asked when all requests have a token and none has ended, and again when the first one has: `steady` is
    what it gave, of these two moments if they came.
    """

    def __init__(self, count: int, metrics: Callable[[], Metrics] | None = None) -> None:
        self.times: dict[str, list[float]] = {}  # request id -> of each token, on time.perf_counter's clock
        self.steady: list[Metrics] = []
        self._metrics = metrics
        self._errors: list[Exception] = []
        self._count = self._open = count
        self._all_ended = threading.Event()

    def __call__(self, outputs: Sequence[RequestOutput]) -> None:
        now = time.perf_counter()
        for output in outputs:
            if output.token_ids:
                self.times.setdefault(output.id, []).extend([now] * len(output.token_ids))
            if output.error is not None:
                self._errors.append(output.error)
            self._open -= output.finished
        if self._metrics:
            begins = not self.steady and len(self.times) == self._open == self._count
            ends = len(self.steady) == 1 and self._open < self._count
            if begins or ends:
                self.steady.append(self._metrics())
        if self._open <= 0:
            self._all_ended.set()

    def wait(self) -> None:
        """Raises the first error of a request."""
        self._all_ended.wait()
        if self._errors:
            raise self._errors[0]


def measure(
    engine_dir: Path, config: EngineConfig, concurrency: int, prompt_tokens: int, output_tokens: int
) -> Report:
    """Run `concurrency` requests at once, after a short warm-up. Raises InvalidArgument if they cannot
    fit.
    """
    bandwidth = read_bandwidth()
    opened = time.perf_counter()
    with Engine.open(engine_dir, config) as engine:
        if concurrency > engine.limits.max_batch_size:
            raise InvalidArgument(
                f"concurrency {concurrency} is above max_batch_size {engine.limits.max_batch_size}"
            )
        prompts = np.random.default_rng(0).integers(
            0, engine.manifest.vocab_size, (concurrency + 1, prompt_tokens)
        )
        _, warm_up = _run(engine, prompts[:1], _WARM_UP_TOKENS)
        before = engine.metrics()
        start, arrivals = _run(engine, prompts[1:], output_tokens)
        after = engine.metrics()
    speeds = Speeds.of(start, list(arrivals.times.values()), prompt_tokens)
    mean_context = prompt_tokens + speeds.output_tokens // 2  # max_seq_len may have cut what was asked
    bytes_per_token = decode_bytes(engine.manifest, concurrency, mean_context)
    # With few tokens the first request may have ended when the last one begins.
    first, last = arrivals.steady if len(arrivals.steady) == 2 else (before, after)
    parts = {p: getattr(last, f"{p}_seconds") - getattr(first, f"{p}_seconds") for p in _PARTS}
    whole = sum(parts.values())
    return Report(
        **asdict(speeds),
        load_to_first_token_s=min(map(min, warm_up.times.values())) - opened,
        bytes_per_token=bytes_per_token,
        read_bytes_per_s=bandwidth,
        bandwidth_share=bytes_per_token * speeds.decode_tokens_per_s / bandwidth,
        mean_batch=(after.step_rows - before.step_rows) / (after.steps - before.steps),
        step_ms=1e3 * whole / (last.steps - first.steps),
        **{f"{part}_share": seconds / whole for part, seconds in parts.items()},
        loop_share=1 - parts["run"] / whole,
    )


def measure_server(
    send: Callable[[str, int], Iterator[str]], concurrency: int, prompt_tokens: int, output_tokens: int
) -> Speeds:
    """The same of a server, as its clients see it. send: (text, max_tokens) -> the pieces of an answer that does
    not end before; each is a token. Prompts are that many short words, which are about as many tokens.
    Raises InvalidArgument if answers do not come piece by piece.
    """
    texts = [f"{i} " + "the " * (prompt_tokens - 1) for i in range(concurrency)]

    def times(text: str) -> list[float]:
        return [time.perf_counter() for _ in send(text, output_tokens)]

    if len(list(send(texts[0], _WARM_UP_TOKENS))) < 2:
        raise InvalidArgument(
            "the server answers in one piece, so that single tokens have no times; "
            "measure the engine, or package it with --decoupled-mode true"
        )
    with ThreadPoolExecutor(concurrency) as clients:
        start = time.perf_counter()
        return Speeds.of(start, list(clients.map(times, texts)), prompt_tokens)


def _run(engine: Engine, prompts: NDArray[np.int64], output_tokens: int) -> tuple[float, Arrivals]:
    """Submit prompts [requests, tokens] together and wait for all. Gives the time of submission too."""
    params = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
    arrivals = Arrivals(len(prompts), engine.metrics)
    start = time.perf_counter()
    for i, prompt in enumerate(prompts.tolist()):
        engine.submit(GenerationRequest(f"bench-{i}", token_ids=prompt, params=params), sink=arrivals)
    arrivals.wait()
    return start, arrivals


def steady_rate(times: Sequence[Sequence[float]]) -> float:
    """Tokens per second of all requests together while all of them decode: from when the last one has its first
    token, until the first one has its last. times: of each request's tokens, in seconds."""
    start, end = max(t[0] for t in times), min(t[-1] for t in times)
    tokens = sum(start < t <= end for request in times for t in request)
    return tokens / (end - start) if tokens else 0.0


def decode_bytes(manifest: Manifest, batch: int, context: int) -> int:
    """Bytes that one decoded token must read in a step of `batch` requests with `context` tokens each."""
    weights = sum(e.bytes for name, e in manifest.files.items() if name.startswith(("model.", "weights.")))
    kv = sum(
        manifest.kv.block_bytes(g) * min(context, group.window or context)
        for g, group in enumerate(manifest.kv.groups)
    )
    return weights // batch + kv // manifest.kv.tokens_per_block


def read_bandwidth() -> float:
    """Bytes per second that all CPUs together read from memory: the median of a few rounds, as a step's is."""
    threads = len(os.sched_getaffinity(0))
    data = np.ones(_BANDWIDTH_BYTES // 8, np.int64)
    parts, seconds = np.array_split(data, threads), []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_BANDWIDTH_ROUNDS):
            start = time.perf_counter()
            list(pool.map(np.max, parts))  # releases the GIL, one pass, nothing written
            seconds.append(time.perf_counter() - start)
    return data.nbytes / median(seconds)


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile; 0 of nothing."""
    ordered = sorted(values)
    return ordered[max(0, ceil(percent / 100 * len(ordered)) - 1)] if ordered else 0.0
