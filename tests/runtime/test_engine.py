"""The engine with its thread, over the toy model."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import toy

from trtforge.plugins.errors import DeadlineExceeded, EngineFailure, ForgeError, InvalidArgument, Overloaded
from trtforge.runtime.engine import Engine
from trtforge.runtime.executors.base import ExecutorLost, StepArrays
from trtforge.runtime.manifest import Limits
from trtforge.runtime.request import (
    FinishReason,
    GenerationRequest,
    RequestOutput,
    Sampled,
    SamplingParams,
    Step,
)
from trtforge.runtime.scheduler import Scheduler

Start = Callable[..., Engine]
SLOW = 0.005  # seconds that a step takes where a test has to get a word in


def ask(id: str, prompt: str = "hello", **params: Any) -> GenerationRequest:
    fields = {k: params.pop(k) for k in ("priority", "deadline") if k in params}
    return GenerationRequest(
        id, prompt=prompt, params=SamplingParams(**{"max_tokens": 12, **params}), **fields
    )


def alone(engine: Engine, request: GenerationRequest) -> tuple[int, ...]:
    loop = toy.Loop(engine.manifest)
    r = loop.add(engine.tokenizer.encode(request.prompt or ""), request.params)
    loop.run()
    return tuple(r.output_ids)


class Sink:
    """Keeps what it is given, call by call."""

    def __init__(self) -> None:
        self.calls: list[list[RequestOutput]] = []
        self.ended = threading.Event()
        self.expected = 1

    def __call__(self, outputs: Sequence[RequestOutput]) -> None:
        self.calls.append(list(outputs))
        self.expected -= sum(o.finished for o in outputs)
        if self.expected == 0:
            self.ended.set()

    def of(self, id: str) -> list[RequestOutput]:
        return [o for call in self.calls for o in call if o.id == id]


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.001)


def test_a_stream_gives_what_the_result_is(start: Start) -> None:
    engine = start()
    outputs = list(engine.submit(ask("a")))
    whole = engine.submit(ask("a")).result()
    assert "".join(o.text for o in outputs) == whole.text
    assert tuple(t for o in outputs for t in o.token_ids) == whole.token_ids == alone(engine, ask("a"))
    assert [o.finished for o in outputs] == [False] * 11 + [True]
    assert whole.finish_reason is FinishReason.LENGTH
    assert (whole.num_prompt_tokens, whole.num_output_tokens) == (6, 12)
    assert whole.num_kv_blocks == 2
    times = [
        whole.timings[k] for k in ("arrival_ns", "first_scheduled_ns", "first_token_ns", "last_token_ns")
    ]
    assert times == sorted(times)


def test_a_request_is_scheduled_before_its_first_step_runs(start: Start) -> None:
    timings = start(delay=0.02).submit(ask("a", max_tokens=1)).result().timings
    assert timings["first_token_ns"] - timings["first_scheduled_ns"] >= 20_000_000


def test_thirty_two_requests_from_many_threads_share_steps_and_keep_their_tokens(start: Start) -> None:
    engine = start(Limits(16, 64, 512), windows=(None, 24), delay=0.001, kv_cache_tokens=640)
    requests = [ask(str(i), "x" * (7 * i % 90), max_tokens=10 + 3 * i % 40, seed=i) for i in range(32)]
    results: dict[str, RequestOutput] = {}

    def client(request: GenerationRequest) -> None:
        results[request.id] = engine.submit(request).result()

    threads = [threading.Thread(target=client, args=(r,)) for r in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(results[r.id].token_ids == alone(engine, r) for r in requests)
    m = engine.metrics()
    assert m.mean_batch > 4
    assert m.preemptions > 0, "the pool holds 640 of about 2,400 tokens"
    assert m.output_tokens == sum(len(r.token_ids) for r in results.values())
    assert (m.requests_finished, m.used_blocks, m.active_requests) == (32, 0, 0)
    assert m.ttft_seconds.count == 32
    assert m.ttft_seconds.sum > 32 * 0.001, "a step takes a millisecond"
    assert m.inter_token_seconds.count == m.output_tokens - 32
    assert m.input_token_len.count == m.output_token_len.count == 32
    assert 0 < m.kv_waste < 0.5


def test_one_call_a_step_for_all_requests_of_a_sink(start: Start) -> None:
    engine, sink = start(delay=SLOW), Sink()
    sink.expected = 8
    for i in range(8):
        engine.submit(ask(str(i), max_tokens=20), sink=sink)
    assert sink.ended.wait(20)
    assert len(sink.calls) <= engine.metrics().steps
    assert max(len(call) for call in sink.calls) == 8
    assert all(len({o.id for o in call}) == len(call) for call in sink.calls), "a request twice in one call"


def test_a_stop_string_ends_the_text_before_it_and_frees_the_blocks(start: Start) -> None:
    engine = start(delay=SLOW)
    free = engine.submit(ask("a", max_tokens=60)).result()
    stop = free.text[20:23]
    sink = Sink()
    engine.submit(ask("b", max_tokens=60, stop=(stop,)), sink=sink)
    assert sink.ended.wait(20)
    text = "".join(o.text for o in sink.of("b"))
    assert text == free.text[: free.text.index(stop)]
    last = sink.of("b")[-1]
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, stop)
    assert engine.metrics().used_blocks == 0


def test_a_stop_string_counts_from_min_tokens_on(start: Start) -> None:
    engine = start()
    free = engine.submit(ask("a", max_tokens=60)).result().text
    late = engine.submit(ask("b", max_tokens=60, min_tokens=30, stop=("g",))).result()
    assert free.index("g") < 10
    assert late.num_output_tokens >= 30
    assert late.finish_reason is FinishReason.STOP
    assert free.startswith(late.text)


def test_what_may_become_a_stop_string_is_given_out_at_the_end(start: Start) -> None:
    engine = start()
    free = engine.submit(ask("a", max_tokens=20)).result().text
    outputs = list(engine.submit(ask("b", max_tokens=20, stop=(free[-2:] + "never",))))
    assert "".join(o.text for o in outputs) == free
    assert [o.text for o in outputs[-2:]] == ["", free[-2:]]


@pytest.mark.parametrize("explicit", [True, False])
def test_end_tokens(start: Start, explicit: bool) -> None:
    engine = start(eos_every=40)
    ended = engine.submit(ask("a", max_tokens=200)).result()
    assert (ended.finish_reason, ended.stop_reason) == (FinishReason.STOP, 257)
    assert 257 not in ended.token_ids
    onward = engine.submit(
        ask("b", max_tokens=200, **({"stop_token_ids": ()} if explicit else {"ignore_eos": True}))
    ).result()
    assert onward.finish_reason is FinishReason.LENGTH
    assert onward.token_ids[: len(ended.token_ids) + 1] == (*ended.token_ids, 257)
    other = engine.submit(
        ask("c", max_tokens=200, stop_token_ids=(ended.token_ids[3],), ignore_eos=True)
    ).result()
    assert other.token_ids == ended.token_ids[: ended.token_ids.index(ended.token_ids[3])]


def test_end_tokens_that_the_vocabulary_lacks_are_none(start: Start) -> None:
    """min_tokens bans the end tokens: these have no logit that could be banned."""
    engine = start()
    plain, odd = (
        engine.submit(ask(f"{ids}", max_tokens=20, min_tokens=10, stop_token_ids=ids)).result()
        for ids in ((), (-1, 10**9))
    )
    assert odd.token_ids == plain.token_ids


def test_logprobs_come_with_their_tokens(start: Start) -> None:
    outputs = list(start().submit(ask("a", logprobs=2)))
    assert all(len(o.logprobs) == len(o.token_ids) for o in outputs)
    assert outputs[0].logprobs[0].top[0] == (outputs[0].token_ids[0], outputs[0].logprobs[0].logprob)


# -- when outputs are sent -----------------------------------------------------------------------------------------


class Watched:
    """Notes, in order, when a step's computation begins and ends, and when tokens are sent."""

    def __init__(self, engine: Engine) -> None:
        self.events: list[str] = []
        self.rows: list[int] = []  # of each step
        self._run = engine._executor.run
        engine._executor.run = self  # type: ignore[method-assign, assignment]

    def __call__(self, arrays: StepArrays, meanwhile: Callable[[], None]) -> Any:
        self.events.append("begin")
        self.rows.append(len(arrays.kv_lengths))
        meanwhile()
        logits = self._run(arrays)
        self.events.append("end")
        return logits

    def sink(self, outputs: Sequence[RequestOutput]) -> None:
        self.events += [f"{o.id}{o.num_output_tokens}" for o in outputs]


