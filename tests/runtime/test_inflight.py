"""In-flight batching over the CPU executor: joining, leaving, chunks and preemption change no token."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trtforge.runtime import LLM, EngineConfig, GenerationRequest, SamplingParams


def requests(vocab: int) -> list[GenerationRequest]:
    """Greedy and sampled ones, of mixed lengths."""
    rng = np.random.default_rng(1)
    return [
        GenerationRequest(
            f"r{i}",
            token_ids=rng.integers(0, vocab, rng.integers(1, 60)).tolist(),
            params=SamplingParams(
                max_tokens=int(rng.integers(2, 60)),
                temperature=float(i % 2),
                seed=i,
                ignore_eos=True,
                logprobs=0,
            ),
        )
        for i in range(32)
    ]


@pytest.mark.parametrize("variant", ["llama", "mistral", "gemma3"])
def test_thirty_two_requests_have_their_tokens_alone_together_and_preempted(
    tiny_engine: Callable[..., Path], variant: str
) -> None:
    engine = tiny_engine(variant)

    def run(config: EngineConfig, one_by_one: bool = False) -> tuple[list[object], LLM]:
        with LLM(engine, config) as llm:
            asked = requests(llm.engine.manifest.vocab_size)
            batches = [[r] for r in asked] if one_by_one else [asked]
            answers = [answer for batch in batches for answer in llm.generate(batch)]
        return [(a.token_ids, [p.logprob for p in a.logprobs]) for a in answers], llm

    alone, _ = run(EngineConfig(), one_by_one=True)
    together, llm = run(EngineConfig(check_integrity=True))
    assert together == alone
    assert llm.engine.metrics().mean_batch > 4

    small = EngineConfig(kv_cache_tokens=240, max_num_tokens=37, max_batch_size=12, check_integrity=True)
    squeezed, llm = run(small)
    assert squeezed == alone
    assert llm.engine.metrics().preemptions > 0
    assert llm.engine.metrics().used_blocks == 0
