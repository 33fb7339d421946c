"""What the engine gave out for one sequence -> the output tensors of one Triton response, by name."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtforge.model_repo.parse import Wants
from trtforge.model_repo.port import EngineFacts
from trtforge.model_repo.tensors import Kind
from trtforge.runtime.request import RequestOutput

#: Output tensor -> the engine's name for that moment.
TIMES = {
    "arrival_time_ns": "arrival_ns",
    "first_scheduled_time_ns": "first_scheduled_ns",
    "first_token_time_ns": "first_token_ns",
    "last_token_time_ns": "last_token_ns",
}


@dataclass
class Answer:
    """One sequence of a request, over all its responses."""

    kind: Kind
    wants: Wants
    facts: Callable[[], EngineFacts]
    cum_log_prob: float = field(default=0.0, init=False)

    def tensors(self, output: RequestOutput) -> dict[str, NDArray[Any]]:
        """Outputs that do not apply are absent, not filled with zeros. Scalars are [1, 1] with the batch dimension;
        texts are [1] without, as old clients read them: `as_numpy("text_output")[0].decode()`."""
        wants = self.wants
        tensors = self._ids(output) if self.kind is Kind.TOKENS else self._text(output)
        if wants.log_probs:
            log_probs = [t.logprob for t in output.logprobs]
            self.cum_log_prob += sum(log_probs)
            tensors["cum_log_probs"] = np.array([[self.cum_log_prob]], np.float32)
            tensors["output_log_probs"] = np.array([[log_probs]], np.float32)  # [1, 1, n]
        if wants.batch_index is not None:
            tensors["batch_index"] = scalar(wants.batch_index)
        if wants.num_input_tokens:
            tensors["num_input_tokens"] = scalar(output.num_prompt_tokens)
        if wants.num_output_tokens:
            tensors["num_output_tokens"] = scalar(len(output.token_ids))
        if output.finish_reason is not None:
            tensors["finish_reason"] = strings(output.finish_reason.value)
            if output.stop_reason is not None:
                tensors["stop_reason"] = strings(str(output.stop_reason))
            if wants.perf_metrics:
                tensors |= self._performance(output)
        return tensors

    def _text(self, output: RequestOutput) -> dict[str, NDArray[Any]]:
        echo = self.wants.echo if isinstance(self.wants.echo, str) else ""
        return {"text_output": strings(echo + output.text)}

    def _ids(self, output: RequestOutput) -> dict[str, NDArray[Any]]:
        echo = self.wants.echo if isinstance(self.wants.echo, tuple) else ()
        ids = (*echo, *output.token_ids)
        return {"output_ids": np.array([[ids]], np.int32), "sequence_length": scalar(len(ids))}

    def _performance(self, output: RequestOutput) -> dict[str, NDArray[Any]]:
        total, reused = output.num_kv_blocks, output.num_cached_tokens // self.facts().tokens_per_block
        tensors = {
            "kv_cache_alloc_total_blocks": scalar(total),
            "kv_cache_reused_blocks": scalar(reused),
            "kv_cache_alloc_new_blocks": scalar(total - reused),
        }
        times = {n: output.timings[k] for n, k in TIMES.items() if k in output.timings}
        return tensors | {n: np.array([[t]], np.int64) for n, t in times.items()}


def scalar(value: int) -> NDArray[Any]:
    return np.array([[value]], np.int32)


def strings(*values: str) -> NDArray[Any]:
    return np.array([v.encode() for v in values], np.object_)
