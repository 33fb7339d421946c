"""The shortest way from an engine directory to text.

from trtforge.runtime import LLM, SamplingParams

with LLM("engine") as llm:
    for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=16)):
        print(output.text)
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from trtforge.runtime.config import EngineConfig
from trtforge.runtime.engine import Engine
from trtforge.runtime.request import GenerationRequest, RequestOutput, SamplingParams
from trtforge.runtime.stream import Stream


class LLM:
    """An engine that runs for as long as this object is open.

    config: how to run it; its queue is unbounded here unless it says otherwise.
    """

    def __init__(self, engine_dir: str | Path, config: EngineConfig | None = None) -> None:
        self.engine = Engine.open(engine_dir, config or EngineConfig(max_queue_requests=None)).start()
        self._submitted = 0

    def generate(
        self, prompts: Sequence[str | GenerationRequest], params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """The answers in the order of the prompts, all computed as one in-flight batch.

        params: for the prompts that are plain text; requests bring their own. Raises the first error of any;
        the others are cancelled then.
        """
        streams: list[Stream] = []
        try:
            for prompt in prompts:
                streams.append(self.submit(prompt, params))
            return [stream.result() for stream in streams]
        finally:
            for stream in streams:
                stream.cancel()  # of those that have ended this means nothing

    def stream(
        self, prompt: str | GenerationRequest, params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """The answer to one prompt as it grows. A reader that stops early cancels it."""
        stream = self.submit(prompt, params)
        try:
            yield from stream
        finally:
            stream.cancel()

    def submit(self, prompt: str | GenerationRequest, params: SamplingParams | None = None) -> Stream:
        """Queue one prompt. A request without an id gets one."""
        if isinstance(prompt, str):
            prompt = GenerationRequest(id="", prompt=prompt, params=params or SamplingParams())
        self._submitted += 1
        return self.engine.submit(replace(prompt, id=prompt.id or f"llm-{self._submitted}"))

    def close(self) -> None:
        """Stop the engine and free its memory. Safe to call twice."""
        self.engine.shutdown()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()
