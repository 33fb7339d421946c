"""What `peers.py` runs in a peer's own environment, which has no trtforge: some requests through a Python library.

    python benchmarks/peer_worker.py openvino|transformers MODEL.gguf THREADS REQUESTSxPROMPT+OUTPUT...

Prints one JSON line: of each of the shapes `total_s`, and of a single request the rates of prefill and decode too.

OpenVINO GenAI, with continuous batching, reads the GGUF file itself. It keeps nibbles and scales as they are, but
makes a 4-bit integer zero point of the minimum of a Q4_1 block. Transformers dequantizes the weights to FP32; its loop
here is greedy, over forward passes with a cache, which is less work than its `generate`.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

WARM_UP_TOKENS = 4
VOCABULARY = 49152

#: (prompts [requests, tokens], output tokens) -> seconds to the first request's first token, and to the end of all.
Generate = Callable[[Any, int], tuple[float, float]]


def open_openvino(model: Path, threads: int) -> Generate:
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1  # GB
    scheduler.max_num_batched_tokens = 2048  # of 256, 512 and 2048 the fastest here
    scheduler.enable_prefix_caching = False
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})

    def generate(prompts: Any, tokens: int) -> tuple[float, float]:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = tokens
        config.ignore_eos, config.do_sample = True, False
        inputs = [openvino.Tensor(np.ascontiguousarray(prompt[None])) for prompt in prompts]
        start = time.perf_counter()
        results = pipeline.generate(inputs, [config] * len(inputs))
        seconds = time.perf_counter() - start
        assert all(len(r.m_generation_ids[0]) == tokens for r in results), "not all tokens came"
        return results[0].perf_metrics.get_ttft().mean / 1e3, seconds

    return generate


def open_transformers(model: Path, threads: int) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(threads)
    network = AutoModelForCausalLM.from_pretrained(
        model.parent, gguf_file=model.name, dtype=torch.float32
    ).eval()

    @torch.inference_mode()
    def generate(prompts: Any, tokens: int) -> tuple[float, float]:
        inputs, cache = torch.from_numpy(prompts), DynamicCache(config=network.config)
        start, first = time.perf_counter(), 0.0
        for _ in range(tokens):
            logits = network(input_ids=inputs, cache=cache, use_cache=True, logits_to_keep=1).logits
            inputs = logits[:, -1].argmax(-1, keepdim=True)
            first = first or time.perf_counter() - start
        return first, time.perf_counter() - start

    return generate


def run(generate: Generate, requests: int, prompt: int, output: int) -> dict[str, float]:
    prompts = np.random.default_rng(0).integers(
        0, VOCABULARY, (requests + 1, prompt)
    )  # as trtforge bench does
    generate(prompts[:1].repeat(requests, 0), WARM_UP_TOKENS)
    first, total = generate(prompts[1:], output)
    if requests > 1:
        return {"total_s": total}
    rates = {
        "prefill_tokens_per_s": prompt / first,
        "decode_tokens_per_s": (output - 1) / (total - first),
    }
    return {"total_s": total, **rates}


def main() -> None:
    library, model, threads, *shapes = sys.argv[1:]
    openers = {"openvino": open_openvino, "transformers": open_transformers}
    generate = openers[library](Path(model), int(threads))
    numbers = {shape: shape.replace("x", " ").replace("+", " ").split() for shape in shapes}
    print(json.dumps({shape: run(generate, *map(int, of)) for shape, of in numbers.items()}))


if __name__ == "__main__":
    main()
