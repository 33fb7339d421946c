"""What a path is, as `trtforge inspect` says it: an engine, a checkpoint or a Triton model repository.

Reads headers only: no weights, whatever the size.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trtforge.plugins.errors import InvalidArgument, UnsupportedModel
from trtforge.runtime import manifest as manifest_format

Description = Mapping[str, Any]

#: Of a checkpoint's config, what is shown.
SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


def describe(path: str) -> Description:
    """`kind` (engine, checkpoint, repository) and what matters of it; keys are the same for all of one kind.

    Raises InvalidArgument if it is none of them, and what the readers raise if it is damaged.
    """
    if not path:  # which Path takes for this directory
        raise InvalidArgument("the path is empty")
    directory = Path(path)
    if (directory / manifest_format.MANIFEST_NAME).is_file():
        return describe_engine(directory)
    if directory.is_dir() and any(directory.glob("*/config.pbtxt")):
        return describe_repository(directory)
    if directory.is_dir() and not any(directory.iterdir()):
        raise InvalidArgument(f"{path}: an empty directory")
    return describe_checkpoint(path)


def describe_engine(directory: Path) -> Description:
    manifest = manifest_format.load(directory)
    return {
        "kind": "engine",
        "path": str(directory),
        "target": manifest.target,
        "model": dict(manifest.model),
        "recipe": manifest.recipe,
        "activations": manifest.activations,
        "kv_cache_dtype": manifest.kv.dtype,
        "kv_bytes_per_token": manifest.kv.bytes_per_token,
        "tokens_per_block": manifest.kv.tokens_per_block,
        "kv_groups": [{"layers": len(g.layers), "window": g.window} for g in manifest.kv.groups],
        "limits": asdict(manifest.limits),
        "bytes": sum(entry.bytes for entry in manifest.files.values()),
        "files": {name: entry.bytes for name, entry in manifest.files.items()},
        "versions": dict(manifest.versions),
    }


def describe_repository(directory: Path) -> Description:
    """The models by name, their numbered versions, and the engine directories that lie inside them."""
    models = []
    for config in sorted(directory.glob("*/config.pbtxt")):
        model = config.parent
        versions = sorted(int(v.name) for v in model.iterdir() if v.is_dir() and v.name.isdecimal())
        manifests = model.glob(f"*/*/{manifest_format.MANIFEST_NAME}")
        engines = sorted(str(manifest.parent.relative_to(directory)) for manifest in manifests)
        models.append({"name": model.name, "versions": versions, "engines": engines})
    return {"kind": "repository", "path": str(directory), "models": models}


def describe_checkpoint(path: str) -> Description:
    from trtforge.builder.checkpoint import open_checkpoint
    from trtforge.builder.families import family_of

    checkpoint = open_checkpoint(path)
    try:
        config = checkpoint.config
        names = config.get("architectures")
        architecture = str(names[0]) if isinstance(names, list | tuple) and names else "unknown"
        try:
            family, unsupported = family_of(architecture).name, None
        except UnsupportedModel as e:
            family, unsupported = None, str(e)
        tensors = checkpoint.tensors.values()
        return {
            "kind": "checkpoint",
            "path": str(checkpoint.path),
            "format": checkpoint.kind,
            "architecture": architecture,
            "family": family,
            "unsupported": unsupported,
            **{size: config.get(size) for size in SIZES},
            "parameters": sum(elements(t.shape) for t in tensors),
            "dtypes": dict(Counter(t.dtype for t in tensors).most_common()),
            "tensors": [{"name": t.name, "shape": list(t.shape), "dtype": t.dtype} for t in tensors],
        }
    finally:
        checkpoint.close()


def elements(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def as_text(description: Description) -> str:
    """For people: one line per key; long lists are counted (`--json` has them whole)."""
    return "\n".join(
        f"{key + ':':25}{_value(key, value)}" for key, value in description.items() if value is not None
    )


def _value(key: str, value: Any) -> str:
    if key == "tensors":
        return f"{len(value)} (--json lists them)"
    if key == "models":
        return ", ".join(m["name"] + (" (engine)" if m["engines"] else "") for m in value)
    if key == "kv_groups":
        windows = (f" with a window of {g['window']}" if g["window"] else "" for g in value)
        return ", ".join(f"{g['layers']} layers{window}" for g, window in zip(value, windows, strict=True))
    if key == "model":
        return f"{value['name']} ({value['architecture']}, {value['num_parameters'] / 1e6:.0f} M parameters)"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return str(value)
