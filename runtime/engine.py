"""The engine: one thread that steps, any number of threads that submit.

engine = Engine.open("engine").start()
stream = engine.submit(GenerationRequest(id="1", prompt="Hello"))
for output in stream:
    print(output.text, end="")
engine.shutdown()
"""

import logging
import secrets
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from trtforge.plugins.errors import DeadlineExceeded, EngineFailure, ForgeError, InvalidArgument, Overloaded
from trtforge.runtime import manifest as manifest_format
from trtforge.runtime.batch import Batcher
from trtforge.runtime.block_pool import BlockPool
from trtforge.runtime.config import EngineConfig
from trtforge.runtime.executors import open_executor
from trtforge.runtime.executors.base import Executor, ExecutorLost
from trtforge.runtime.metrics import Metrics
from trtforge.runtime.output import OutputStream
from trtforge.runtime.recorder import Recorder
from trtforge.runtime.request import FinishReason, GenerationRequest, Request, RequestOutput, Step
from trtforge.runtime.sampler import Sampler
from trtforge.runtime.scheduler import Scheduler
from trtforge.runtime.stream import Sink, Stream
from trtforge.runtime.tokenizer import Tokenizer

__all__ = ["Engine", "EngineConfig", "Sink", "Stream"]

log = logging.getLogger(__name__)


