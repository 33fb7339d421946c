"""The runtime under random operations: whatever joins, leaves, fails or is preempted, each request's tokens are those
that it has alone, and nothing leaks. Then bugs are planted, and the same runs must find each."""

from collections.abc import Callable

import numpy as np
import pytest
import toy
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trtforge.plugins.errors import InvalidArgument
from trtforge.runtime.batch import Batcher, _Blocks
from trtforge.runtime.block_pool import BlockPool
from trtforge.runtime.manifest import Limits
from trtforge.runtime.request import FinishReason, Request, SamplingParams, Status, Step
from trtforge.runtime.sampler import Sampler
from trtforge.runtime.scheduler import Scheduler

WINDOWS: list[tuple[int | None, ...]] = [(None,), (None, 6), (5, None, 9)]


def random_params(rng: np.random.Generator) -> SamplingParams:
    return SamplingParams(
        max_tokens=int(rng.integers(1, 20)),
        temperature=float(rng.choice([0.0, 1.0])),
        top_k=int(rng.choice([0, 5])),
        repetition_penalty=float(rng.choice([1.0, 1.3])),
        frequency_penalty=float(rng.choice([0.0, 0.2])),
        seed=int(rng.integers(0, 1000)),
    )


def expect_alone(loop: toy.Loop, eos_every: int) -> None:
    """Requests that ended by themselves have the tokens that they have alone, the others a beginning of them."""
    for request in loop.requests:
        expected = toy.alone(loop.manifest, request, eos_every)
        whole = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        got = request.output_ids
        assert got == (expected if whole else expected[: len(got)]), f"{request.id} {request.finish_reason}"


def scenario(seed: int, operations: int = 60) -> toy.Loop:
    """Random operations on a random configuration with a pool that is too small for all."""
    rng = np.random.default_rng(seed)
    m = toy.manifest(int(rng.choice([1, 2, 4, 8])), WINDOWS[seed % len(WINDOWS)])
    limits = Limits(int(rng.integers(1, 9)), int(rng.integers(9, 40)), max_seq_len=48)
    blocks = int(rng.integers(30, 70)) // m.kv.tokens_per_block
    policy = str(rng.choice(["max_utilization", "max_utilization", "guaranteed_no_evict"]))
    eos_every = int(rng.choice([0, 12]))
    loop = toy.Loop(m, blocks, limits, policy, eos_every)
    for _ in range(operations):
        what = rng.choice(["add", "add", "step", "step", "step", "step", "cancel", "roll back", "fail"])
        if what == "add":
            try:
                loop.add(toy.random_prompt(rng, 1, 36), random_params(rng), priority=int(rng.integers(0, 2)))
            except InvalidArgument:
                continue
        elif what == "cancel" and loop.requests:
            loop.finish(loop.requests[int(rng.integers(len(loop.requests)))])
        elif what == "roll back" and loop.scheduler.has_work:
            loop.step(fail=True)
        elif what == "fail" and loop.scheduler.has_work and rng.random() < 0.2:
            loop.fail()
        elif what == "step" and loop.scheduler.has_work:
            loop.step()
    loop.run()
    expect_alone(loop, eos_every)
    return loop


SEEDS = range(100)


@pytest.fixture(scope="module")
def preemptions() -> int:
    """All scenarios, run once; what each request has alone is remembered, so that a bug planted later cannot change
    that too."""
    return sum(scenario(seed).scheduler.num_preemptions for seed in SEEDS)


def test_random_operations_never_change_tokens_and_never_leak(preemptions: int) -> None:
    assert preemptions > 80, "the runs hardly preempted anything"


