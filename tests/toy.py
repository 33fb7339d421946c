"""The runtime's loop over the toy model, without a thread: every operation is a call, so tests can state what is
true after each."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from trtforge.plugins.errors import EngineFailure
from trtforge.runtime.batch import Batcher
from trtforge.runtime.block_pool import BlockPool
from trtforge.runtime.executors.null import VOCAB_SIZE, NullBehaviour, NullExecutor
from trtforge.runtime.manifest import KVGroup, KVLayout, Limits, Manifest, Rope
from trtforge.runtime.request import FinishReason, Request, SamplingParams, Status, Step
from trtforge.runtime.sampler import Sampler
from trtforge.runtime.scheduler import Scheduler

BIG = Limits(max_batch_size=64, max_num_tokens=4096, max_seq_len=4096)


def manifest(
    tokens_per_block: int = 4,
    windows: Sequence[int | None] = (None,),
    limits: Limits = BIG,
    ropes: Sequence[Rope] = (),
) -> Manifest:
    groups = tuple(KVGroup((i,), kv_heads=1, head_size=2, window=w) for i, w in enumerate(windows))
    return Manifest(
        target="null",
        model={"vocab_size": VOCAB_SIZE},
        recipe="full_prec",
        kv=KVLayout("fp32", tokens_per_block, groups),
        limits=limits,
        ropes=tuple(ropes),
        eos_token_ids=(257,),
    )


class Loop:
    """Scheduler, batcher, toy model and sampler, one operation at a time; integrity is checked after each."""

    def __init__(
        self,
        m: Manifest,
        num_blocks: int | Sequence[int] = 4096,
        limits: Limits | None = None,
        policy: str = "max_utilization",
        eos_every: int = 0,
    ) -> None:
        blocks = [num_blocks] * len(m.kv.groups) if isinstance(num_blocks, int) else list(num_blocks)
        self.manifest = m
        self.executor = NullExecutor(m, NullBehaviour(eos_every=eos_every))
        self.executor.allocate(blocks)
        self.scheduler = Scheduler(
            limits or m.limits, m.kv.tokens_per_block, [BlockPool(n) for n in blocks], policy
        )
        self.batcher = Batcher(m)
        self.sampler = Sampler()
        self.steps: list[Step] = []
        self.requests: list[Request] = []
        self._given: dict[Request, list[int]] = {}

    def add(self, prompt: Sequence[int], params: SamplingParams | None = None, **fields: Any) -> Request:
        """Raises InvalidArgument if it can never fit."""
        params = params or SamplingParams(max_tokens=16)
        max_tokens = self.scheduler.check_fits(len(prompt), params.max_tokens)
        request = Request(
            id=f"r{len(self.requests)}",
            prompt_ids=list(prompt),
            params=params,
            seed=params.seed or 0,
            max_tokens=max_tokens,
            end_ids=frozenset({257}),
            **fields,
        )
        self.scheduler.add(request)
        self.requests.append(request)
        self.check()
        return request

    def step(self, *, fail: bool = False) -> Step:
        """One step; fail: the executor writes and then fails, and the step is rolled back."""
        step = self.scheduler.plan()
        arrays = self.batcher.arrays(step)
        logits = self.executor.run(arrays)
        if fail:
            self.scheduler.rollback(step)
        else:
            self.scheduler.commit(step, self.sampler.sample(logits, step))
            self.steps.append(step)
        self.check()
        return step

    def fail(self) -> list[Request]:
        """A step that fails for good: its requests end, as in the engine."""
        step = self.step(fail=True)
        for row in step.rows:
            self.scheduler.finish(row.request, FinishReason.ERROR, error=EngineFailure("planned"))
        self.check()
        return [row.request for row in step.rows]

    def finish(self, request: Request) -> None:
        if request.status is not Status.FINISHED:
            self.scheduler.finish(request, FinishReason.CANCELLED)
        self.check()

    def run(self) -> None:
        """Until there is nothing to do."""
        while self.scheduler.has_work:
            self.step()

    def check(self) -> None:
        self.scheduler.check_integrity()
        for request in self.requests:
            given = self._given.setdefault(request, [])
            assert request.output_ids[: len(given)] == given, "what was put out is put out once"
            self._given[request] = list(request.output_ids)
        if not self.scheduler.has_work:
            assert all(pool.num_used == 0 for pool in self.scheduler.pools), "blocks are held by nobody"


def alone(m: Manifest, request: Request, eos_every: int = 0) -> list[int]:
    """The tokens of the same request when nothing else runs, there is room for all, and a chunk holds it all."""
    p = request.params
    key = (
        m.kv.tokens_per_block,
        tuple(g.window for g in m.kv.groups),
        tuple(request.prompt_ids),
        request.seed,
    )
    return list(
        _alone(
            key,
            request.max_tokens,
            p.temperature,
            p.repetition_penalty,
            p.frequency_penalty,
            p.top_k,
            eos_every,
        )
    )


@cache
def _alone(
    key: tuple[Any, ...],
    max_tokens: int,
    temperature: float,
    repetition_penalty: float,
    frequency_penalty: float,
    top_k: int,
    eos_every: int,
) -> tuple[int, ...]:
    tokens_per_block, windows, prompt, seed = key
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        top_k=top_k,
        seed=seed,
    )
    loop = Loop(manifest(tokens_per_block, windows), len(prompt) + max_tokens, eos_every=eos_every)
    request = loop.add(prompt, params)
    loop.run()
    return tuple(request.output_ids)


def random_prompt(rng: np.random.Generator, low: int, high: int) -> list[int]:
    return [int(t) for t in rng.integers(0, 256, rng.integers(low, high + 1))]