def test_tokens_are_sent_while_the_next_step_is_computed(start: Start) -> None:
    engine = start()
    watched = Watched(engine)
    engine.submit(ask("a", max_tokens=3), sink=watched.sink)
    wait_for(lambda: "a3" in watched.events)
    assert watched.events == ["begin", "end", "begin", "a1", "end", "begin", "a2", "end", "a3"]


def test_a_stop_string_takes_a_request_out_of_the_next_step(start: Start) -> None:
    """Though its text is sent only then: no step is computed in vain, and none of its tokens is lost."""
    engine = start(delay=SLOW)
    free = engine.submit(ask("a", max_tokens=60)).result()
    stop = free.text[5:8]
    watched, sink = Watched(engine), Sink()
    engine.submit(ask("b", max_tokens=60, stop=(stop,)), sink=sink)
    assert sink.ended.wait(20)
    end = free.text.index(stop) + len(stop)
    assert free.text[:end].isascii(), "a token is a character"
    last = sink.of("b")[-1]
    assert (last.num_output_tokens, last.stop_reason) == (end, stop)
    assert len(watched.rows) == end, "a step for each token, the first one with the prompt"


def test_what_was_computed_is_sent_before_the_end_of_a_request_whose_next_step_fails(start: Start) -> None:
    """Even if the executor fails before it comes to sending."""
    engine, sink = start(), Sink()

    def run(arrays: StepArrays, meanwhile: Callable[[], None]) -> Any:
        if len(sink.calls) == 3:
            raise RuntimeError("broken")
        meanwhile()
        return whole(arrays)

    whole = engine._executor.run
    engine._executor.run = run  # type: ignore[method-assign, assignment]
    engine.submit(ask("a"), sink=sink)
    assert sink.ended.wait(20)
    assert [(o.num_output_tokens, o.finish_reason) for o in sink.of("a")] == [
        *((n, None) for n in (1, 2, 3, 4)),
        (4, FinishReason.ERROR),
    ]
    tokens = [t for o in sink.of("a") for t in o.token_ids]
    assert tuple(tokens) == alone(engine, ask("a"))[:4]
    assert engine.healthy


