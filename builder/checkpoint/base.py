"""What every checkpoint reader gives: a config in Hugging Face's terms, and lazily read tensors under
Hugging Face's names, whatever the file format was. Readers translate at the border; nobody above knows GGUF.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's header. dtype: the file's own name for it (F32, BF16, Q4_1, ...)."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class TokenizerFiles:
    """What the engine directory gets of the tokenizer, in Hugging Face's formats."""

    tokenizer_json: bytes
    chat_template: str | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    add_bos_token: bool = False  # whether plain text gets a BOS in front, by the tokenizer's own rule


class Checkpoint(Protocol):
    """An opened checkpoint. Raises CheckpointError for anything damaged, missing or hostile."""

    kind: str  # safetensors, pytorch, gguf
    path: Path
    config: Mapping[str, Any]  # config.json, or the same made from GGUF metadata
    generation_config: Mapping[str, Any]  # may be empty
    tensors: Mapping[str, TensorInfo]

    def read(self, name: str) -> NDArray[np.float32]:
        """One tensor, dequantized to FP32, [out, in] for linears; memory is used for this tensor only."""

    def tokenizer(self) -> TokenizerFiles:
        """The tokenizer, rebuilt if need be."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Coverage:
    """Which source tensors a build used; every other one is reported."""

    used: frozenset[str] = field(default_factory=frozenset)
    unused: tuple[str, ...] = ()
