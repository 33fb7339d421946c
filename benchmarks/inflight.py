"""What in-flight batching is worth: the same requests, with output lengths from 8 to 256, on the same engine,

- in flight: whoever is done leaves, whoever waits joins, at every step;
- static: in batches that wait for their slowest member, each member computed until then, as padding does.

And what a long prompt does to others: the longest time that running requests wait for a token while 1,500 prompt
tokens are computed in chunks beside them, with the time of one chunk computed alone.

    python benchmarks/inflight.py ENGINE

The two run in turn, five times each; the medians count. Prints a table and one JSON line.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from trtforge.runtime.bench import Arrivals
from trtforge.runtime.engine import Engine, EngineConfig
from trtforge.runtime.request import GenerationRequest, SamplingParams

SHORTEST, LONGEST = 8, 256
PROMPT_TOKENS = 32
LONG_PROMPT = 1500


def request(engine: Engine, id: str, prompt_tokens: int, output_tokens: int) -> GenerationRequest:
    """Random tokens, seeded by the id."""
    rng = np.random.default_rng(list(id.encode()))
    prompt = rng.integers(0, engine.manifest.vocab_size, prompt_tokens).tolist()
    return GenerationRequest(
        id, token_ids=prompt, params=SamplingParams(max_tokens=output_tokens, ignore_eos=True)
    )


def run(engine: Engine, requests: Sequence[GenerationRequest]) -> float:
    """Seconds until the last of these, submitted together, has ended."""
    arrivals = Arrivals(len(requests))
    start = time.perf_counter()
    for r in requests:
        engine.submit(r, sink=arrivals)
    arrivals.wait()
    return time.perf_counter() - start


def run_static(engine: Engine, requests: Sequence[GenerationRequest], batch: int) -> float:
    """Seconds for batches one after the other, whose members all go on to the longest one's end."""
    seconds = 0.0
    for i in range(0, len(requests), batch):
        members = requests[i : i + batch]
        slowest = max(r.params.max_tokens for r in members)
        seconds += run(engine, [replace(r, params=replace(r.params, max_tokens=slowest)) for r in members])
    return seconds


def compare(engine_dir: Path, count: int, batch: int, runs: int) -> dict[str, Any]:
    """Output tokens that were asked for, per second; medians over the runs."""
    lengths = np.random.default_rng(1).integers(SHORTEST, LONGEST + 1, count).tolist()
    with Engine.open(engine_dir, EngineConfig(max_batch_size=batch, max_queue_requests=None)) as engine:
        requests = [request(engine, f"r{i}", PROMPT_TOKENS, n) for i, n in enumerate(lengths)]
        run(engine, [request(engine, f"warm-up-{i}", PROMPT_TOKENS, SHORTEST) for i in range(batch)])
        seconds: dict[str, list[float]] = {"inflight": [], "static": []}
        for _ in range(runs):
            seconds["inflight"].append(run(engine, requests))
            seconds["static"].append(run_static(engine, requests, batch))
    rates = {name: sum(lengths) / median(s) for name, s in seconds.items()}
    ratios = [s / i for s, i in zip(seconds["static"], seconds["inflight"], strict=True)]
    return {
        "requests": count,
        "batch": batch,
        "runs": runs,
        **{f"{name}_tokens_per_s": rate for name, rate in rates.items()},
        "ratio": rates["inflight"] / rates["static"],
        "ratio_lowest": min(ratios),
        "ratio_highest": max(ratios),
    }


def longest_gap(engine_dir: Path, others: int, chunk: int) -> dict[str, Any]:
    """Milliseconds between tokens of `others` requests while a long prompt joins them."""
    config = EngineConfig(max_num_tokens=chunk, max_queue_requests=None)
    with Engine.open(engine_dir, config) as engine:
        prompt_tokens = min(LONG_PROMPT, engine.limits.max_seq_len - 2)
        run(engine, [request(engine, "warm-up", chunk, 4)])
        one_chunk = run(engine, [request(engine, "chunk", chunk, 1)])
        arrivals = Arrivals(others + 1)
        running = [request(engine, f"other-{i}", PROMPT_TOKENS, LONGEST) for i in range(others)]
        for r in running:
            engine.submit(r, sink=arrivals)
        while len(arrivals.times.get(running[-1].id, ())) < 8:
            time.sleep(0.005)
        joined = time.perf_counter()
        engine.submit(request(engine, "long", prompt_tokens, 2), sink=arrivals)
        arrivals.wait()
    first = arrivals.times["long"][0]
    gaps = [(a, b - a) for r in running for a, b in pairwise(arrivals.times[r.id])]
    return {
        "chunk": chunk,
        "long_prompt": prompt_tokens,
        "gap_ms_before": 1e3 * median(gap for at, gap in gaps if at < joined),
        "gap_ms_longest": 1e3 * max(gap for at, gap in gaps if joined <= at + gap <= first),
        "one_chunk_ms": 1e3 * one_chunk,
        "long_prompt_ms": 1e3 * (first - joined),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=128, help="tokens in a step, for the second part")
    args = parser.parse_args()
    result = compare(args.engine, args.requests, args.batch, args.runs)
    print(
        f"{args.requests} requests of {SHORTEST} to {LONGEST} tokens, {args.batch} at once, {args.runs} runs"
    )
    print(f"  in flight   {result['inflight_tokens_per_s']:8.1f} tokens/s")
    print(f"  static      {result['static_tokens_per_s']:8.1f} tokens/s")
    print(
        f"  ratio       {result['ratio']:8.2f}  ({result['ratio_lowest']:.2f} to {result['ratio_highest']:.2f})"
    )
    gap = longest_gap(args.engine, args.batch - 1, args.chunk)
    print(
        f"a prompt of {gap['long_prompt']} tokens joins {args.batch - 1} requests, {args.chunk} tokens a step"
    )
    print(f"  between tokens before   {gap['gap_ms_before']:8.1f} ms")
    print(f"  longest while it joins  {gap['gap_ms_longest']:8.1f} ms")
    print(f"  one chunk alone         {gap['one_chunk_ms']:8.1f} ms")
    print(f"  the whole prompt        {gap['long_prompt_ms']:8.1f} ms")
    print(json.dumps({**result, **gap}))


if __name__ == "__main__":
    main()
