"""Helpers around one real Triton that serves several toy engines; the fixture `served` starts it."""

import json
import queue
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import np_to_triton_dtype

from trtforge.model_repo.package import package
from trtforge.model_repo.serve import TritonServer
from trtforge.runtime.engine import Engine
from trtforge.runtime.executors.null import NullBehaviour, write_null_engine
from trtforge.runtime.manifest import Limits
from trtforge.runtime.request import GenerationRequest, RequestOutput, SamplingParams

LIMITS = Limits(max_batch_size=8, max_num_tokens=32, max_seq_len=2048)
STEP = 0.004  # seconds that a step of the served engines takes: time enough to join, and to go away


@dataclass
class Served:
    """A running server, and the same toy model in this process to compare with.

    Models: no prefix: decoupled; `flat_`: not decoupled, a queue of 4; `ill_`: step 40 fails; `lost_`: its executor
    is lost at step 40.
    """

    server: TritonServer
    engine: Engine

    def post(
        self, model: str, verb: str, body: dict[str, Any] | bytes, timeout: float = 30
    ) -> tuple[int, str]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.server.http_url}/v2/models/{model}/{verb}", raw)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as e:
            with e:
                return e.code, e.read().decode()

    def generate(self, model: str, body: dict[str, Any] | bytes) -> dict[str, Any]:
        status, text = self.post(model, "generate", body)
        assert status == 200, text
        answer: dict[str, Any] = json.loads(text)
        return answer

    def stream(self, model: str, body: dict[str, Any] | bytes) -> list[dict[str, Any]]:
        """The objects of the `data:` lines, read as benchmarks do."""
        status, text = self.post(model, "generate_stream", body)
        assert status == 200, text
        return [json.loads(line.removeprefix("data:")) for line in text.splitlines() if line]

    def alone(self, prompt: str | list[int], max_tokens: int, **params: Any) -> RequestOutput:
        given: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"token_ids": prompt}
        request = GenerationRequest("alone", params=SamplingParams(max_tokens=max_tokens, **params), **given)
        return self.engine.submit(request).result(timeout=30)

    def metric(self, name: str, model: str = "tensorrt_llm", **labels: str) -> float:
        with urllib.request.urlopen(self.server.metrics_url, timeout=10) as response:
            lines = response.read().decode().splitlines()
        wanted = [f'{k}="{v}"' for k, v in {"model": model, **labels}.items()]
        (line,) = [x for x in lines if x.startswith(name + "{") and all(w in x for w in wanted)]
        return float(line.split()[-1])

    def active(self, model: str = "tensorrt_llm") -> float:
        return self.metric("nv_trt_llm_request_metrics", model, request_type="active")

    def used_blocks(self, model: str = "tensorrt_llm") -> float:
        return self.metric("nv_trt_llm_kv_cache_block_metrics", model, kv_cache_block_type="used")

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 10) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not after {seconds} s: {what}"
            time.sleep(0.02)

    def wait_until_idle(self, model: str = "tensorrt_llm") -> None:
        self.wait_for(lambda: self.active(model) == 0 and self.used_blocks(model) == 0, f"{model} idle")


def write_engines(root: Path) -> Path:
    """A repository with several engines; at another place than where it was packaged."""
    first = root / "first"
    families: dict[str, tuple[NullBehaviour, dict[str, Any]]] = {
        "": (NullBehaviour(delay=STEP), {}),
        "flat": (NullBehaviour(delay=STEP), {"decoupled": False, "parameters": {"max_queue_size": "4"}}),
        "ill": (NullBehaviour(fail_steps=(40,)), {}),
        "lost": (NullBehaviour(lost_at=40), {}),
    }
    for prefix, (behaviour, options) in families.items():
        engine = root / f"engine-{prefix}"
        write_null_engine(engine, LIMITS, behaviour=behaviour)
        names = package(engine, first, prefix=prefix, **options)
        if prefix in ("ill", "lost"):
            for name in names:
                if not name.endswith(("ensemble", "_tensorrt_llm")):
                    shutil.rmtree(first / name)
        shutil.rmtree(engine)
    return first.rename(root / "moved")


class Companion:
    """A long request that runs beside a test; its text must not change."""

    def __init__(self, served: Served, model: str = "ensemble", tokens: int = 150) -> None:
        self.served, self.model, self.tokens = served, model, tokens
        self.text = ""
        self.body = {"text_input": "companion", "max_tokens": tokens, "stream": True, "ignore_eos": True}

    def __enter__(self) -> "Companion":
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.served.wait_for(lambda: self.served.active() >= 1, "the companion runs")
        return self

    def _run(self) -> None:
        self.text = "".join(d["text_output"] for d in self.served.stream(self.model, self.body))

    def __exit__(self, *_: object) -> None:
        self._thread.join(30)
        assert self.text == self.served.alone("companion", self.tokens, ignore_eos=True).text


def tensor(client: Any, name: str, data: Any) -> Any:
    array = np.asarray(data)
    t = client.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    t.set_data_from_numpy(array)
    return t


def text(value: str) -> Any:
    return np.array([[value]], dtype=object)


def stream_infer(served: Served, model: str, inputs: list[Any], **options: Any) -> list[Any]:
    """All results of one request over a gRPC stream; raises the first error."""
    results: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(served.server.grpc_url) as client:
        client.start_stream(partial(lambda q, result, error: q.put((result, error)), results))
        client.async_stream_infer(model, inputs, enable_empty_final_response=True, **options)
        seen = []
        while True:
            result, error = results.get(timeout=30)
            if error:
                raise error
            response = result.get_response()
            if response.outputs:
                seen.append(result)
            if response.parameters["triton_final_response"].bool_param:
                return seen
