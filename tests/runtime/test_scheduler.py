import numpy as np
import pytest
import toy

from trtforge.plugins.errors import InvalidArgument
from trtforge.runtime.manifest import Limits
from trtforge.runtime.request import FinishReason, Request, Rows, SamplingParams, Status, Step
from trtforge.runtime.scheduler import Scheduler


def counts(step: Step) -> dict[str, int]:
    return {row.request.id: row.count for row in step.rows}


def tokens(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=n)


def test_a_long_prompt_that_joins_stops_nobody_for_more_than_one_chunk() -> None:
    """Counted in steps: while 1,500 tokens are computed in chunks, every other request has a token in each step."""
    loop = toy.Loop(toy.manifest(16), limits=Limits(8, 128, 2048))
    others = [loop.add([i] * 5, tokens(60)) for i in range(7)]
    loop.step()
    long = loop.add(list(range(250)) * 6, tokens(4))
    while not long.output_ids:
        before = [len(r.output_ids) for r in others]
        step = loop.step()
        assert [len(r.output_ids) for r in others] == [n + 1 for n in before]
        assert step.num_tokens <= 128
    assert len(loop.steps) == 1 + -(-1500 // (128 - 7))
    loop.run()
    assert all(r.output_ids == toy.alone(loop.manifest, r) for r in loop.requests)


@pytest.mark.parametrize("chunk", [1, 3, 16, 17, 64, 4096])
@pytest.mark.parametrize("windows", [(None,), (8,), (None, 8)], ids=str)
def test_chunk_size_does_not_change_tokens(chunk: int, windows: tuple[int | None, ...]) -> None:
    loop = toy.Loop(toy.manifest(16, windows), limits=Limits(1, chunk, 4096))
    for length in (15, 16, 17, 50):  # around the edges of blocks
        loop.add(range(length), tokens(20))
    loop.run()
    assert all(r.output_ids == toy.alone(loop.manifest, r) for r in loop.requests)
    assert max(step.num_tokens for step in loop.steps) <= chunk


def test_thirty_two_requests_join_and_leave_at_different_steps() -> None:
    rng = np.random.default_rng(3)
    loop = toy.Loop(toy.manifest(16, (None, 20)), limits=Limits(16, 96, 512))
    for i in range(32):
        loop.add(toy.random_prompt(rng, 1, 120), SamplingParams(max_tokens=int(rng.integers(4, 60)), seed=i))
        for _ in range(int(rng.integers(0, 3))):
            loop.step()
    loop.run()
    assert all(r.output_ids == toy.alone(loop.manifest, r) for r in loop.requests)
    assert np.mean([len(step.rows) for step in loop.steps]) > 4


def test_a_pool_too_small_preempts_the_newest_and_changes_no_token() -> None:
    loop = toy.Loop(toy.manifest(4), 12, Limits(4, 64, 64))
    requests = [loop.add([i] * 6, tokens(24)) for i in range(4)]
    loop.run()
    assert loop.scheduler.num_preemptions > 0
    assert requests[0].num_preemptions == 0, "the oldest is never preempted"
    assert all(r.output_ids == toy.alone(loop.manifest, r) for r in requests)
    ends = [max(i for i, s in enumerate(loop.steps) if r.id in counts(s)) for r in requests]
    assert ends == sorted(ends), "who came first is done first"


def test_guaranteed_no_evict_admits_by_the_full_need() -> None:
    loop = toy.Loop(toy.manifest(4), 16, Limits(4, 64, 64), "guaranteed_no_evict")
    requests = [loop.add([i] * 6, tokens(24)) for i in range(4)]  # 8 blocks each: two at once
    loop.run()
    assert loop.scheduler.num_preemptions == 0
    assert max(len(step.rows) for step in loop.steps) == 2
    assert all(r.output_ids == toy.alone(loop.manifest, r) for r in requests)


def test_groups_with_pools_of_different_sizes() -> None:
    loop = toy.Loop(toy.manifest(4, (None, 6)), [40, 11], Limits(4, 64, 64))
    requests = [loop.add([i] * 6, tokens(24)) for i in range(4)]
    loop.run()
    assert loop.scheduler.num_preemptions > 0, "the smaller pool runs out"
    assert all(r.output_ids == toy.alone(loop.manifest, r) for r in requests)


def test_steps_of_one_token_each_are_planned_as_any_step_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """In most steps every request generates, and their rows take a shorter way: to the same rows and blocks."""

    def run() -> list[tuple[dict[str, int], list[list[list[int]]]]]:
        rng = np.random.default_rng(11)
        loop = toy.Loop(toy.manifest(4, (None, 6)), [12, 14], Limits(5, 40, 48))
        planned = []
        for i in range(30):
            loop.add(toy.random_prompt(rng, 1, 20), tokens(int(rng.integers(1, 20))), priority=i % 2)
            for _ in range(int(rng.integers(0, 5))):
                if loop.scheduler.has_work:
                    step = loop.step(fail=rng.random() < 0.1)
                    tables = [[*map(list, r.block_tables)] for r in loop.scheduler.running]
                    planned.append((counts(step), tables))
        loop.run()
        assert loop.scheduler.num_preemptions > 3
        return planned

    taken = []
    shorter = Scheduler._one_token_each

    def watched(self: Scheduler) -> dict[Request, Rows] | None:
        taken.append(shorter(self))
        return taken[-1]

    monkeypatch.setattr(Scheduler, "_one_token_each", watched)
    short = run()
    assert sum(bool(rows) for rows in taken) > 50
    monkeypatch.setattr(Scheduler, "_one_token_each", lambda self: None)
    assert run() == short


def test_first_come_first_served_and_priority_before_that() -> None:
    loop = toy.Loop(toy.manifest(4), limits=Limits(1, 16, 64))
    names = [loop.add([1, 2], tokens(2), priority=p).id for p in (0, 0, 5, 0, 5)]
    loop.run()
    first = list(dict.fromkeys(row.request.id for step in loop.steps for row in step.rows))
    assert first == [names[i] for i in (2, 4, 0, 1, 3)]


def test_the_head_of_the_queue_is_not_overtaken_for_ever() -> None:
    """A request that needs most of the pool gets it, however many small ones come after it."""
    loop = toy.Loop(toy.manifest(4), 10, Limits(4, 64, 64))
    loop.add([0] * 4, tokens(8))
    big = loop.add([1] * 30, tokens(4))
    for _ in range(60):
        loop.add([2] * 2, tokens(2))
        loop.step()
    assert big.status is Status.FINISHED


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "words"),
    [
        (0, 1, ["no tokens"]),
        (64, 1, ["64 tokens", "at most 63", "max_seq_len 64"]),
        (30, 20, ["13 KV blocks", "30", "20", "has 9"]),
    ],
)
def test_a_request_that_can_never_fit_is_refused_with_the_numbers(
    prompt: int, max_tokens: int, words: list[str]
) -> None:
    loop = toy.Loop(toy.manifest(4), 9, Limits(4, 64, 64))
    with pytest.raises(InvalidArgument) as refusal:
        loop.add([1] * prompt, tokens(max_tokens))
    assert all(word in str(refusal.value) for word in words), refusal.value
    assert not loop.scheduler.has_work


