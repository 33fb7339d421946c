"""A request's outputs on the caller's side."""

import time
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue

from trtforge.runtime.request import RequestOutput

#: Gets, from the engine's thread, what one step added to all requests that were submitted with it: one call
#: per step. It must return fast. If it raises, its requests are cancelled and the others go on.
Sink = Callable[[Sequence[RequestOutput]], None]


class Stream:
    """The outputs of one request, as they come: iterating waits for each and ends after the one with a
    finish_reason.

    Only for requests that were submitted without a sink, and for one reader.
    """

    def __init__(self, id: str, num_prompt_tokens: int, cancel: Callable[[], object]) -> None:
        self.id = id
        self.num_prompt_tokens = num_prompt_tokens
        self._cancel = cancel
        self._outputs: SimpleQueue[RequestOutput] = SimpleQueue()
        self._done = False

    def put(self, outputs: Sequence[RequestOutput]) -> None:
        """The sink that the engine calls."""
        for output in outputs:
            self._outputs.put(output)

    def __iter__(self) -> Iterator[RequestOutput]:
        """Raises the request's error if it ended in one."""
        while not self._done:
            yield self._next(None)

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end: what is still to come, as one output.

        Raises the request's error if it ended in one, TimeoutError after `timeout` seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        outputs = []
        while not self._done:
            outputs.append(self._next(end))
        if not outputs:
            raise ValueError(f"the stream of request {self.id} has been read to its end already")
        return merge(outputs)

    def cancel(self) -> None:
        """Stop at the next step; the stream ends with finish_reason CANCELLED."""
        self._cancel()

    def _next(self, end: float | None) -> RequestOutput:
        try:
            output = self._outputs.get(timeout=None if end is None else max(0.0, end - time.monotonic()))
        except Empty:
            raise TimeoutError(f"request {self.id} has not ended yet") from None
        self._done = output.finished
        if output.error is not None:
            raise output.error
        return output


def merge(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """A request's outputs as one: the last one's report, everybody's text and tokens."""
    return outputs[-1]._replace(
        text="".join(o.text for o in outputs),
        token_ids=tuple(t for o in outputs for t in o.token_ids),
        logprobs=tuple(p for o in outputs for p in o.logprobs),
    )
