"""Engine directory and requests in, tokens out.

    from trtforge.runtime import LLM, SamplingParams

The names below are loaded when they are first used: importing this package imports nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtforge.runtime.config import EngineConfig
    from trtforge.runtime.engine import Engine
    from trtforge.runtime.llm import LLM
    from trtforge.runtime.request import FinishReason, GenerationRequest, RequestOutput, SamplingParams
    from trtforge.runtime.stream import Stream

__all__ = [
    "LLM",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "GenerationRequest",
    "RequestOutput",
    "SamplingParams",
    "Stream",
]

_MODULES = {
    "LLM": "llm",
    "Engine": "engine",
    "EngineConfig": "config",
    "FinishReason": "request",
    "GenerationRequest": "request",
    "RequestOutput": "request",
    "SamplingParams": "request",
    "Stream": "stream",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
