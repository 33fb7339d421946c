"""What every checkpoint reader gives: a config in Hugging Face's terms, and lazily read tensors under
Hugging Face's names, whatever the file format was. Readers translate at the border; nobody above knows GGUF.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trtforge.builder.blocks import BlockFormat, Blocks
from trtforge.plugins.errors import CheckpointError

# buffers that old checkpoints carry and that follow from the config: neither used nor worth a word
DERIVED_SUFFIXES = (".rotary_emb.inv_freq",)


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

    def block_format(self, name: str) -> BlockFormat | None:
        """What `read_blocks` gives for a tensor; None if it is not quantized."""

    def read_blocks(self, name: str) -> Blocks:
        """A quantized matrix as it is stored, or rounded once more if its format is not exact."""

    def tokenizer(self) -> TokenizerFiles:
        """The tokenizer, rebuilt if need be."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Coverage:
    """Which source tensors a build uses; every other one is reported, sorted by name."""

    used: frozenset[str] = field(default_factory=frozenset)
    unused: tuple[str, ...] = ()

    def report(self) -> str:
        """One line for people; empty if nothing is left over."""
        if not self.unused:
            return ""
        shown = ", ".join(self.unused[:5]) + (", ..." if len(self.unused) > 5 else "")
        return f"{len(self.unused)} tensors of the checkpoint are not used: {shown}"


def cover(checkpoint: Checkpoint, wanted: Mapping[str, tuple[int, ...]]) -> Coverage:
    """Check that every wanted tensor is there with its shape, and tell which others are left over.

    wanted: Hugging Face tensor name -> shape, as the model's spec demands it. Raises CheckpointError that names
    the first missing tensor (with the nearest name that is there), or the first with another shape.
    """
    tensors = checkpoint.tensors
    missing = [name for name in wanted if name not in tensors]
    if missing:
        near = difflib.get_close_matches(missing[0], tensors, n=1)
        raise CheckpointError(
            f"{checkpoint.path}: tensor {missing[0]!r} is missing"
            + (f" ({len(missing)} are)" if len(missing) > 1 else "")
            + (f"; the nearest there is {near[0]!r}" if near else "")
            + "; the checkpoint is incomplete or of another architecture than its config says"
        )
    for name, shape in wanted.items():
        if tensors[name].shape != shape:
            raise CheckpointError(
                f"{checkpoint.path}: tensor {name!r} has shape {list(tensors[name].shape)}, "
                f"its config demands {list(shape)}; the two do not belong together"
            )
    unused = (name for name in tensors if name not in wanted and not name.endswith(DERIVED_SUFFIXES))
    return Coverage(frozenset(wanted), tuple(sorted(unused)))
