"""In-flight batching through Triton: steps are shared, and nobody's tokens depend on it. And the metrics."""

import threading
import urllib.request
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from served import Served, stream_infer, tensor

pytestmark = pytest.mark.slow

LENGTHS = [(1 + 7 * i % 60, 4 + 11 * i % 50) for i in range(32)]  # characters of the prompt, new tokens


@pytest.mark.parametrize("protocol", ["grpc", "sse"])
def test_32_mixed_requests_equal_each_alone(served: Served, protocol: str) -> None:
    served.wait_until_idle()
    steps = [served.metric("trtforge_steps_total", count=c) for c in ("steps", "requests")]
    texts: list[str] = [""] * len(LENGTHS)

    def run(i: int) -> None:
        prompt, tokens = chr(97 + i % 26) * LENGTHS[i][0], LENGTHS[i][1]
        model = "ensemble" if i % 2 else "tensorrt_llm_bls"
        if protocol == "sse":
            body = {"text_input": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
            texts[i] = "".join(x["text_output"] for x in served.stream(model, body))
            return
        inputs = {
            "text_input": np.array([[prompt]], dtype=object),
            "max_tokens": np.array([[tokens]], np.int32),
            "stream": np.array([[True]]),
            "ignore_eos": np.array([[True]]),
        }
        results = stream_infer(served, model, [tensor(grpcclient, n, a) for n, a in inputs.items()])
        texts[i] = "".join(r.as_numpy("text_output")[0].decode() for r in results)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(LENGTHS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    alone = [
        served.alone(chr(97 + i % 26) * n, tokens, ignore_eos=True).text
        for i, (n, tokens) in enumerate(LENGTHS)
    ]
    assert texts == alone
    served.wait_until_idle()
    after = [served.metric("trtforge_steps_total", count=c) for c in ("steps", "requests")]
    count, rows = (a - s for a, s in zip(after, steps, strict=True))
    assert rows / count > 2.5, (rows, count)


EXACT = {
    "nv_trt_llm_request_metrics": ("request_type", {"active", "max", "scheduled", "context", "waiting"}),
    "nv_trt_llm_runtime_memory_metrics": ("memory_type", {"cpu", "gpu", "pinned"}),
    "nv_trt_llm_kv_cache_block_metrics": (
        "kv_cache_block_type",
        {"max", "free", "used", "tokens_per", "reused", "fraction"},
    ),
    "nv_trt_llm_inflight_batcher_metrics": (
        "inflight_batcher_specific_metric",
        {"total_context_tokens", "generation_requests", "micro_batch_id", "paused_requests"},
    ),
    "nv_trt_llm_general_metrics": ("general_type", {"timestamp", "iteration_counter"}),
    "nv_trt_llm_disaggregated_serving_metrics": (
        "disaggregated_serving_type",
        {"kv_cache_transfer_ms", "request_count"},
    ),
}


def samples(served: Served) -> dict[str, list[dict[str, str]]]:
    with urllib.request.urlopen(served.server.metrics_url) as response:
        lines = response.read().decode().splitlines()
    found: dict[str, list[dict[str, str]]] = {}
    for line in lines:
        if line.startswith(("nv_", "trtforge_")) and "{" in line:
            name, rest = line.split("{", 1)
            labels = dict(x.split("=", 1) for x in rest.rsplit("}", 1)[0].split(","))
            found.setdefault(name, []).append(
                {k: v.strip('"') for k, v in labels.items()} | {"": line.split()[-1]}
            )
    return found


def test_metrics_have_the_names_that_load_balancers_read(served: Served) -> None:
    found = samples(served)
    for name, (label, values) in EXACT.items():
        ours = [s for s in found[name] if s["model"] == "tensorrt_llm"]
        assert {s[label] for s in ours} == values
        assert all(set(s) == {"", "model", "version", label} for s in ours)


def test_lengths_are_observed_once_a_request(served: Served) -> None:
    def observed() -> list[float]:
        return [
            served.metric(f"nv_llm_{which}_token_len_{what}", response_metric_type=f"total_{which}_tokens")
            for which in ("input", "output")
            for what in ("count", "sum")
        ]

    served.wait_until_idle()
    before = observed()
    answer: dict[str, Any] = served.generate(
        "ensemble", {"text_input": "seven77", "max_tokens": 5, "return_num_input_tokens": True}
    )
    assert answer["num_input_tokens"] == 8
    after = [a + b for a, b in zip(before, [1, 8, 1, 5], strict=True)]
    served.wait_for(lambda: observed() == after, "both are counted")