def test_a_request_that_just_fits_runs_to_its_end() -> None:
    loop = toy.Loop(toy.manifest(4), 9, Limits(4, 64, 64))
    request = loop.add([1] * 30, tokens(7))  # 36 tokens are computed, the 37th is only put out
    loop.run()
    assert len(request.output_ids) == 7
    assert loop.scheduler.pools[0].peak_used == 9


def test_max_tokens_is_cut_to_the_room() -> None:
    loop = toy.Loop(toy.manifest(4), 64, Limits(4, 64, 64))
    request = loop.add([1] * 60, tokens(1000))
    loop.run()
    assert (len(request.output_ids), request.finish_reason) == (4, FinishReason.LENGTH)


def test_a_step_that_fails_leaves_no_trace() -> None:
    loop = toy.Loop(toy.manifest(4), 12, Limits(4, 8, 64))
    requests = [loop.add([i] * 10, tokens(6)) for i in range(3)]
    for _ in range(30):
        if loop.scheduler.has_work:
            loop.step(fail=True)
            held = [len(r.block_tables[0]) for r in loop.scheduler.running]
            assert held == [-(-r.num_computed // 4) for r in loop.scheduler.running]
            loop.step()
    loop.run()
    assert all(r.output_ids == toy.alone(loop.manifest, r) for r in requests)


def test_cancelling_in_mid_prefill_frees_everything_at_once() -> None:
    loop = toy.Loop(toy.manifest(4), 64, Limits(4, 8, 128))
    short = loop.add([1], tokens(30))
    long = loop.add([2] * 100, tokens(4))
    loop.step()
    loop.step()
    assert 0 < long.num_computed < 100
    loop.finish(long)
    assert loop.scheduler.pools[0].num_used == len(short.block_tables[0])
    loop.run()
    assert short.output_ids == toy.alone(loop.manifest, short)


def test_the_end_token_ends_a_request_but_not_before_min_tokens() -> None:
    def run(min_tokens: int) -> Request:
        loop = toy.Loop(toy.manifest(4), eos_every=2)
        request = loop.add([5], SamplingParams(max_tokens=40, min_tokens=min_tokens))
        loop.run()
        return request

    early, late = run(0), run(20)
    assert early.finish_reason is FinishReason.STOP
    assert early.output_ids[-1] == early.stop_reason == 257
    assert len(early.output_ids) < 20 < len(late.output_ids)
    assert 257 not in late.output_ids[:20]


def test_in_flight_takes_far_fewer_steps_than_a_batch_that_waits_for_its_slowest() -> None:
    """The same requests, eight at once; static batches go on until their longest member is done."""
    lengths = [int(n) for n in np.random.default_rng(1).integers(8, 257, 40)]
    loop = toy.Loop(toy.manifest(16), limits=Limits(8, 512, 512))
    for i, length in enumerate(lengths):
        loop.add([i] * 8, tokens(length))
    loop.run()
    static = sum(max(lengths[i : i + 8]) for i in range(0, 40, 8))
    assert static / len(loop.steps) > 1.4
