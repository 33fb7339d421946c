"""Loading, unloading and loading again, and two repositories side by side."""

import json
import os
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import LIMITS, Served

from trtforge.model_repo import http_api
from trtforge.model_repo.package import package
from trtforge.model_repo.serve import TritonServer
from trtforge.runtime.engine import Engine
from trtforge.runtime.executors.null import NullBehaviour, write_null_engine

pytestmark = pytest.mark.slow

OPENED, CLOSED = "engine null is open", "engine null is closed"


@pytest.fixture(scope="module")
def controlled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    """A server that loads models when it is told to, and its log."""
    root = tmp_path_factory.mktemp("controlled")
    write_null_engine(root / "engine", LIMITS, behaviour=NullBehaviour(delay=0.004, eos_every=7))
    package(root / "engine", root / "repository")
    (root / "tree.json").write_text(json.dumps(tree(root / "repository")))
    explicit = ("--model-control-mode=explicit", "--load-model=*")
    with (
        Engine.open(root / "engine") as engine,
        TritonServer(root / "repository", arguments=explicit, log_file=root / "log") as server,
    ):
        yield Served(server, engine), root / "log"


def tree(repository: Path) -> dict[str, int]:
    return {str(p.relative_to(repository)): p.stat().st_mtime_ns for p in repository.rglob("*")}


def control(served: Served, model: str, verb: str) -> None:
    url = f"{served.server.http_url}/v2/repository/models/{model}/{verb}"
    with urllib.request.urlopen(urllib.request.Request(url, b"{}"), timeout=60) as response:
        assert response.status == 200


def is_ready(served: Served, model: str) -> bool:
    index = http_api.call(f"{served.server.http_url}/v2/repository/index", {})
    return any(m["name"] == model and m.get("state") == "READY" for m in index)


def test_a_loaded_model_is_not_loaded_twice(controlled: tuple[Served, Path]) -> None:
    served, log = controlled
    for model in ("tensorrt_llm", "ensemble", "tensorrt_llm"):
        control(served, model, "load")
    assert log.read_text().count(OPENED) == 1


def test_unload_and_load_again(controlled: tuple[Served, Path]) -> None:
    served, log = controlled
    body = {"text_input": "again", "max_tokens": 12}
    expected = served.generate("ensemble", body)["text_output"]
    opened, closed = log.read_text().count(OPENED), log.read_text().count(CLOSED)
    control(served, "tensorrt_llm", "unload")
    served.wait_for(lambda: log.read_text().count(CLOSED) == closed + 1, "it is closed", seconds=20)
    served.server.check()  # an engine that was unloaded has not failed
    assert served.used_blocks() == served.active() == 0
    status, text = served.post("ensemble", "generate", body)
    assert status == 400
    assert (
        json.loads(text)["error"]
        == "[UNAVAILABLE] the engine model 'tensorrt_llm' is not loaded; load it and try again"
    )
    control(served, "tensorrt_llm", "load")
    assert served.generate("ensemble", body)["text_output"] == expected
    assert served.generate("tensorrt_llm_bls", body)["text_output"] == expected
    assert log.read_text().count(OPENED) == opened + 1
    control(served, "ensemble", "unload")
    control(served, "ensemble", "load")
    assert served.generate("ensemble", body)["text_output"] == expected
    assert log.read_text().count(OPENED) == opened + 1


def test_requests_in_flight_end_with_an_answer_when_the_engine_is_unloaded(
    controlled: tuple[Served, Path],
) -> None:
    """Those of the text models fail at once; the engine model's own are completed, as Triton does it."""
    served, _ = controlled
    results: list[str] = []
    body = {"text_input": "x", "max_tokens": 1200, "stream": True, "ignore_eos": True}
    thread = threading.Thread(
        target=lambda: results.append(served.post("ensemble", "generate_stream", body)[1])
    )
    thread.start()
    served.wait_for(lambda: served.active() == 1, "it runs")
    control(served, "tensorrt_llm", "unload")
    thread.join(20)
    assert not thread.is_alive()
    assert "the engine model 'tensorrt_llm' was unloaded" in results[0].strip().splitlines()[-1]
    served.wait_for(lambda: not is_ready(served, "tensorrt_llm"), "it is unloaded")
    control(served, "tensorrt_llm", "load")
    assert (
        len(
            served.generate("ensemble", {"text_input": "x", "max_tokens": 4, "ignore_eos": True})[
                "text_output"
            ]
        )
        == 4
    )


def test_two_servers_with_models_of_the_same_names(controlled: tuple[Served, Path], served: Served) -> None:
    here, _ = controlled
    body = {"text_input": "which one?", "max_tokens": 60}
    texts = [s.generate("ensemble", body)["text_output"] for s in (here, served)]
    assert texts == [s.alone("which one?", 60).text for s in (here, served)]
    assert len(texts[0]) < len(texts[1])


def test_serving_leaves_the_repository_as_it_is(controlled: tuple[Served, Path]) -> None:
    """So it can be mounted read-only, and Triton never takes it for changed."""
    here, log = controlled
    assert tree(here.server.repository) == json.loads((log.parent / "tree.json").read_text())


def test_a_newer_engine_takes_over_from_a_running_one(controlled: tuple[Served, Path]) -> None:
    """Both processes have the same metrics for a while, and the older one goes last."""
    served, log = controlled
    version = served.server.repository / "tensorrt_llm" / "1"
    body = {"text_input": "take over", "max_tokens": 12}
    expected = served.generate("ensemble", body)["text_output"]
    for _ in range(3):
        closed = log.read_text().count(CLOSED)
        os.utime(version / "model.py")
        os.utime(version)
        control(served, "tensorrt_llm", "load")
        served.wait_for(
            lambda closed=closed: log.read_text().count(CLOSED) == closed + 1, "the older one is closed"
        )
        served.wait_for(lambda: served.post("ensemble", "generate", body)[0] == 200, "the newer one serves")
        served.wait_for(
            lambda: served.metric("nv_trt_llm_request_metrics", request_type="max") > 0, "it reports"
        )
    assert served.generate("ensemble", body)["text_output"] == expected
    assert served.metric("trtforge_engine_healthy") == 1
    served.server.check()
