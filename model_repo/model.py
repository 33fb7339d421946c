"""What the served models share: a request is read and handed on, its responses are sent when the engine has them.

`execute` only enqueues. Sending takes Triton some 0.3 ms a response and asking whether a client is gone 0.1 ms, so
both have threads of their own. This module runs in the stub process of Triton's Python backend, which brings
`triton_python_backend_utils`.
"""

import importlib
import itertools
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from trtforge.model_repo import parse
from trtforge.model_repo.answer import Answer
from trtforge.model_repo.parameters import ModelOptions, of_model
from trtforge.model_repo.port import Port
from trtforge.model_repo.tensors import Kind
from trtforge.model_repo.wire import code_word
from trtforge.plugins.errors import Cancelled, EngineFailure, ForgeError, InvalidArgument
from trtforge.runtime.request import RequestOutput

log = logging.getLogger(__name__)

#: Code word -> Triton's error code, which `/infer` and unary gRPC turn into a status. The rest is INTERNAL.
CODES = {"INVALID_ARG": "INVALID_ARG", "OVERLOADED": "UNAVAILABLE", "UNAVAILABLE": "UNAVAILABLE"} | {
    "CANCELLED": "CANCELLED",
    "DEADLINE": "UNAVAILABLE",
}

SENDERS = 2  # threads; a send waits for the server most of its time
#: Between two rounds of asking for gone clients: at least so long, and so long that asking takes 1/30 of the time.
CANCEL_SECONDS, CANCEL_SHARE = 0.02, 1 / 30


class Job:
    """A Triton request: its sender, and one answer for each sequence that is still running.

    Triton frees what `is_cancelled` looks at when the final flag comes, and dies if they meet: `ending` keeps
    them apart.
    """

    def __init__(self, number: int, request: Any) -> None:
        self.number = number
        self.sender = request.get_response_sender()
        self.client_id: str = request.request_id()
        self.wanted = frozenset(request.requested_output_names())
        self.answers: dict[str, Answer] = {}
        self.ending = threading.Lock()
        self.done = False  # the final flag was sent
        self.gone = False  # so is the client