def test_cancelling_between_a_token_and_its_sending_loses_neither(start: Start) -> None:
    """The token that was not sent yet comes with the end, in one output."""
    engine, sink = start(delay=SLOW), Sink()
    commit = engine._scheduler.commit

    def cancelling(step: Step, sampled: Sequence[Sampled | None]) -> None:
        commit(step, sampled)
        if len(step.rows[0].request.output_ids) == 5:
            engine.cancel("a")

    engine._scheduler.commit = cancelling  # type: ignore[method-assign]
    engine.submit(ask("a", max_tokens=50), sink=sink)
    assert sink.ended.wait(20)
    outputs = sink.of("a")
    assert [o.num_output_tokens for o in outputs] == [1, 2, 3, 4, 5]
    assert outputs[-1].finish_reason is FinishReason.CANCELLED
    tokens = tuple(t for o in outputs for t in o.token_ids)
    assert tokens == alone(engine, ask("a", max_tokens=50))[:5]


def test_a_request_that_ended_is_not_ended_twice(start: Start) -> None:
    """Its client cancels it before it knows."""
    engine, sink = start(), Sink()
    commit = engine._scheduler.commit

    def cancelling(step: Step, sampled: Sequence[Sampled | None]) -> None:
        commit(step, sampled)
        if step.rows[0].request.finish_reason is not None:
            assert engine.cancel("a"), "it is in flight until its end is sent"

    engine._scheduler.commit = cancelling  # type: ignore[method-assign]
    other = engine.submit(ask("b", max_tokens=30))
    engine.submit(ask("a", max_tokens=4, priority=1), sink=sink)
    assert sink.ended.wait(20)
    assert sink.of("a")[-1].finish_reason is FinishReason.LENGTH
    assert len(other.result().token_ids) == 30
    assert engine.metrics().requests_cancelled == 0


