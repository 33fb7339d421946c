"""From an opened checkpoint to what the graph needs: the ModelSpec, and where each of its weights lies.

Everything is decided and checked on the config and the tensors' headers, before a weight is read: every
weight has its tensor with the right shape, vocabulary and biases are the tensors', and what is left over is
reported.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtforge.builder.blocks import BlockFormat, Blocks
from trtforge.builder.checkpoint.base import Checkpoint, Coverage, TensorInfo, cover
from trtforge.builder.families import Family, family_of
from trtforge.builder.spec import ModelSpec
from trtforge.plugins.errors import CheckpointError, UnsupportedModel


@dataclass(frozen=True)
class Source:
    """Where a weight lies: a tensor of the checkpoint, or rows [start, stop) of one that stacks several."""

    tensor: str
    rows: tuple[int, int] | None = None

    def read(self, checkpoint: Checkpoint) -> NDArray[np.float32]:
        """The weight in FP32."""
        array = checkpoint.read(self.tensor)
        return array if self.rows is None else array[self.rows[0] : self.rows[1]]

    def block_format(self, checkpoint: Checkpoint) -> BlockFormat | None:
        """See Checkpoint."""
        return checkpoint.block_format(self.tensor)

    def read_blocks(self, checkpoint: Checkpoint) -> Blocks:
        """The weight as it is stored."""
        blocks = checkpoint.read_blocks(self.tensor)
        return blocks if self.rows is None else blocks.rows(slice(*self.rows))


@dataclass(frozen=True)
class Translation:
    """A checkpoint in our own terms. sources, stored_types (the file's own name for it): for each name of
    `spec.weight_shapes()`. formats: of those that are quantized. warnings: for people."""

    spec: ModelSpec
    sources: Mapping[str, Source]
    stored_types: Mapping[str, str]
    formats: Mapping[str, BlockFormat]
    coverage: Coverage
    warnings: tuple[str, ...] = ()


def translate(checkpoint: Checkpoint, max_seq_len: int) -> Translation:
    """Decide what the model is. max_seq_len: of the engine, for RoPE rules that depend on the length.

    Raises UnsupportedModel for an architecture or feature that is not done, CheckpointError for a config that
    makes no sense, a missing tensor or one with another shape; each names the field or tensor.
    """
    tensors = checkpoint.tensors
    family = family_of(_architecture(checkpoint.config))
    prefix = next((p for p in family.prefixes if f"{p}embed_tokens.weight" in tensors), family.prefixes[0])
    spec = family.spec(checkpoint.config, tensors, max_seq_len)
    spec, warnings = _told_by_tensors(replace(spec, name=_name(checkpoint.path)), family, tensors, prefix)
    sources = _sources(spec, family, prefix, tensors)
    wanted = _wanted(spec, sources)
    _check_shapes(spec, wanted, tensors)
    coverage = cover(checkpoint, wanted)
    _check_siblings(coverage)
    types = {name: tensors[source.tensor].dtype for name, source in sources.items()}
    formats = {name: fmt for name, source in sources.items() if (fmt := source.block_format(checkpoint))}
    return Translation(spec, sources, types, formats, coverage, warnings)


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list | tuple) or not names or not isinstance(names[0], str):
        raise CheckpointError(
            f"config.json: architectures is {names!r}, want a list with the architecture's name"
        )
    return names[0]


def _name(path: Path) -> str:
    """The directory's name, or a single file's without its suffix."""
    return printable(path.stem if path.is_file() else path.resolve().name)


def printable(name: str) -> str:
    """A file's name with ? for each byte that is not UTF-8, which no graph and no log would take."""
    return name.encode(errors="replace").decode()


def _told_by_tensors(
    spec: ModelSpec, family: Family, tensors: Mapping[str, TensorInfo], prefix: str
) -> tuple[ModelSpec, tuple[str, ...]]:
    """The spec with vocabulary, tying and biases as the tensors have them, and what people should know."""
    embedding = tensors.get(f"{prefix}embed_tokens.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(
            f"tensor '{prefix}embed_tokens.weight' is {'missing' if embedding is None else 'not a matrix'}; "
            f"the architecture {spec.architecture} has its embedding there"
        )
    warnings = []
    vocab_size = embedding.shape[0]
    if vocab_size != spec.vocab_size:
        warnings.append(
            f"config.json: vocab_size is {spec.vocab_size}, but {embedding.name} has {vocab_size} rows; "
            f"{vocab_size} is used"
        )
    head = _lm_head(prefix, tensors)
    if head not in tensors and not spec.tied_embeddings:
        raise CheckpointError(f"tensor {head!r} is missing, and config.json does not say tie_word_embeddings")

    modules = _modules(family)

    def has_bias(*names: str) -> bool:
        return any(
            f"{prefix}layers.{i}.{modules[n][0]}.bias" in tensors
            for n in names
            for i in range(spec.num_layers)
        )

    spec = replace(
        spec,
        vocab_size=vocab_size,
        tied_embeddings=head not in tensors,
        qkv_bias=has_bias("attention.q", "attention.k", "attention.v"),
        output_bias=has_bias("attention.o"),
        mlp_bias=has_bias("mlp.gate", "mlp.up", "mlp.down"),
    )
    return spec, tuple(warnings)


def _lm_head(prefix: str, tensors: Mapping[str, TensorInfo]) -> str:
    """The head lies beside the model (`model.` -> ``), or within what holds both
    (`language_model.model.`)."""
    nested = prefix.removesuffix("model.") + "lm_head.weight"
    return nested if nested in tensors else "lm_head.weight"


def _modules(family: Family) -> dict[str, tuple[str, tuple[str, ...]]]:
    """For each module of a layer: its name in the checkpoint, and all that are stacked in it, in order."""
    modules: dict[str, tuple[str, tuple[str, ...]]] = {
        ours: (theirs, (ours,)) for ours, theirs in family.modules.items()
    }
    for theirs, parts in family.fused.items():
        modules |= dict.fromkeys(parts, (theirs, parts))
    return modules


def _sources(
    spec: ModelSpec, family: Family, prefix: str, tensors: Mapping[str, TensorInfo]
) -> dict[str, Source]:
    shapes = spec.weight_shapes()
    modules = _modules(family)
    outer = {
        "embedding.weight": f"{prefix}embed_tokens.weight",
        "norm.weight": f"{prefix}norm.weight",
        "lm_head.weight": _lm_head(prefix, tensors),
    }
    sources = {}
    for name in shapes:
        if name in outer:
            sources[name] = Source(outer[name])
            continue
        _, layer, rest = name.split(".", 2)
        module, leaf = rest.rsplit(".", 1)
        theirs, parts = modules[module]
        tensor = f"{prefix}layers.{layer}.{theirs}.{leaf}"
        if len(parts) == 1:
            sources[name] = Source(tensor)
        else:
            before = parts[: parts.index(module)]
            start = sum(shapes[f"layers.{layer}.{p}.{leaf}"][0] for p in before)
            sources[name] = Source(tensor, (start, start + shapes[name][0]))
    return sources


def _wanted(spec: ModelSpec, sources: Mapping[str, Source]) -> dict[str, tuple[int, ...]]:
    """The shape that each tensor in use must have: the weight's, or that of all that are stacked in it."""
    wanted: dict[str, tuple[int, ...]] = {}
    for name, shape in spec.weight_shapes().items():
        source = sources[name]
        rows = source.rows[1] if source.rows else shape[0]
        wanted[source.tensor] = (max(rows, wanted.get(source.tensor, (0,))[0]), *shape[1:])
    return wanted


def _check_shapes(
    spec: ModelSpec, wanted: Mapping[str, tuple[int, ...]], tensors: Mapping[str, TensorInfo]
) -> None:
    for tensor, shape in wanted.items():
        if tensor in tensors and tuple(tensors[tensor].shape) != shape:
            raise CheckpointError(
                f"tensor {tensor!r} has shape {list(tensors[tensor].shape)}, but config.json wants {list(shape)} "
                f"(hidden_size {spec.hidden_size}, num_attention_heads {spec.num_heads}, num_key_value_heads "
                f"{spec.num_kv_heads}, head_dim {spec.head_size}, intermediate_size {spec.intermediate_size})"
            )


def _check_siblings(coverage: Coverage) -> None:
    """A tensor beside one in use, in the same module, changes what the module does: no leaving it out."""
    modules = {name.rpartition(".")[0] for name in coverage.used}
    for name in coverage.unused:
        if name.rpartition(".")[0] in modules:
            raise UnsupportedModel(
                f"tensor {name!r} is not understood; its module is in use, so leaving it out is no option"
            )
