"""The CPU engine inside a real Triton: the same tokens as in this process, whoever else is in the step."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from served import Served

from trtforge.model_repo.package import package
from trtforge.model_repo.serve import TritonServer
from trtforge.runtime.engine import Engine

pytestmark = pytest.mark.slow

#: Prompt ids and new tokens, of lengths that join and leave at different steps.
REQUESTS = [([3 + (i * j) % 50 for j in range(1, 2 + 5 * i % 37)], 4 + 7 * i % 29) for i in range(16)]


def test_mixed_requests_through_triton_equal_each_alone(
    tiny_engine: Callable[..., Path], tmp_path: Path
) -> None:
    directory = tiny_engine("llama", max_num_tokens=64)
    package(directory, tmp_path / "repository")
    answers: list[list[int]] = [[] for _ in REQUESTS]
    with Engine.open(directory) as engine, TritonServer(tmp_path / "repository") as server:
        served = Served(server, engine)

        def run(i: int) -> None:
            ids, tokens = REQUESTS[i]
            body = {"input_ids": ids, "input_lengths": len(ids), "request_output_len": tokens, "end_id": -1}
            for line in served.stream("tensorrt_llm", {**body, "streaming": True}):
                new = line["output_ids"]
                answers[i] += new if isinstance(new, list) else [new]

        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(REQUESTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        alone = [served.alone(ids, tokens, stop_token_ids=()).token_ids for ids, tokens in REQUESTS]
        assert [tuple(a) for a in answers] == alone
        served.wait_until_idle()
        steps, rows = (served.metric("trtforge_steps_total", count=c) for c in ("steps", "requests"))
        assert rows / steps > 1.5