class Engine:
    """Runs requests over one engine directory with in-flight batching.

    num_blocks: of each KV group's pool.
    """

    def __init__(
        self, executor: Executor, tokenizer: Tokenizer, config: EngineConfig, num_blocks: tuple[int, ...]
    ) -> None:
        """`Engine.open` is the way; here its parts are put together, the pools allocated."""
        self.manifest = executor.manifest
        self.config = config
        self.tokenizer = tokenizer
        self.num_blocks = num_blocks
        self.limits = config.limits(self.manifest.limits)
        self._executor = executor
        self._scheduler = Scheduler(
            self.limits,
            self.manifest.kv.tokens_per_block,
            [BlockPool(n) for n in num_blocks],
            config.policy,
        )
        self._batcher = Batcher(self.manifest)
        self._sampler = Sampler()
        self._recorder = Recorder(self._scheduler)
        self._unsent: dict[Request, None] = {}  # who may have something new, in order
        self._thread = threading.Thread(target=self._run, name="trtforge-engine", daemon=True)
        # What other threads touch too, under this lock; waiting on it is how an idle engine sleeps.
        self._wake = threading.Condition()
        self._inbox: list[Request] = []
        self._endings: dict[str, FinishReason] = {}  # request id -> how it is to end
        self._outputs: dict[str, tuple[OutputStream, Sink]] = {}  # every request in flight
        self._closing = False
        self._death: BaseException | None = None

    @classmethod
    def open(cls, engine_dir: str | Path, config: EngineConfig | None = None) -> "Engine":
        """Read the engine directory, load the executor and allocate the KV pools; no thread runs yet.

        Raises EngineFormatError for a directory that is not whole, InvalidArgument for an impossible config.
        """
        engine_dir, config = Path(engine_dir), config or EngineConfig()
        manifest = manifest_format.load(engine_dir)
        num_blocks = config.num_blocks(manifest)
        tokenizer = Tokenizer.load(engine_dir)
        executor = open_executor(engine_dir, manifest, threads=config.threads)
        executor.allocate(num_blocks)
        engine = cls(executor, tokenizer, config, num_blocks)
        log.info("%s", engine.describe_pool())
        return engine

    def describe_pool(self) -> str:
        """One line for people: how many blocks and what they hold."""
        kv, blocks = self.manifest.kv, min(self.num_blocks)
        size = sum(n * kv.block_bytes(g) for g, n in enumerate(self.num_blocks))
        tokens = blocks * kv.tokens_per_block
        line = (
            f"KV pool: {blocks} blocks of {kv.tokens_per_block} tokens ({kv.dtype}), {size / 2**20:.1f} MiB"
        )
        if len(self.num_blocks) > 1:
            line += f" in {len(self.num_blocks)} groups"
        if tokens < self.limits.max_seq_len:
            line += f"; less than one request of max_seq_len {self.limits.max_seq_len}"
        return line

    def start(self) -> "Engine":
        """Start the engine's thread. Returns the engine itself."""
        self._thread.start()
        return self

    # -- for any thread
    # ------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, sink: Sink | None = None) -> Stream:
        """Queue a request; returns at once. Callable from any thread.

        With a sink, outputs go to it and the returned Stream serves only to cancel; without, they wait in the
        Stream. Raises InvalidArgument for a request that cannot be served (and says why, with the numbers),
        Overloaded if the queue is full, EngineFailure if the engine's thread is dead.
        """
        self._check_alive()
        admitted = self._admit(request)
        stream = Stream(request.id, len(admitted.prompt_ids), lambda: self.cancel(request.id))
        with self._wake:
            self._check_alive()
            self._check_room(admitted)
            self._outputs[request.id] = (
                OutputStream(admitted, self.tokenizer.token_bytes),
                sink or stream.put,
            )
            self._inbox.append(admitted)
            self._wake.notify()
        return stream

    def cancel(self, request_id: str) -> bool:
        """End a request and free what it holds before the next step: its client is gone. Its last output has
        finish_reason CANCELLED. False if no such request is in flight.
        """
        return self._end(request_id, FinishReason.CANCELLED)

    def stop(self, request_id: str) -> bool:
        """End a request with what it has, as an answer: like cancel, but finish_reason is STOP. False if no
        such request is in flight.
        """
        return self._end(request_id, FinishReason.STOP)

    def shutdown(self, timeout: float = 30.0) -> None:
        """Cancel what is in flight, stop the thread, free pools and executor. Safe to call twice.

        Raises EngineFailure if the step that is running does not end in time.
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise EngineFailure(f"the engine's thread did not stop within {timeout:g} s")
        self._executor.close()

    @property
    def healthy(self) -> bool:
        """Whether the engine's thread runs and can serve."""
        return self._thread.is_alive() and self._death is None and not self._closing

    def metrics(self) -> Metrics:
        """A snapshot as of the latest step; cheap, callable from any thread."""
        return self._recorder.snapshot(healthy=self.healthy, unseen=len(self._inbox))

    def __enter__(self) -> "Engine":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.shutdown()

    def _admit(self, asked: GenerationRequest) -> Request:
        """The request as it will run. Raises InvalidArgument for one that cannot."""
        params, own = asked.params, self.manifest.eos_token_ids
        params.check(self.manifest.vocab_size)
        if asked.deadline is not None and not asked.deadline >= 0:  # NaN would never pass
            raise InvalidArgument(f"deadline must be at least 0, got {asked.deadline}")
        prompt_ids = self._prompt_ids(asked)
        max_tokens = self._scheduler.check_fits(len(prompt_ids), params.max_tokens)
        stop = own if params.stop_token_ids is None else params.stop_token_ids
        end_ids = {i for i in stop if 0 <= i < self.manifest.vocab_size}  # no other one can come
        now = time.monotonic()
        return Request(
            id=asked.id,
            prompt_ids=prompt_ids,
            params=params,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            max_tokens=max_tokens,
            end_ids=frozenset(end_ids.difference(own) if params.ignore_eos else end_ids),
            priority=asked.priority,
            arrival=now,
            deadline=None if asked.deadline is None else now + asked.deadline,
            cache_salt=asked.cache_salt,
        )

    def _prompt_ids(self, asked: GenerationRequest) -> list[int]:
        given = [x for x in (asked.prompt, asked.token_ids, asked.messages) if x is not None]
        if len(given) != 1:
            raise InvalidArgument("give exactly one of prompt, token_ids and messages")
        if asked.token_ids is not None:
            for token in asked.token_ids:
                if not 0 <= token < self.manifest.vocab_size:
                    raise InvalidArgument(
                        f"token_ids: {token} is not in the vocabulary of {self.manifest.vocab_size}"
                    )
            return list(asked.token_ids)
        if asked.messages is not None:
            return self.tokenizer.encode_messages(asked.messages, max_tokens=self.limits.max_seq_len)
        assert asked.prompt is not None
        ids = self.tokenizer.encode(asked.prompt, max_tokens=self.limits.max_seq_len)
        # Text that is empty continues from the beginning of all texts, if the model has one.
        return ids or ([] if self.manifest.bos_token_id is None else [self.manifest.bos_token_id])

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineFailure(f"the engine has failed and serves no more: {self._death}")
        if self._closing:
            raise EngineFailure("the engine is shut down")

    def _check_room(self, request: Request) -> None:
        if request.id in self._outputs:
            raise InvalidArgument(f"request id {request.id!r} is in flight already; choose another")
        queued = max(0, len(self._outputs) - self.limits.max_batch_size)  # those that no step can take now
        full = None
        if self.config.max_queue_requests is not None and queued >= self.config.max_queue_requests:
            full = f"{queued} requests wait"
        elif self.config.max_queue_tokens is not None:
            unseen = [s.request for s, _ in self._outputs.values() if not s.request.first_scheduled_ns]
            tokens = sum(len(r.prompt_ids) for r in unseen)
            if tokens and tokens + len(request.prompt_ids) > self.config.max_queue_tokens:
                full = f"{tokens} prompt tokens wait, {self.config.max_queue_tokens} may"
        if full is not None:
            self._recorder.refused()
            raise Overloaded(
                f"the queue is full: {full}; send it again later", self._recorder.retry_after_ms(queued)
            )

    def _end(self, request_id: str, reason: FinishReason) -> bool:
        with self._wake:
            if request_id not in self._outputs:
                return False
            self._endings.setdefault(request_id, reason)
            self._wake.notify()
        return True

    # -- the engine's thread
    # -------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._recorder.start()
        try:
            while self._receive():
                if self._scheduler.has_work:
                    self._step()
                if not self._scheduler.has_work:  # no step will come that it could be sent in
                    self._send()
            self._send()
            for request in self._in_flight():
                self._scheduler.finish(request, FinishReason.CANCELLED)
        except BaseException as e:
            log.exception("the engine has failed")
            with self._wake:
                self._death = e
            for request in self._in_flight():  # the scheduler is not asked: it may be what failed
                if request.finish_reason is None:
                    request.finish_reason = FinishReason.ERROR
                    request.error = EngineFailure(f"the engine has failed: {e}")
        self._send_of(self._in_flight())

    def _step(self) -> None:
        """One step of all requests together: the hot loop. What the step before gave is sent meanwhile."""
        lap = self._recorder.lap
        step = self._scheduler.plan()
        self._recorder.planned(step)
        try:
            arrays = self._batcher.arrays(step)
            lap("plan")
            logits = self._executor.run(arrays, meanwhile=self._send)
            lap("run")
            sampled = self._sampler.sample(logits, step)
        except ExecutorLost:
            raise
        except Exception as e:
            self._fail(step, e)
            return
        self._recorder.stepped(step)
        self._scheduler.commit(step, sampled)
        self._stop_by_text(step)
        self._unsent.update((row.request, None) for row in step.rows)
        lap("sample")
        if self.config.check_integrity:
            self._scheduler.check_integrity()

    def _receive(self) -> bool:
        """Take in what other threads asked, asleep while there is nothing to do. False when shutting down."""
        with self._wake:
            while not (self._inbox or self._endings or self._scheduler.has_work or self._closing):
                self._wake.wait()
                self._recorder.start()
            inbox, self._inbox = self._inbox, []
            endings, self._endings = self._endings, {}
        for request in inbox:
            self._scheduler.add(request)
        for request_id, reason in endings.items():
            found = self._outputs.get(request_id)
            if (
                found is not None and found[0].request.finish_reason is None
            ):  # else a step has ended it meanwhile
                self._finish(found[0].request, reason)
        for request in self._scheduler.expired(time.monotonic()):
            late = DeadlineExceeded(f"not done within its deadline, at {len(request.output_ids)} tokens")
            self._finish(request, FinishReason.ERROR, late)
        return not self._closing

    def _fail(self, step: Step, error: Exception) -> None:
        """A step failed: roll it back, end its requests; the others go on."""
        self._send()  # of the step before, if the executor did not come to it; were this what failed, it fails again
        log.error("a step of %d requests failed", len(step.rows), exc_info=error)
        self._scheduler.rollback(step)
        failure = (
            error if isinstance(error, ForgeError) else EngineFailure(f"{type(error).__name__}: {error}")
        )
        for row in step.rows:
            self._finish(row.request, FinishReason.ERROR, failure)

    def _finish(self, request: Request, reason: FinishReason, error: Exception | None = None) -> None:
        self._scheduler.finish(request, reason, error=error)
        self._unsent[request] = None

    def _stop_by_text(self, step: Step) -> None:
        """End requests whose text has come to a stop string: this cannot wait until it is sent, since the next step
        must not have them.
        """
        for row in step.rows:
            request = row.request
            if request.params.stop:
                stream = self._outputs[request.id][0]
                stream.read()
                if stream.stopped_by is not None and request.finish_reason is None:
                    self._scheduler.finish(request, FinishReason.STOP, stop_reason=stream.stopped_by)

    def _in_flight(self) -> list[Request]:
        with self._wake:
            return [stream.request for stream, _ in self._outputs.values()]

    def _send(self) -> None:
        """Give out what is new since this was called before."""
        self._recorder.lap("run")  # called from there, mostly
        self._send_of(self._unsent)
        self._unsent.clear()
        self._recorder.lap("send")

    def _send_of(self, requests: Iterable[Request]) -> None:
        """Give out what is new of these requests: one call for each sink."""
        now = time.monotonic_ns()
        tokens_per_block, groups = self.manifest.kv.tokens_per_block, len(self.num_blocks)
        batches: dict[Sink, list[RequestOutput]] = {}
        given: list[tuple[OutputStream, int]] = []
        for request in requests:
            stream, sink = self._outputs[request.id]
            stream.read()
            if stream.stopped_by is not None:  # its last token completed the stop string too
                request.finish_reason, request.stop_reason = FinishReason.STOP, stream.stopped_by
            num_new = stream.num_new
            if num_new or request.finish_reason is not None:
                blocks = groups * -(-request.num_computed // tokens_per_block)
                batches.setdefault(sink, []).append(stream.output(now, blocks))
                given.append((stream, num_new))
            if request.finish_reason is not None:
                with self._wake:
                    del self._outputs[request.id]
        self._recorder.given(given)  # before anybody learns that a request has ended
        for sink, outputs in batches.items():
            try:
                sink(outputs)
            except Exception:
                log.exception("a sink failed; its requests are cancelled")
                for output in outputs:
                    self.cancel(output.id)