# -- requests that end early ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["in mid-stream", "in mid-prefill", "in the queue"])
def test_a_cancelled_request_is_gone_before_the_next_step(start: Start, when: str) -> None:
    engine = start(Limits(2, 8, 2048), delay=SLOW)
    other = engine.submit(ask("other", max_tokens=40))
    if when == "in the queue":
        second = engine.submit(ask("second", max_tokens=40))
    victim = engine.submit(ask("victim", "x" * (900 if when == "in mid-prefill" else 1), max_tokens=1000))
    if when == "in the queue":
        wait_for(lambda: engine.metrics().waiting_requests == 1)
    elif when == "in mid-prefill":
        wait_for(lambda: engine.metrics().context_tokens > 0 and engine.metrics().steps > 3)
    else:
        next(iter(victim))
    before = engine.metrics().steps
    victim.cancel()
    end = victim.result()
    assert engine.metrics().steps <= before + 2  # the one that ran when it was cancelled, and the one after
    assert end.finish_reason is FinishReason.CANCELLED
    assert other.result().token_ids == alone(engine, ask("other", max_tokens=40))
    if when == "in the queue":
        assert second.result().token_ids == alone(engine, ask("second", max_tokens=40))
    assert (engine.metrics().used_blocks, engine.metrics().context_tokens) == (0, 0)
    assert engine.metrics().requests_cancelled == 1


def test_stop_ends_a_request_with_what_it_has(start: Start) -> None:
    engine = start(delay=SLOW)
    stream = engine.submit(ask("a", max_tokens=1000))
    first = next(iter(stream))
    assert engine.stop("a")
    rest = stream.result()
    assert rest.finish_reason is FinishReason.STOP
    tokens = first.token_ids + rest.token_ids
    assert tokens == alone(engine, ask("a", max_tokens=1000))[: len(tokens)]
    assert first.text + rest.text == engine.tokenizer.decode(tokens)


def test_cancelling_nothing_is_no_error(start: Start) -> None:
    engine = start()
    assert not engine.cancel("nobody")
    stream = engine.submit(ask("a"))
    stream.result()
    assert not engine.stop("a")
    stream.cancel()
    assert engine.submit(ask("a")).result().finish_reason is FinishReason.LENGTH, (
        "an id is free after its request"
    )


@pytest.mark.parametrize("queued", [False, True])
def test_a_deadline_ends_a_request_wherever_it_is(start: Start, queued: bool) -> None:
    engine = start(Limits(1, 8, 2048), delay=SLOW)
    other = engine.submit(ask("other", max_tokens=60)) if queued else None
    late = engine.submit(ask("late", max_tokens=1000, deadline=0.05))
    with pytest.raises(DeadlineExceeded):
        late.result()
    if other is not None:
        assert other.result().token_ids == alone(engine, ask("other", max_tokens=60))
    wait_for(lambda: engine.metrics().used_blocks == 0)
    assert engine.metrics().requests_failed == 1


# -- what fails ----------------------------------------------------------------------------------------------------


def test_a_step_that_fails_ends_its_requests_and_no_others(start: Start) -> None:
    engine = start(Limits(2, 64, 512), fail_steps=(60,), delay=SLOW)
    streams = [engine.submit(ask(str(i), max_tokens=100)) for i in range(4)]
    for stream in streams[:2]:
        with pytest.raises(EngineFailure, match="step 60"):
            stream.result()
    for i in (2, 3):
        assert streams[i].result().token_ids == alone(engine, ask(str(i), max_tokens=100))
    assert engine.healthy
    assert (engine.metrics().requests_failed, engine.metrics().requests_finished) == (2, 2)


