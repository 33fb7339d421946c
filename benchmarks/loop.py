"""The loop around the model: what a step costs beside the executor, at SmolLM2-135M's sizes.

    python benchmarks/loop.py [--requests 1,16,64] [--steps 300] [--rounds 5]

An executor that computes nothing stands in for the model: in each step it reads as much memory as a step of the model
would, so that the loop finds its data as cold as it does beside the real one, and hands out logits drawn beforehand.
All requests decode; the greedy ones, and those that are sampled with each of the usual cuts, run in turn. Times are
microseconds a step, the median of the rounds; `outside` is all that is not in the executor, on the wall clock. One JSON
line comes last.
"""

import argparse
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtforge.runtime.detokenizer import TokenBytes
from trtforge.runtime.engine import Engine, EngineConfig
from trtforge.runtime.executors.base import StepArrays
from trtforge.runtime.manifest import KVGroup, KVLayout, Limits, Manifest, Rope
from trtforge.runtime.request import GenerationRequest, RequestOutput, SamplingParams
from trtforge.runtime.tokenizer import Tokenizer

VOCAB, LAYERS, KV_HEADS, HEAD_SIZE, TOKENS_PER_BLOCK = 49152, 30, 3, 64, 16
READ_BYTES = 96 << 20
PROMPT_TOKENS = 64
WARM_UP = 30  # steps
PARTS = ("plan", "run", "sample", "send")

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
    "min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "penalty": {"repetition_penalty": 1.1},
    "logprobs": {"logprobs": 0},
    "stop string": {"stop": ("\n\nUser:", "###")},
}


class Stub:
    """An executor whose logits are drawn beforehand. It takes the times of the steps of all requests together."""

    def __init__(self, manifest: Manifest, requests: int, read_bytes: int) -> None:
        rng = np.random.default_rng(0)
        self.manifest = manifest
        self.engine: Engine | None = None
        self.inside: list[float] = []  # seconds in this executor, of each step
        self.outside: list[float] = []  # from there to the next step
        self.laps: list[list[float]] = []  # what the engine has counted for each of PARTS by then
        self._source = (3 * rng.standard_normal((2 * requests, VOCAB))).astype(np.float32)
        self._logits = np.empty((requests, VOCAB), np.float32)
        self._memory = np.ones(read_bytes // 8, np.int64)
        self._requests, self._returned = requests, 0.0

    def allocate(self, num_blocks: Sequence[int]) -> None:
        pass

    def run(self, arrays: StepArrays, meanwhile: Callable[[], None] = lambda: None) -> NDArray[np.float32]:
        meanwhile()
        called, rows = time.perf_counter(), len(arrays.logit_rows)
        if len(self._memory):
            self._memory.max()
        start = len(self.inside) % self._requests
        logits = self._logits[:rows]
        np.copyto(logits, self._source[start : start + rows])
        if rows == self._requests and self.engine is not None:
            self.laps.append(list(self.engine._recorder.laps.values()))
            self.outside.append(called - self._returned)
            self._returned = time.perf_counter()
            self.inside.append(self._returned - called)
        return logits

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Times:
    """Microseconds of one step."""

    outside: float
    run: float
    parts: dict[str, float]


def manifest(requests: int) -> Manifest:
    inv_freq = tuple(float(f) for f in 1e5 ** (-np.arange(0, HEAD_SIZE, 2) / HEAD_SIZE))
    return Manifest(
        target="null",
        model={"name": "stub", "vocab_size": VOCAB},
        recipe="full_prec",
        kv=KVLayout("fp16", TOKENS_PER_BLOCK, (KVGroup(tuple(range(LAYERS)), KV_HEADS, HEAD_SIZE),)),
        limits=Limits(max_batch_size=requests, max_num_tokens=8192, max_seq_len=2048),
        ropes=(Rope(inv_freq),),
        eos_token_ids=(),
    )


class Words(Tokenizer):
    """A vocabulary of made-up words; nothing is encoded."""

    def __init__(self) -> None:
        letters = np.random.default_rng(1).integers(97, 123, (VOCAB, 6), np.uint8)
        self.token_bytes = TokenBytes([b" " + bytes(word) for word in letters])


def measure(requests: int, params: dict[str, Any], steps: int, read_bytes: int, words: Words) -> Times:
    stub = Stub(manifest(requests), requests, read_bytes)
    ended, left = threading.Event(), requests

    def sink(outputs: Sequence[RequestOutput]) -> None:
        nonlocal left
        left -= sum(output.finished for output in outputs)
        if not left:
            ended.set()

    with Engine(stub, words, EngineConfig(max_queue_requests=None), (requests * 128,)) as engine:
        stub.engine = engine
        prompts = np.random.default_rng(2).integers(0, VOCAB, (requests, PROMPT_TOKENS)).tolist()
        for i, prompt in enumerate(prompts):
            asked = SamplingParams(max_tokens=WARM_UP + steps, ignore_eos=True, **{"seed": i, **params})
            engine.submit(GenerationRequest(f"r{i}", token_ids=prompt, params=asked), sink=sink)
        ended.wait()
    laps = np.diff(np.array(stub.laps[WARM_UP:]), axis=0)
    parts = dict(zip(PARTS, (1e6 * np.median(laps, axis=0)).tolist(), strict=True))
    return Times(1e6 * median(stub.outside[WARM_UP:]), 1e6 * median(stub.inside[WARM_UP:]), parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", default="1,16,64", help="how many at once; a list")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of sampling; a list")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--read-mb", type=int, default=READ_BYTES >> 20, help="what the stub reads in a step")
    args = parser.parse_args()
    cases = [(int(n), kind) for n in args.requests.split(",") for kind in args.kinds.split(",")]
    words, found = Words(), {case: list[Times]() for case in cases}
    for _ in range(args.rounds):
        for requests, kind in cases:
            times = measure(requests, KINDS[kind], args.steps, args.read_mb << 20, words)
            found[requests, kind].append(times)
    print(
        f"{'requests':>8}  {'sampling':<12}{'outside':>9}" + "".join(f"{p:>9}" for p in PARTS) + "   us/step"
    )
    lines = []
    for (requests, kind), times in found.items():
        parts = {p: median(t.parts[p] for t in times) for p in PARTS}
        outside = median(t.outside for t in times)
        columns = "".join(f"{us:9.0f}" for us in (outside, *parts.values()))
        print(f"{requests:8}  {kind:<12}{columns}")
        rounded = {f"{p}_us": round(us, 1) for p, us in parts.items()}
        lines.append({"requests": requests, "kind": kind, "outside_us": round(outside, 1), **rounded})
    print(json.dumps({"steps": args.steps, "rounds": args.rounds, "read_mb": args.read_mb, "loop": lines}))


if __name__ == "__main__":
    main()
