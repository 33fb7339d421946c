"""Clients that go away free everything, whatever their request was doing; the others' tokens do not change."""

import contextlib
import http.client
import json
import queue
import socket
import urllib.parse
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from served import LIMITS, Companion, Served

pytestmark = pytest.mark.slow

NAMES = ("tensorrt_llm", "ensemble", "tensorrt_llm_bls")
LONG_PROMPT = 1500  # tokens: at least 47 steps of prefill
MOMENTS = ("before the first token", "in mid-prefill", "in mid-stream")


def body(model: str, prompt_tokens: int) -> dict[str, Any]:
    if model.endswith("tensorrt_llm"):
        ids = {"input_ids": [65] * prompt_tokens, "input_lengths": prompt_tokens}
        return {**ids, "request_output_len": 400, "streaming": True, "ignore_eos": True}
    return {"text_input": "A" * (prompt_tokens - 1), "max_tokens": 400, "stream": True, "ignore_eos": True}


@contextlib.contextmanager
def sse(served: Served, model: str, prompt_tokens: int) -> Iterator[socket.socket]:
    """A plain HTTP client that reads events, and closes its connection at the end of the block."""
    url = urllib.parse.urlsplit(served.server.http_url)
    with socket.create_connection((url.hostname, url.port), timeout=20) as connection:
        raw = json.dumps(body(model, prompt_tokens)).encode()
        head = f"POST /v2/models/{model}/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        connection.sendall(head.encode() + raw)
        yield connection


def grpc_inputs(model: str, prompt_tokens: int) -> list[Any]:
    dtypes: dict[type, Any] = {int: np.int32, bool: np.bool_, str: np.object_, list: np.int32}
    inputs = []
    for name, value in body(model, prompt_tokens).items():
        array = np.array([value if isinstance(value, list) else [value]], dtype=dtypes[type(value)])
        kind = {np.int32: "INT32", np.bool_: "BOOL", np.object_: "BYTES"}[dtypes[type(value)]]
        inputs.append(grpcclient.InferInput(name, list(array.shape), kind))
        inputs[-1].set_data_from_numpy(array)
    return inputs


@contextlib.contextmanager
def grpc_stream(served: Served, model: str, prompt_tokens: int) -> Iterator["queue.Queue[Any]"]:
    results: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(served.server.grpc_url) as client:
        client.start_stream(lambda result, error: results.put((result, error)))
        client.async_stream_infer(model, grpc_inputs(model, prompt_tokens))
        yield results
        client.stop_stream(cancel_requests=True)


def cancelled(served: Served, model: str = "tensorrt_llm") -> float:
    return served.metric("trtforge_requests_total", model, outcome="cancelled")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("model", NAMES)
@pytest.mark.parametrize("protocol", ["sse", "grpc"])
def test_a_client_that_goes_away(served: Served, protocol: str, model: str, moment: str) -> None:
    served.wait_until_idle()
    before = cancelled(served)
    with Companion(served):
        alone = served.active()
        opened: Any = sse if protocol == "sse" else grpc_stream
        with opened(served, model, LONG_PROMPT if moment == "in mid-prefill" else 8) as connection:
            if moment == "in mid-prefill":
                blocks = 10
                served.wait_for(lambda: served.used_blocks() > blocks, "its prompt is being computed")
            elif moment == "in mid-stream":
                for _ in range(5):
                    assert connection.recv(1 << 12) if protocol == "sse" else connection.get(timeout=10)
            else:
                served.wait_for(lambda: served.active() > alone, "it has come in")
        served.wait_for(lambda: cancelled(served) == before + 1, "it is cancelled")
        assert served.active() <= alone
    served.wait_until_idle()


def test_one_that_waits_for_its_turn(served: Served) -> None:
    """More requests than a step takes: the last ones have not been scheduled when their clients leave."""
    before = cancelled(served)
    with contextlib.ExitStack() as clients:
        for _ in range(LIMITS.max_batch_size + 4):
            clients.enter_context(sse(served, "ensemble", 8))
        waiting = "nv_trt_llm_request_metrics"
        served.wait_for(lambda: served.metric(waiting, request_type="waiting") == 4, "four of them wait")
    served.wait_for(lambda: cancelled(served) == before + LIMITS.max_batch_size + 4, "all are cancelled")
    served.wait_until_idle()


@pytest.mark.parametrize("model", ["flat_tensorrt_llm", "flat_ensemble"])
def test_a_unary_grpc_call_that_is_cancelled(served: Served, model: str) -> None:
    before = cancelled(served, "flat_tensorrt_llm")
    inputs = [i for i in grpc_inputs(model, 8) if i.name() not in ("stream", "streaming")]
    done: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(served.server.grpc_url) as client:
        call = client.async_infer(model, inputs, lambda result, error: done.put((result, error)))
        served.wait_for(lambda: served.active("flat_tensorrt_llm") == 1, "it runs")
        call.cancel()
        result, error = done.get(timeout=5)
        assert result is None and "CANCELLED" in str(error)
    served.wait_for(lambda: cancelled(served, "flat_tensorrt_llm") == before + 1, "it is cancelled")
    served.wait_until_idle("flat_tensorrt_llm")


def test_a_deadline_bounds_what_cannot_be_seen_to_leave(served: Served) -> None:
    """Plain HTTP without streaming: Triton does not say that the client is gone."""
    url = urllib.parse.urlsplit(served.server.http_url)
    connection = http.client.HTTPConnection(url.netloc, timeout=10)
    raw = json.dumps({"text_input": "x", "max_tokens": 1500, "ignore_eos": True, "deadline_ms": 300})
    connection.request("POST", "/v2/models/ensemble/generate", raw)
    served.wait_for(lambda: served.active() == 1, "it runs")
    connection.close()
    served.wait_for(lambda: served.active() == 0, "its deadline has ended it")
    served.wait_until_idle()
    status, text = served.post("ensemble", "generate", raw.encode())
    assert status == 400 and json.loads(text)["error"].startswith("[DEADLINE] ")


def test_all_connections_break_at_once(served: Served, companion: Companion) -> None:
    """A storm: many clients of all names, none of which reads or says goodbye."""
    before = cancelled(served)
    for round in range(3):
        with contextlib.ExitStack() as clients:
            for i in range(12):
                opened: Any = sse if i % 2 else grpc_stream
                clients.enter_context(opened(served, NAMES[(i + round) % 3], 8 + 40 * i))
            served.wait_for(lambda: served.active() > 6, "they have come in")
    served.wait_for(lambda: served.active() <= 1, "only the companion is left")
    assert cancelled(served) > before + 18  # of 36; some were gone before they had been sent
