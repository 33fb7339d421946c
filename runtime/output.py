"""One request's way out: from the tokens that a step gave it to the RequestOutput that its client gets."""

from trtforge.runtime.detokenizer import Detokenizer, TokenBytes
from trtforge.runtime.request import NO_TIMINGS, FinishReason, Request, RequestOutput


class OutputStream:
    """What of a request has been given out, and when.

    `read` takes in the tokens that are new; `output` gives out what was read since the output before.
    """

    def __init__(self, request: Request, token_bytes: TokenBytes) -> None:
        self.request = request
        self.num_read = self.num_given = 0  # of request.output_ids
        self.first_token_ns = 0
        self.last_token_ns = int(request.arrival * 1e9)
        self.latency_ns = 0  # from the tokens before, or from arrival, to the latest ones
        self._new_text = ""
        self._text = Detokenizer(token_bytes, request.prompt_ids, request.params.stop)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that the text has come to."""
        return self._text.stopped_by

    @property
    def num_new(self) -> int:
        """Tokens that were read and not yet given out."""
        return self.num_read - self.num_given

    def read(self) -> None:
        """Take in the tokens that are new, up to a stop string.

        An end token that ended the request is no part of its answer.
        """
        request, min_tokens = self.request, self.request.params.min_tokens
        end, reason = len(request.output_ids), request.finish_reason
        if reason is not None and isinstance(request.stop_reason, int):
            end -= 1
        while self.num_read < end and self._text.stopped_by is None:
            token = request.output_ids[self.num_read]
            self.num_read += 1
            self._new_text += self._text.feed((token,), may_stop=self.num_read >= min_tokens)
        if reason is not None and reason is not FinishReason.ERROR:
            self._new_text += self._text.finish(may_stop=self.num_read >= min_tokens)

    def output(self, now: int, num_kv_blocks: int) -> RequestOutput:
        """What is new of the request as it stands, given out at `now` (ns, monotonic)."""
        request, text, new = self.request, self._new_text, slice(self.num_given, self.num_read)
        if self.num_new:
            self.latency_ns = now - self.last_token_ns
            self.last_token_ns = now
            self.first_token_ns = self.first_token_ns or now
        self._new_text, self.num_given = "", self.num_read
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
            timings=NO_TIMINGS if request.finish_reason is None else self._timings(),
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
