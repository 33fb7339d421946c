"""Attention alone: SmolLM2-135M's, all its layers, against what the machine can read.

    python benchmarks/attention.py [--isa avx2] [--threads 2] [--rounds 15]

Requests that decode one token each at some length of context, and a prompt, over a cache of each type with random
contents and scattered blocks. A step's bytes are those of its keys, values and scales, each counted once; reading is
measured beside it. Times are the least of all rounds, since others may share the cores; the median is given beside.
One JSON line comes last.
"""

import argparse
import ctypes
import json
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtforge.plugins import cpu
from trtforge.plugins.kv_dtypes import KV_DTYPES

LAYERS, HEADS, KV_HEADS, HEAD_SIZE, BLOCK = 30, 9, 3, 64, 16
#: Requests, tokens in the cache of each, of them this step's, of them the same for all.
CASES = {"1x512": (1, 513, 1, 0), "16x512": (16, 513, 1, 0), "1x8192": (1, 8193, 1, 0)}
CASES |= {"16x1024 shared": (16, 1040, 1, 1024), "prefill 512": (1, 512, 512, 0)}
ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "fp8": 1}


@dataclass(frozen=True)
class Step:
    """The arguments of one step's attention."""

    sizes: tuple[int, ...]
    arrays: tuple[
        NDArray[Any] | None, ...
    ]  # pool, scales, q, positions, query_start, kv_lengths, tables, out
    num_bytes: int
    flops: int


def make_step(requests: int, length: int, rows: int, shared: int, kv_dtype: str) -> Step:
    rng = np.random.default_rng(1)
    blocks, common = -(-length // BLOCK), shared // BLOCK
    num_blocks = common + requests * (blocks - common)
    ids = rng.permutation(num_blocks).astype(np.int32)
    own = ids[common:].reshape(requests, blocks - common)
    tables = np.concatenate([np.tile(ids[:common], (requests, 1)), own], axis=1)
    shape, item = (num_blocks, LAYERS, 2, KV_HEADS, BLOCK), ITEM_BYTES[kv_dtype]
    # bits of small finite numbers of every type
    pool = rng.integers(0, 0x38, (*shape, HEAD_SIZE * item), np.uint8)
    scaled = KV_DTYPES[kv_dtype].scales
    positions = np.tile(np.arange(length - rows, length, dtype=np.int32), requests)
    arrays = (
        pool,
        rng.uniform(0.005, 0.02, shape).astype(np.float32) if scaled else None,
        rng.standard_normal((requests * rows, HEADS * HEAD_SIZE), np.float32),
        positions,
        np.arange(0, requests * rows + 1, rows, dtype=np.int32),
        np.full(requests, length, np.int32),
        np.ascontiguousarray(tables),
        np.empty((requests * rows, HEADS * HEAD_SIZE), np.float32),
    )
    kind = list(ITEM_BYTES).index(kv_dtype)
    sizes = (kind, num_blocks, LAYERS, KV_HEADS, BLOCK, HEAD_SIZE, len(positions), HEADS, requests, blocks)
    tokens = requests * length - (requests - 1) * shared
    num_bytes = tokens * LAYERS * 2 * KV_HEADS * (HEAD_SIZE * item + 4 * scaled)
    return Step(sizes, arrays, num_bytes, 4 * LAYERS * HEADS * HEAD_SIZE * int((positions + 1).sum()))


class Library:
    """The extension's entries for benchmarks."""

    def __init__(self, isa: str, threads: int) -> None:
        import openvino

        assert openvino.__version__  # loaded first: the extension finds its libraries by soname
        self._library, self._threads = ctypes.CDLL(str(cpu.library_path())), threads
        self._library.trtforge_cpu_isa.restype = ctypes.c_char_p
        if not self._library.trtforge_cpu_force_isa(isa.encode()):
            raise SystemExit(f"this CPU lacks {isa}")
        self.isa = self._library.trtforge_cpu_isa().decode()

    def attend(self, step: Step) -> float:
        """Seconds of all layers."""
        sizes = (ctypes.c_int64 * len(step.sizes))(*step.sizes)
        pointers = [ctypes.c_void_p(None if a is None else a.ctypes.data) for a in step.arrays]
        start = time.perf_counter()
        self._library.trtforge_cpu_paged_attention(sizes, *pointers, self._threads)
        return time.perf_counter() - start

    def read(self, buffer: NDArray[np.uint8]) -> float:
        """Seconds of reading all of a buffer."""
        start = time.perf_counter()
        self._library.trtforge_cpu_read(
            ctypes.c_void_p(buffer.ctypes.data), ctypes.c_int64(buffer.nbytes), self._threads
        )
        return time.perf_counter() - start


def measure(library: Library, names: list[str], kv_dtypes: list[str], rounds: int) -> dict[str, Any]:
    """Prints the table; gives the same in short."""
    buffer = np.ones(96 << 20, np.uint8)
    bandwidth = buffer.nbytes / min(library.read(buffer) for _ in range(rounds))
    print(f"{library.isa}: reads {bandwidth / 1e9:.1f} GB/s")
    print(f"{'case':>15} {'cache':>5} {'ms':>8} {'median':>8} {'GB/s':>6} {'share':>6} {'GFLOP/s':>8}")
    found: dict[str, Any] = {}
    for name in names:
        for kv_dtype in kv_dtypes:
            step = make_step(*CASES[name], kv_dtype)
            seconds = []
            for _ in range(rounds):
                library.read(buffer)  # a step's weights pass through the cache between two attentions
                seconds.append(library.attend(step))
            best, rate = min(seconds), step.num_bytes / min(seconds)
            print(
                f"{name:>15} {kv_dtype:>5} {best * 1e3:>8.3f} {float(np.median(seconds)) * 1e3:>8.3f} "
                f"{rate / 1e9:>6.1f} {rate / bandwidth:>6.0%} {step.flops / best / 1e9:>8.1f}"
            )
            found[f"{name} {kv_dtype}"] = {
                "ms": round(best * 1e3, 3),
                "share": round(rate / bandwidth, 3),
                "gflop_per_s": round(step.flops / best / 1e9, 1),
            }
    return {"isa": library.isa, "read_gb_per_s": round(bandwidth / 1e9, 2), "cases": found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--isa", default="", help="generic, avx2 or avx512; by default the best")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--kv-cache-dtype", nargs="+", choices=ITEM_BYTES, default=["fp32", "fp16", "int8", "fp8"]
    )
    options = parser.parse_args()
    library = Library(options.isa, options.threads)
    print(json.dumps(measure(library, options.case, options.kv_cache_dtype, options.rounds)))


if __name__ == "__main__":
    main()
