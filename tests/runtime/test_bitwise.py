"""A request's tokens and logprobs are the same bits alone, in any batch, in any chunking, and after preemption."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest

from trtforge.plugins.cpu import native_host
from trtforge.plugins.cpu.native_host import NativeHost
from trtforge.runtime.config import EngineConfig
from trtforge.runtime.engine import Engine
from trtforge.runtime.request import GenerationRequest, SamplingParams

Answer = tuple[tuple[int, ...], tuple[float, ...]]

REQUESTS = 7


def requests(rng: np.random.Generator) -> list[GenerationRequest]:
    """Of several lengths, greedy and sampled."""
    made = []
    for i in range(REQUESTS):
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 24)),
            temperature=float(rng.choice([0.0, 0.9])),
            seed=i,
            ignore_eos=True,
            logprobs=2,
        )
        prompt = checkpoints.prompt_ids(int(rng.integers(1, 40)), seed=i)
        made.append(GenerationRequest(id=str(i), token_ids=prompt, params=params))
    return made


def run(engine_dir: Path, asked: list[GenerationRequest], **config: Any) -> tuple[dict[str, Answer], Any]:
    """Each one's tokens and all its logprobs, chosen and alternatives, and the engine's counters."""
    with Engine.open(engine_dir, EngineConfig(threads=2, check_integrity=True, **config)) as engine:
        streams = [engine.submit(request) for request in asked]
        answers = {}
        for stream in streams:
            outputs = list(stream)
            assert outputs[-1].error is None
            tokens = tuple(t for o in outputs for t in o.token_ids)
            logprobs = [lp for o in outputs for lp in o.logprobs]
            answers[stream.id] = (
                tokens,
                tuple(x for lp in logprobs for x in (lp.logprob, *(p for _, p in lp.top))),
            )
        return answers, engine.metrics()


@pytest.fixture(params=["int8", "fp32"])
def engine(request: pytest.FixtureRequest, tiny_engine: Callable[..., Path]) -> Path:
    """By the kind of activations; with a window, so that there are two KV groups."""
    return tiny_engine(
        "gemma3", recipe="int4_wo", activations=request.param, kv_cache_dtype="int8", tokens_per_block=8
    )


@pytest.fixture
def alone(engine: Path) -> tuple[list[GenerationRequest], dict[str, Answer]]:
    asked = requests(np.random.default_rng(5))
    answers: dict[str, Answer] = {}
    for request in asked:
        answers |= run(engine, [request])[0]
    assert sum(len(tokens) for tokens, _ in answers.values()) > 50
    return asked, answers


def test_random_batches_and_chunks_give_the_bits_of_requests_alone(
    engine: Path, alone: tuple[list[GenerationRequest], dict[str, Answer]]
) -> None:
    asked, wanted = alone
    rng = np.random.default_rng(11)
    mean_batches, preemptions = [], 0
    for _ in range(12):
        chosen = [asked[i] for i in rng.permutation(REQUESTS)[: rng.integers(2, REQUESTS + 1)]]
        config = {
            "max_num_tokens": int(rng.choice([8, 11, 64])),
            "max_batch_size": int(rng.choice([2, 3, 8])),
            "kv_cache_tokens": int(rng.choice([72, 512])),
        }
        found, metrics = run(engine, chosen, **config)
        assert found == {r.id: wanted[r.id] for r in chosen}, config
        mean_batches.append(metrics.mean_batch)
        preemptions += metrics.preemptions
    assert max(mean_batches) > 2 and preemptions > 0, "runs that mixed nothing"


def test_an_order_of_sums_that_depends_on_the_batch_is_seen(
    engine: Path, alone: tuple[list[GenerationRequest], dict[str, Answer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another instruction set adds in another order: here a step takes one by how many requests there are."""
    library, run_step = native_host.library(), NativeHost.run

    def disturbed(host: NativeHost, arrays: Mapping[str, Any]) -> Any:
        library.trtforge_host_force_isa(b"generic" if len(arrays["kv_lengths"]) > 1 else b"")
        return run_step(host, arrays)

    if library.trtforge_host_isa() == b"generic":
        pytest.skip("this CPU has one set of kernels")
    monkeypatch.setattr(NativeHost, "run", disturbed)
    try:
        asked, wanted = alone
        found, _ = run(engine, asked)
        assert found != wanted
    finally:
        library.trtforge_host_force_isa(b"")


def test_one_unit_in_the_last_place_is_seen(
    engine: Path, alone: tuple[list[GenerationRequest], dict[str, Answer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one logit of each request, the best one, when it is not alone."""
    run_step = NativeHost.run

    def nudged(host: NativeHost, arrays: Mapping[str, Any]) -> Any:
        logits = run_step(host, arrays).copy()
        if len(arrays["kv_lengths"]) > 1:
            best = np.arange(len(logits)), logits.argmax(axis=1)
            logits[best] = np.nextafter(logits[best], np.float32(np.inf))
        return logits

    monkeypatch.setattr(NativeHost, "run", nudged)
    asked, wanted = alone
    found, _ = run(engine, asked)
    assert all(found[id] != wanted[id] for id in wanted)
