"""The engine: one thread that steps, any number of threads that submit.

engine = Engine.open("engine").start()
stream = engine.submit(GenerationRequest(id="1", prompt="Hello"))
for output in stream:
    print(output.text, end="")
engine.shutdown()
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from trtforge.runtime.config import EngineConfig
from trtforge.runtime.manifest import Manifest
from trtforge.runtime.metrics import Metrics
from trtforge.runtime.request import GenerationRequest, RequestOutput

__all__ = ["Engine", "EngineConfig", "Sink", "Stream"]

#: Gets, from the engine's thread, what one step added to all requests that were submitted with it: one call
#: per step. It must return fast. If it raises, its requests are cancelled and the others go on.
Sink = Callable[[Sequence[RequestOutput]], None]


class Stream:
    """The outputs of one request, as they come. Iterating blocks and ends after the output with a
    finish_reason.

    Only for requests that were submitted without a sink.
    """

    id: str
    num_prompt_tokens: int

    def __iter__(self) -> Iterator[RequestOutput]:
        """Raises the request's error if it ended in one."""
        raise NotImplementedError

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end: one output with the whole text, all tokens and the finish_reason.

        Raises the request's error if it ended in one, TimeoutError after `timeout` seconds.
        """
        raise NotImplementedError

    def cancel(self) -> None:
        """Stop at the next step; the stream ends with finish_reason CANCELLED."""
        raise NotImplementedError


class Engine:
    """Runs requests over one engine directory with in-flight batching."""

    manifest: Manifest
    config: EngineConfig
    num_blocks: tuple[int, ...]  # per KV group

    @classmethod
    def open(cls, engine_dir: str | Path, config: EngineConfig | None = None) -> "Engine":
        """Read the engine directory, load the executor and allocate the KV pools; no thread runs yet.

        Raises EngineFormatError for a directory that is not whole, InvalidArgument for an impossible config.
        """
        raise NotImplementedError

    def start(self) -> "Engine":
        """Start the engine's thread. Returns the engine itself."""
        raise NotImplementedError

    def submit(self, request: GenerationRequest, sink: Sink | None = None) -> Stream:
        """Queue a request; returns at once. Callable from any thread.

        With a sink, outputs go to it and the returned Stream serves only to cancel; without, they wait in the
        Stream. Raises InvalidArgument for a request that cannot be served (and says why, with the numbers),
        Overloaded if the queue is full, EngineFailure if the engine's thread is dead.
        """
        raise NotImplementedError

    def cancel(self, request_id: str) -> bool:
        """End a request and free what it holds before the next step: its client is gone. Its last output has
        finish_reason CANCELLED. False if no such request is in flight."""
        raise NotImplementedError

    def stop(self, request_id: str) -> bool:
        """End a request with what it has, as an answer: like cancel, but finish_reason is STOP and the text
        that was held back is given out. False if no such request is in flight."""
        raise NotImplementedError

    def shutdown(self, timeout: float = 30.0) -> None:
        """Cancel what is in flight, stop the thread, free pools and executor. Safe to call twice."""
        raise NotImplementedError

    @property
    def healthy(self) -> bool:
        """Whether the engine's thread runs and can serve."""
        raise NotImplementedError

    def metrics(self) -> Metrics:
        """A consistent snapshot, as of the end of the latest step; cheap, callable from any thread."""
        raise NotImplementedError

    def __enter__(self) -> "Engine":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.shutdown()