class Front:
    """A TritonPythonModel: between Triton's requests and a port to the engine."""

    kind: ClassVar[Kind]

    def open_port(self, args: dict[str, str], options: ModelOptions) -> Port:
        """The way to the engine; its outputs go to self.deliver."""
        raise NotImplementedError

    def initialize(self, args: dict[str, str]) -> None:
        self.pb: Any = importlib.import_module("triton_python_backend_utils")
        self.name = args["model_name"]
        log_to_triton(self.pb, self.name)
        self._numbers = itertools.count()
        self._jobs: dict[int, Job] = {}
        self._queues: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(SENDERS)]
        self._stopping = threading.Event()
        self._busy = threading.Event()  # there are requests whose clients may go away
        try:
            self.options, self.decoupled = of_model(args["model_config"])
            self.port = self.open_port(args, self.options)
        except ForgeError as e:
            raise self.pb.TritonModelException(e.wire_message()) from e
        work: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
            (self._send_all, (q,)) for q in self._queues
        ]
        work.append((self._watch_clients, ()))
        self._threads = [threading.Thread(target=t, args=a, name=t.__name__, daemon=True) for t, a in work]
        for thread in self._threads:
            thread.start()

    def execute(self, requests: Sequence[Any]) -> None:
        for request in requests:
            self._accept(request)

    def finalize(self) -> None:
        """Stop everything, so that the model can be loaded again in another process."""
        self._stopping.set()
        self._busy.set()
        self.port.close()
        for q in self._queues:
            q.put(None)
        for thread in self._threads:
            thread.join(timeout=10)

    def deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """What one step added; called by the port, returns at once."""
        split: list[list[RequestOutput]] = [[] for _ in self._queues]
        for output in outputs:
            split[int(output.id.split(".")[0]) % SENDERS].append(output)
        for q, part in zip(self._queues, split, strict=True):
            if part:
                q.put(part)

    # --- a request comes in

    def _accept(self, request: Any) -> None:
        job = Job(next(self._numbers), request)
        try:
            tensors = {t.name(): t.as_numpy() for t in request.inputs()}
            if self.kind is Kind.TOKENS and parse.is_stop_request(tensors):
                self._stop(job)
                return
            rows = parse.read(
                self.kind,
                tensors,
                json.loads(request.parameters() or "{}"),
                decoupled=self.decoupled,
                echo=self.options.echo,
                deadline_ms=self.options.deadline_ms,
            )
        except ForgeError as e:
            self._fail(job, e)
            return
        except Exception as e:  # ours: the client gets an answer, the server goes on
            log.exception("reading a request")
            self._fail(job, EngineFailure(f"{type(e).__name__}: {e}"))
            return
        asks = {f"{job.number}.{i}": ask for i, (ask, _) in enumerate(rows)}
        job.answers = {id: Answer(self.kind, rows[i][1], self.port.facts) for i, id in enumerate(asks)}
        self._jobs[job.number] = job
        self._busy.set()
        for id, ask in asks.items():
            self.port.submit(id, replace(ask, client_id=job.client_id))
        if job.done:  # one row was refused before the last one was submitted
            for id in asks:
                self.port.cancel(id)

    def _stop(self, job: Job) -> None:
        """A stop request ends the running requests of the same id, also those to the engine's text models, and is
        answered by an empty final response."""
        if not job.client_id:
            raise InvalidArgument("stop needs the request id of the request to stop")
        self.port.stop(job.client_id)
        self._send(job, {}, final=True)

    # --- responses go out

    def _send_all(self, q: "queue.SimpleQueue[Any]") -> None:
        while (outputs := q.get()) is not None:
            for output in outputs:
                job = self._jobs.get(int(output.id.split(".")[0]))
                if job is None or job.done:
                    continue
                try:
                    self._answer(job, output)
                except Exception as e:  # ours: this thread goes on, all others wait for it
                    log.exception("answering a request")
                    if not job.done:
                        self._fail(job, e)
                if job.done:
                    self._forget(job)

    def _answer(self, job: Job, output: RequestOutput) -> None:
        answer = job.answers.pop(output.id) if output.finished else job.answers[output.id]
        final = output.finished and not job.answers
        if output.error is not None:
            self._fail(job, output.error)
        elif not job.gone:
            self._send(job, answer.tensors(output), final)
        elif final:
            self._fail(job, Cancelled("the client is gone"))

    def _forget(self, job: Job) -> None:
        self._jobs.pop(job.number, None)
        for id in list(job.answers):  # the other rows of a batch in which one failed
            self.port.cancel(id)

    def _send(self, job: Job, tensors: dict[str, Any], final: bool) -> None:
        tensors = {n: a for n, a in tensors.items() if n in job.wanted}
        response = self.pb.InferenceResponse([self.pb.Tensor(n, a) for n, a in tensors.items()])
        if final:
            self._end(job, response)
        else:
            job.sender.send(response)

    def _fail(self, job: Job, error: Exception) -> None:
        if not isinstance(error, ForgeError):
            error = EngineFailure(f"{type(error).__name__}: {error}")
        code = getattr(self.pb.TritonError, CODES.get(code_word(error), "INTERNAL"))
        message = " ".join(error.wire_message().split())
        self._end(job, self.pb.InferenceResponse([], error=self.pb.TritonError(message, code)))

    def _end(self, job: Job, response: Any) -> None:
        with job.ending:
            job.done = True
            job.sender.send(response, flags=self.pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    # --- clients go away

    def _watch_clients(self) -> None:
        pause = CANCEL_SECONDS
        while self._busy.wait() and not self._stopping.wait(pause):
            self._busy.clear()
            started = time.monotonic()
            for job in list(self._jobs.values()):
                if job.gone:
                    continue
                with job.ending:
                    job.gone = not job.done and job.sender.is_cancelled()
                if job.gone:
                    for id in list(job.answers):
                        self.port.cancel(id)
            if self._jobs:
                self._busy.set()
            pause = max(CANCEL_SECONDS, (time.monotonic() - started) / CANCEL_SHARE)


class TritonLog(logging.Handler):
    """Python's log records in Triton's log."""

    def __init__(self, pb_utils: Any, model: str) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(f"{model}: %(message)s"))
        self._logger = pb_utils.Logger

    def emit(self, record: logging.LogRecord) -> None:
        write = self._logger.log_info
        if record.levelno >= logging.ERROR:
            write = self._logger.log_error
        elif record.levelno >= logging.WARNING:
            write = self._logger.log_warn
        write(self.format(record))


def log_to_triton(pb_utils: Any, model: str) -> None:
    logger = logging.getLogger("trtforge")
    logger.setLevel(logging.INFO)
    logger.handlers = [TritonLog(pb_utils, model)]
    logger.propagate = False
