"""One request's way out: from the tokens that a step gave it to the RequestOutput that its client gets."""

import time

from trtforge.runtime.detokenizer import Detokenizer, TokenBytes
from trtforge.runtime.request import FinishReason, Request, RequestOutput

_TEXT_ENDS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED)


class OutputStream:
    """What of a request has been given out, and when."""

    def __init__(self, request: Request, token_bytes: TokenBytes) -> None:
        self.request = request
        self.num_given = 0  # of request.output_ids
        self.first_token_ns = 0
        self.last_token_ns = int(request.arrival * 1e9)
        self.latency_ns = 0  # from the tokens before, or from arrival, to the latest ones
        self._text = Detokenizer(token_bytes, request.prompt_ids, request.params.stop)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that the text has come to."""
        return self._text.stopped_by

    def take(self) -> tuple[str, int]:
        """The text of the tokens that are new, and how many they are; up to a stop string.

        An end token that ended the request is no part of its answer.
        """
        request, start, text = self.request, self.num_given, ""
        end = len(request.output_ids)
        if request.finish_reason is FinishReason.STOP and isinstance(request.stop_reason, int):
            end -= 1
        while self.num_given < end and self.stopped_by is None:
            token = request.output_ids[self.num_given]
            self.num_given += 1
            text += self._text.feed([token], may_stop=self.num_given >= request.params.min_tokens)
        if request.finish_reason in _TEXT_ENDS:
            text += self._text.finish(may_stop=self.num_given >= request.params.min_tokens)
        if self.num_given > start:
            now = time.monotonic_ns()
            self.latency_ns = now - self.last_token_ns
            self.last_token_ns = now
            self.first_token_ns = self.first_token_ns or now
        return text, self.num_given - start

    def output(self, text: str, num_new: int, num_kv_blocks: int) -> RequestOutput:
        """The output of what `take` gave, as the request stands now."""
        request = self.request
        new = slice(self.num_given - num_new, self.num_given)
        return RequestOutput(
            id=request.id,
            text=text,
            token_ids=tuple(request.output_ids[new]),
            logprobs=tuple(request.logprobs[new]),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            error=request.error,
            num_prompt_tokens=len(request.prompt_ids),
            num_cached_tokens=request.num_cached,
            num_output_tokens=self.num_given,
            num_kv_blocks=num_kv_blocks,
            timings=self._timings() if request.finish_reason is not None else {},
        )

    def _timings(self) -> dict[str, int]:
        """Nanoseconds on the monotonic clock; what has not happened is left out."""
        all_times = {
            "arrival_ns": int(self.request.arrival * 1e9),
            "first_scheduled_ns": self.request.first_scheduled_ns,
            "first_token_ns": self.first_token_ns,
            "last_token_ns": self.last_token_ns if self.num_given else 0,
        }
        return {name: ns for name, ns in all_times.items() if ns}