class Machine(RuleBasedStateMachine):
    """The same by hypothesis, which shrinks what it finds."""

    @initialize(
        tokens_per_block=st.sampled_from([1, 3, 4]),
        windows=st.sampled_from(WINDOWS),
        batch=st.integers(1, 4),
        extra=st.integers(0, 12),
        blocks=st.integers(8, 24),
    )
    def start(
        self, tokens_per_block: int, windows: tuple[int | None, ...], batch: int, extra: int, blocks: int
    ) -> None:
        limits = Limits(batch, batch + extra, max_seq_len=32)
        self.loop = toy.Loop(toy.manifest(tokens_per_block, windows), blocks, limits)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        max_tokens=st.integers(1, 8),
        priority=st.integers(0, 1),
    )
    def add(self, prompt: list[int], max_tokens: int, priority: int) -> None:
        try:
            self.loop.add(prompt, SamplingParams(max_tokens=max_tokens), priority=priority)
        except InvalidArgument:
            assert len(prompt) + max_tokens > self.loop.manifest.kv.tokens_per_block * 8

    @precondition(lambda self: self.loop.scheduler.has_work)
    @rule(fail=st.booleans())
    def step(self, fail: bool) -> None:
        before = {r: len(r.output_ids) for r in self.loop.requests}
        senior = self.loop.scheduler.running[:1]
        step = self.loop.step(fail=fail)
        for request, count in before.items():
            assert count <= len(request.output_ids) <= count + (not fail), "tokens were lost, or came twice"
        assert {row.request for row in step.rows} >= set(senior), "the most senior request must progress"

    @precondition(lambda self: self.loop.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.loop.finish(data.draw(st.sampled_from(self.loop.requests)))

    @invariant()
    def tokens_are_those_alone(self) -> None:
        if hasattr(self, "loop"):
            expect_alone(self.loop, 0)

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.run()
            expect_alone(self.loop, 0)


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


# -- the test of the test: each of these bugs must be found --------------------------------------------------------


def keeps_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preempted request is not computed again."""
    preempt = Scheduler._preempt

    def planted(self: Scheduler, request: Request) -> None:
        computed = request.num_computed
        preempt(self, request)
        request.num_computed = min(computed, 1)

    monkeypatch.setattr(Scheduler, "_preempt", planted)


def forgets_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preempted request comes back with its prompt alone."""
    preempt = Scheduler._preempt

    def planted(self: Scheduler, request: Request) -> None:
        preempt(self, request)
        request.output_ids.clear()

    monkeypatch.setattr(Scheduler, "_preempt", planted)


def leaks_when_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Scheduler._release

    def planted(self: Scheduler, request: Request, keep: int) -> None:
        if request.status is Status.RUNNING and not keep and request.num_computed == 0:
            request.block_tables = []
        release(self, request, keep)

    monkeypatch.setattr(Scheduler, "_release", planted)


def shares_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is handed out and stays in the free list."""
    allocate = BlockPool.allocate

    def planted(self: BlockPool, count: int) -> list[int]:
        blocks = allocate(self, count)
        if len(blocks) > 3:
            self._free.insert(0, blocks[0])
        return blocks

    monkeypatch.setattr(BlockPool, "allocate", planted)


def writes_to_the_wrong_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots of a chunk that begins inside a block are off by one."""
    slots = Batcher._slots

    def planted(self: Batcher, tables: object, request: object, positions: np.ndarray) -> np.ndarray:
        result = slots(self, tables, request, positions)  # type: ignore[arg-type]
        return np.where((positions % 7) == 5, np.maximum(result - 1, 0), result)

    monkeypatch.setattr(Batcher, "_slots", planted)


def swaps_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests get each other's block tables."""
    tables = Batcher._block_tables

    def planted(self: Batcher, step: object, group: int) -> np.ndarray:
        return tables(self, step, group)[::-1]  # type: ignore[arg-type]

    monkeypatch.setattr(Batcher, "_block_tables", planted)


def trusts_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block table that is as long as it was is taken for the same, and keeps the blocks that it had."""
    follow = _Blocks.follow

    def planted(self: _Blocks, step: Step) -> bool:
        for i, row in enumerate(step.rows):
            table = row.request.block_tables[self._group]
            if len(table) == self._known[i][1]:
                self._known[i] = (table, len(table))
        return follow(self, step)

    monkeypatch.setattr(_Blocks, "follow", planted)


def draws_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The random numbers depend on the place in the batch."""
    sample = Sampler.sample

    def planted(self: Sampler, logits: np.ndarray, step: object) -> object:
        for i, row in enumerate(step.rows):  # type: ignore[attr-defined]
            row.request.seed += i
        return sample(self, logits, step)  # type: ignore[arg-type]

    monkeypatch.setattr(Sampler, "sample", planted)


def puts_out_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rolled back step has put its token out already."""
    rollback = Scheduler.rollback

    def planted(self: Scheduler, step: object) -> None:
        rollback(self, step)  # type: ignore[arg-type]
        row = step.rows[0]  # type: ignore[attr-defined]
        if row.num_logits and len(row.request.output_ids) + 1 < row.request.max_tokens:
            row.request.output_ids.append(97)

    monkeypatch.setattr(Scheduler, "rollback", planted)


BUGS: list[Callable[[pytest.MonkeyPatch], None]] = [
    keeps_computed,
    forgets_output,
    leaks_when_cancelled,
    shares_a_block,
    writes_to_the_wrong_slot,
    swaps_rows,
    trusts_a_length,
    draws_by_batch,
    puts_out_twice,
]


@pytest.mark.usefixtures("preemptions")
@pytest.mark.parametrize("plant", BUGS, ids=lambda f: f.__name__)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        for seed in SEEDS:
            scenario(seed)