@pytest.mark.parametrize("how", ["the executor is lost", "a bug of ours"])
def test_a_dead_engine_fails_everything_at_once(
    start: Start, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(Limits(2, 64, 512), delay=SLOW, lost_at=60 if how == "the executor is lost" else None)
    if how == "a bug of ours":

        def broken(self: Scheduler) -> Step:
            if len(self.waiting) + len(self.running) == 4:
                raise ZeroDivisionError("a bug")
            return plan(self)

        plan = Scheduler.plan
        engine.submit(ask("0")).result()
        monkeypatch.setattr(Scheduler, "plan", broken)
    streams = [engine.submit(ask(str(i), max_tokens=100)) for i in range(4)]
    for stream in streams:
        with pytest.raises(EngineFailure, match="has failed"):
            stream.result(timeout=20)
    wait_for(lambda: not engine.healthy)
    with pytest.raises(EngineFailure, match="serves no more"):
        engine.submit(ask("late"))
    assert engine.metrics().healthy is False
    assert isinstance(engine._death, ExecutorLost if how == "the executor is lost" else ZeroDivisionError)


def test_a_sink_that_raises_loses_its_own_requests_only(start: Start) -> None:
    engine, calls = start(delay=SLOW), []

    def broken(outputs: Sequence[RequestOutput]) -> None:
        calls.append(outputs)
        raise RuntimeError("the socket is closed")

    engine.submit(ask("a", max_tokens=1000), sink=broken)
    other = engine.submit(ask("b", max_tokens=30)).result()
    assert other.token_ids == alone(engine, ask("b", max_tokens=30))
    wait_for(lambda: engine.metrics().requests_cancelled == 1)
    assert engine.healthy
    assert len(calls) <= 3


def test_shutdown_cancels_what_is_in_flight(start: Start) -> None:
    engine = start(delay=SLOW)
    stream = engine.submit(ask("a", max_tokens=1000))
    next(iter(stream))
    engine.shutdown()
    assert stream.result().finish_reason is FinishReason.CANCELLED
    assert not engine.healthy
    with pytest.raises(EngineFailure, match="shut down"):
        engine.submit(ask("b"))
    engine.shutdown()


# -- what is refused -----------------------------------------------------------------------------------------------


def test_the_queue_is_bounded_by_requests(start: Start) -> None:
    engine = start(Limits(1, 8, 64), delay=SLOW, max_queue_requests=2)
    streams = [engine.submit(ask(str(i))) for i in range(3)]
    with pytest.raises(Overloaded) as refusal:
        engine.submit(ask("3"))
    assert 100 <= refusal.value.retry_after_ms <= 60_000
    assert "retry_after_ms=" in refusal.value.wire_message()
    assert all(s.result().finish_reason is FinishReason.LENGTH for s in streams)
    assert engine.submit(ask("3")).result().finish_reason is FinishReason.LENGTH
    assert engine.metrics().requests_refused == 1


def test_the_queue_is_bounded_by_tokens(start: Start) -> None:
    engine = start(Limits(1, 8, 128), delay=SLOW, max_queue_tokens=60)
    first = engine.submit(ask("0", "x" * 100))  # more than the bound, and nothing waits: it is served
    wait_for(lambda: engine.metrics().running_requests == 1)
    engine.submit(ask("1", "x" * 40))
    with pytest.raises(Overloaded, match="41 prompt tokens wait, 60 may"):
        engine.submit(ask("2", "x" * 40))
    engine.submit(ask("3", "x" * 10)).result()
    first.result()


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (GenerationRequest("a"), "exactly one"),
        (GenerationRequest("a", prompt="x", token_ids=[1]), "exactly one"),
        (GenerationRequest("a", token_ids=[]), "no tokens"),
        (GenerationRequest("a", token_ids=[259]), "259 is not in the vocabulary"),
        (GenerationRequest("a", token_ids=[-1]), "-1 is not in the vocabulary"),
        (GenerationRequest("a", messages=[]), "messages"),
        (GenerationRequest("a", prompt="x" * 200), "201 tokens; it may have at most 127"),
        (ask("a", max_tokens=0), "max_tokens"),
        (ask("a", max_tokens=100), "needs 7 KV blocks"),
        (ask("a", "\ud800"), "Unicode"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_bad_requests_are_refused_at_once(start: Start, request_: GenerationRequest, words: str) -> None:
    engine = start(Limits(1, 8, 128), kv_cache_tokens=96)
    with pytest.raises(InvalidArgument, match=words):
        engine.submit(request_)
    assert engine.submit(ask("a")).result().finish_reason is FinishReason.LENGTH


def test_an_id_in_flight_is_refused(start: Start) -> None:
    engine = start(delay=SLOW)
    stream = engine.submit(ask("a", max_tokens=50))
    with pytest.raises(InvalidArgument, match="'a' is in flight"):
        engine.submit(ask("a"))
    assert len(stream.result().token_ids) == 50


# -- the rest ------------------------------------------------------------------------------------------------------


def test_empty_text_begins_at_the_beginning_of_texts(start: Start) -> None:
    assert start().submit(ask("a", "")).result().num_prompt_tokens == 1


def test_empty_text_of_a_tokenizer_without_bos(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    monkeypatch.setattr(engine.tokenizer, "encode", lambda text, **_: [])
    assert engine.submit(ask("a", "")).result().num_prompt_tokens == 1, (
        "it begins with the model's BOS all the same"
    )


def test_preempted_requests_are_paused(start: Start) -> None:
    engine, seen = start(Limits(2, 64, 512), kv_cache_tokens=128, delay=0.001), []

    def look(outputs: Sequence[RequestOutput]) -> None:
        m = engine.metrics()
        seen.append((m.paused_requests, m.waiting_requests, m.generation_requests))

    streams = [engine.submit(ask("0", max_tokens=100), sink=look), engine.submit(ask("1", max_tokens=100))]
    assert len(streams[1].result().token_ids) == 100
    assert (1, 1, 1) in seen, "one waits, preempted, and one runs"
    assert engine.metrics().paused_requests == 0


def test_messages_go_through_the_template(start: Start) -> None:
    engine = start()
    request = GenerationRequest("a", messages=[{"role": "user", "content": "hi"}])
    expected = engine.submit(GenerationRequest("b", prompt="<s>user: hi\nassistant: ")).result()
    assert engine.submit(request).result().token_ids == expected.token_ids


def test_an_idle_engine_sleeps(start: Start) -> None:
    engine = start()
    engine.submit(ask("a")).result()
    wakes: list[bool] = []
    wait = engine._wake.wait
    engine._wake.wait = lambda timeout=None: wakes.append(wait(timeout)) or True  # type: ignore[method-assign]
    engine.submit(ask("b")).result()
    wait_for(lambda: not engine._scheduler.has_work)
    count = len(wakes)
    time.sleep(0.1)
    assert len(wakes) <= count + 1, "it woke up with nothing to do"


def test_unseeded_requests_differ_and_seeded_ones_repeat(start: Start) -> None:
    engine = start()
    texts = [engine.submit(ask(str(i), max_tokens=60, temperature=1.0)).result().text for i in range(2)]
    assert texts[0] != texts[1]
    seeded = [
        engine.submit(ask(str(i), max_tokens=60, temperature=1.0, seed=7)).result().text for i in range(2)
    ]
    assert seeded[0] == seeded[1]


def test_a_result_that_does_not_come_in_time(start: Start) -> None:
    stream = start(delay=SLOW).submit(ask("a", max_tokens=1000))
    with pytest.raises(TimeoutError):
        stream.result(timeout=0.01)
    stream.cancel()
    assert stream.result().finish_reason is FinishReason.CANCELLED
    with pytest.raises(ValueError, match="read to its end"):
        stream.result()


def test_errors_have_their_code_words(start: Start) -> None:
    engine = start(Limits(1, 8, 64))
    with pytest.raises(ForgeError) as refusal:
        engine.submit(ask("a", "x" * 100))
    assert refusal.value.wire_message().startswith("[INVALID_ARG] the prompt has 101 tokens")
