"""Architecture families: one small file each, found by being in this folder. A file defines `FAMILY`.

A family says which architectures it serves, how their config becomes a ModelSpec, and under which names their
tensors lie. It is a table entry, not a class tree; the graph is the same for all (builder/graph.py), and what
can be told from the tensors (vocabulary, tying, biases) is told there (builder/translate.py).
"""

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from trtforge.builder.checkpoint.base import TensorInfo
from trtforge.builder.spec import ModelSpec
from trtforge.plugins.errors import UnsupportedModel


@dataclass(frozen=True)
class GGUFNames:
    """How llama.cpp's converter stored this family; undone by the GGUF reader.

    architecture: `general.architecture`. permuted_qk: rows of Q and K are interleaved for llama.cpp's
    rotation. norm_offset: what the converter added to norm weights. names: GGUF suffix -> Hugging Face
    suffix, beyond the common table of builder/checkpoint/gguf.py. config: extra (Hugging Face key -> value
    from GGUF metadata).
    """

    architecture: str
    permuted_qk: bool = False
    norm_offset: float = 0.0
    names: Mapping[str, str] | None = None
    config: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class Family:
    """One family.

    spec(config, tensors, max_seq_len): the ModelSpec; max_seq_len fixes RoPE rules that depend on the length.
    modules: the graph's name of a layer's module (`attention.q`) -> its name within a layer of the
    checkpoint. fused: a module of the checkpoint that stacks several of the graph's, by rows, in this order.
    gguf: None where llama.cpp has no name of its own for it. prefixes: what may stand before `embed_tokens`
    and `layers`; the first that the checkpoint has is taken.
    """

    name: str
    architectures: tuple[str, ...]
    spec: Callable[[Mapping[str, Any], Mapping[str, TensorInfo], int], ModelSpec]
    modules: Mapping[str, str]
    gguf: GGUFNames | None = None
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    prefixes: tuple[str, ...] = ("model.",)


@cache
def families() -> dict[str, Family]:
    """All families by name."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        family = getattr(importlib.import_module(f"{__name__}.{module.name}"), "FAMILY", None)
        if family is not None:
            found[family.name] = family
    return found


def family_of(architecture: str) -> Family:
    """The family that serves an architecture (`LlamaForCausalLM`); UnsupportedModel names the nearest and
    all."""
    by_architecture = {a: f for f in families().values() for a in f.architectures}
    if architecture in by_architecture:
        return by_architecture[architecture]
    nearest = max(
        by_architecture, key=lambda known: difflib.SequenceMatcher(None, architecture, known).ratio()
    )
    raise UnsupportedModel(
        f"architecture {architecture!r} is not supported; the nearest that is: {nearest}; "
        f"all: {', '.join(sorted(by_architecture))}"
    )
