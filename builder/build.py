"""build: a checkpoint becomes an engine directory.

checkpoint -> ModelSpec -> graph -> passes of the recipe -> target -> files, and a manifest that vouches for them.
Weights are read when the target writes them, one tensor at a time.
"""

import difflib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trtforge.builder import recipes, targets
from trtforge.builder.blocks import format_of
from trtforge.builder.checkpoint import Checkpoint, TokenizerFiles, open_checkpoint
from trtforge.builder.engine_dir import check_replaceable, staging
from trtforge.builder.spec import BuildConfig, QuantSpec
from trtforge.builder.targets import Progress
from trtforge.builder.translate import Translation, printable, translate
from trtforge.plugins.errors import CheckpointError, InvalidArgument
from trtforge.plugins.kv_dtypes import AUTO_KV_DTYPE, KV_DTYPES
from trtforge.runtime.manifest import MANIFEST_NAME, MAX_LIMIT, FileEntry, Manifest, sha256

TOKENS_PER_BLOCK = (8, 16, 32, 64, 128)
ACTIVATIONS = ("int8", "fp32")

#: What max_seq_len 0 means at most: a model's own maximum may be far beyond what a machine's pool holds.
LONGEST_BY_DEFAULT = 8192

_log = logging.getLogger(__name__)


def build(
    source: str | Path, output: Path, config: BuildConfig, progress: Progress | None = None
) -> Manifest:
    """Write an engine for a checkpoint (a directory, a .gguf file, a hub id) at `output`; give its manifest.

    An engine that stands there is replaced, at the end. Raises InvalidArgument for a bad option or an output
    that is something else, CheckpointError and UnsupportedModel for the checkpoint, EnvironmentProblem for a
    place that cannot be written. What a person should know is logged as a warning.
    """
    check_config(config)
    config = replace(config, target=targets.canonical(config.target))
    target = targets.target(config.target)
    check_replaceable(output)
    checkpoint = open_checkpoint(source)
    try:
        return _build(checkpoint, source, output, config, target, progress or _no_progress)
    finally:
        checkpoint.close()


def check_config(config: BuildConfig) -> None:
    """Raise InvalidArgument, naming the choices, for a value that no model can be built with."""
    quant = recipes.load("as_is" if config.recipe == "auto" else config.recipe)
    if config.activations not in ("auto", *ACTIVATIONS):
        raise InvalidArgument(
            f"activations {config.activations!r} is unknown; choose from: auto, {', '.join(ACTIVATIONS)}"
        )
    if config.activations == "int8" and quant.weights == "none":
        raise InvalidArgument(
            f"activations int8 need quantized weights, and the recipe {quant.name} has none; choose another recipe, "
            "or activations fp32"
        )
    if config.kv_cache_dtype not in ("auto", *KV_DTYPES):
        raise InvalidArgument(
            f"kv_cache_dtype {config.kv_cache_dtype!r} is unknown; choose from: auto, {', '.join(KV_DTYPES)}"
        )
    if config.tokens_per_block not in TOKENS_PER_BLOCK:
        raise InvalidArgument(
            f"tokens_per_block {config.tokens_per_block} is not possible; choose from: "
            f"{', '.join(map(str, TOKENS_PER_BLOCK))}"
        )
    for name, least in {"max_batch_size": 1, "max_num_tokens": 1, "max_seq_len": 0}.items():
        value = getattr(config.limits, name)
        if value < least:
            note = " (0: the model's own maximum)" if least == 0 else ""
            raise InvalidArgument(f"{name} {value} is not possible; give at least {least}{note}")
        if value > MAX_LIMIT:
            raise InvalidArgument(f"{name} {value} is not possible; give at most {MAX_LIMIT}")


def _build(
    checkpoint: Checkpoint,
    source: str | Path,
    output: Path,
    config: BuildConfig,
    target: targets.Target,
    progress: Progress,
) -> Manifest:
    from trtforge.builder.graph import build_graph, lazy_weights
    from trtforge.builder.passes import run_passes
    from trtforge.builder.passes.quantize import remarks

    translation, config = settle(checkpoint, config)
    spec, quant = translation.spec, recipes.load(config.recipe)
    kv = spec.kv_layout(config.kv_cache_dtype, config.tokens_per_block)
    tokenizer = checkpoint.tokenizer()
    ends = end_tokens(checkpoint, tokenizer)
    for line in (*translation.warnings, translation.coverage.report()):
        if line:
            _log.warning("%s", line)
    if not ends:
        _log.warning("%s names no end token: a request ends at its max_tokens or a stop string only", source)
    graph = build_graph(spec, lazy_weights(translation, checkpoint), kv)
    _check_excluded(quant, [n.name or "" for n in graph.graph if n.op_type == "Gemm"])
    for line in remarks(graph, quant):
        _log.warning("%s", line)
    graph = run_passes(graph, quant, config.activations)
    with staging(output) as directory:
        versions = target.compile(graph, directory, progress)
        _write_texts(directory, checkpoint, tokenizer)
        manifest = Manifest(
            target=config.target,
            model={
                "name": spec.name if Path(source).exists() else Path(source).name,  # of a hub id
                "source": printable(Path(source).name),
                "family": spec.family,
                "architecture": spec.architecture,
                "vocab_size": spec.vocab_size,
                "hidden_size": spec.hidden_size,
                "num_layers": spec.num_layers,
                "num_heads": spec.num_heads,
                "num_parameters": spec.num_parameters(),
                "max_position_embeddings": spec.max_position_embeddings,
            },
            recipe=quant.name,
            activations=config.activations,
            kv=kv,
            limits=config.limits,
            ropes=spec.ropes,
            eos_token_ids=ends,
            bos_token_id=tokenizer.bos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            versions={"trtforge": version("trtforge"), **versions},
            files=_files(directory, progress),
        )
        (directory / MANIFEST_NAME).write_text(manifest.to_json())
    return manifest


def settle(checkpoint: Checkpoint, config: BuildConfig) -> tuple[Translation, BuildConfig]:
    """The model, and the config with what it left open settled."""
    limits = config.limits
    asked = limits.max_seq_len
    translation = translate(checkpoint, asked or LONGEST_BY_DEFAULT)
    own = translation.spec.max_position_embeddings
    if not asked:
        limits = replace(limits, max_seq_len=min(own, LONGEST_BY_DEFAULT))
        translation = translate(checkpoint, limits.max_seq_len)
    elif asked > own:
        _log.warning("max_seq_len %d is beyond the %d positions that the model was made for", asked, own)
    kv_dtype = AUTO_KV_DTYPE if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    recipe, activations = _numerics(translation, checkpoint.kind, config)
    config = replace(config, limits=limits, kv_cache_dtype=kv_dtype, recipe=recipe, activations=activations)
    return translation, config


def _numerics(translation: Translation, kind: str, config: BuildConfig) -> tuple[str, str]:
    """Recipe and activations, what `auto` means settled. Where nothing is quantized, activations are fp32."""
    recipe, activations = config.recipe, config.activations
    if recipe == "auto":
        recipe = "as_is" if kind == "gguf" else "full_prec"
    quant = recipes.load(recipe)
    shapes = {name: shape for name, shape in translation.spec.weight_shapes().items() if len(shape) == 2}
    if not any(format_of(quant, n, s[1], translation.formats.get(n)) for n, s in shapes.items()):
        return recipe, "fp32"
    if activations == "auto":
        # A weight-only recipe quantizes weights only, unless more is asked for.
        activations = "int8" if quant.weights == "as_is" and config.target == "cpu" else "fp32"
    return recipe, activations


def _check_excluded(quant: QuantSpec, linears: Sequence[str]) -> None:
    for name in quant.exclude:
        if name not in linears:
            nearest = difflib.get_close_matches(name, linears, n=1, cutoff=0.0)[0]
            raise InvalidArgument(
                f"recipe {quant.name}: exclude names {name!r}, which is no linear of this model; nearest: {nearest!r}"
            )


def end_tokens(checkpoint: Checkpoint, tokenizer: TokenizerFiles) -> tuple[int, ...]:
    """The model's own end tokens: the generation config's (one or a list), else the tokenizer's, else the config's."""
    for ids in (
        checkpoint.generation_config.get("eos_token_id"),
        tokenizer.eos_token_id,
        checkpoint.config.get("eos_token_id"),
    ):
        listed = ids if isinstance(ids, list | tuple) else [] if ids is None else [ids]
        if not all(type(i) is int for i in listed):
            raise CheckpointError(
                f"{checkpoint.path}: eos_token_id is {ids!r}, want a token id or a list of them"
            )
        if listed:
            return tuple(listed)
    return ()


def _write_texts(directory: Path, checkpoint: Checkpoint, tokenizer: TokenizerFiles) -> None:
    """The tokenizer's files and the generation config, in Hugging Face's formats."""
    (directory / "tokenizer.json").write_bytes(tokenizer.tokenizer_json)
    _write_json(directory / "tokenizer_config.json", tokenizer_config(tokenizer))
    if tokenizer.chat_template is not None:
        (directory / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")
    _write_json(directory / "generation_config.json", checkpoint.generation_config)


def tokenizer_config(files: TokenizerFiles) -> dict[str, Any]:
    """The special tokens as texts, and whether plain text gets a BOS in front."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(files.tokenizer_json)
    ids = {"bos_token": files.bos_token_id, "eos_token": files.eos_token_id, "pad_token": files.pad_token_id}
    texts = {name: tokenizer.id_to_token(i) for name, i in ids.items() if i is not None}
    return {**{k: v for k, v in texts.items() if v is not None}, "add_bos_token": files.add_bos_token}


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _files(directory: Path, progress: Progress) -> dict[str, FileEntry]:
    """What the manifest vouches for: every file in the directory."""
    files = sorted(f for f in directory.iterdir() if f.is_file())
    entries = {}
    for i, file in enumerate(files):
        progress("checksums", i, len(files))
        entries[file.name] = FileEntry(file.stat().st_size, sha256(file))
    return entries


def _no_progress(what: str, done: int, total: int) -> None:
    pass
