"""What kind of thing was given as a model, and the reader for it."""

import re
from pathlib import Path

from trtforge.builder.checkpoint.base import Checkpoint
from trtforge.builder.checkpoint.huggingface import HuggingFaceCheckpoint, read_json
from trtforge.plugins.errors import CheckpointError, UnsupportedModel

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_ACCEPTED = "a Hugging Face directory, a .gguf file or a hub id (org/name)"


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Open a checkpoint of any kind that is read: a Hugging Face directory (safetensors or PyTorch, single or
    sharded), a GGUF file, or a hub id. The result says its `kind`.

    Raises CheckpointError if it is missing, damaged or hostile, UnsupportedModel if it is something else.
    """
    if not str(source):  # which Path takes for this directory
        raise CheckpointError(f"the model's path is empty; pass {_ACCEPTED}")
    try:
        path = Path(source).expanduser()
    except RuntimeError as e:  # ~nobody
        raise CheckpointError(f"{source}: cannot be opened ({e})") from e
    try:
        return _open(source, path)
    except OSError as e:  # a directory that may not be listed, a name that is too long
        raise CheckpointError(f"{source}: cannot be opened ({e.strerror})") from e


def _open(source: str | Path, path: Path) -> Checkpoint:
    if path.is_dir():
        return _open_directory(path)
    if path.is_file():
        return _open_file(path)
    if isinstance(source, str) and _HUB_ID.fullmatch(source):
        from trtforge.builder.checkpoint.hub import fetch  # huggingface_hub

        return _open_directory(fetch(source))
    raise CheckpointError(f"{source}: no such file or directory; pass {_ACCEPTED}")


def _open_file(path: Path) -> Checkpoint:
    with path.open("rb") as f:
        magic = f.read(4)
    if magic == b"GGUF" or path.suffix == ".gguf":
        return _open_gguf(path)
    if path.suffix in (".safetensors", ".bin", ".json"):
        raise UnsupportedModel(f"{path}: a single file of a checkpoint; pass its directory, {path.parent}")
    raise UnsupportedModel(f"{path}: not a checkpoint that is read; pass {_ACCEPTED}")


def _open_gguf(path: Path) -> Checkpoint:
    from trtforge.builder.checkpoint.gguf import GGUFCheckpoint  # the gguf package

    return GGUFCheckpoint(path)


def _open_directory(path: Path) -> Checkpoint:
    _refuse_mistakes(path)
    if (path / "config.json").is_file():
        config = read_json(path / "config.json")
        _refuse_tensorrt_llm(path, config)
        return HuggingFaceCheckpoint(path)
    ggufs = sorted(path.glob("*.gguf"))
    first_parts = [
        p for p in ggufs if not re.search(r"-\d{5}-of-\d{5}\.gguf$", p.name) or "-00001-of-" in p.name
    ]
    if len(first_parts) == 1:
        return _open_gguf(first_parts[0])
    if first_parts:
        raise UnsupportedModel(
            f"{path}: holds {len(first_parts)} GGUF models; pass one of them: "
            + ", ".join(p.name for p in first_parts[:5])
        )
    there = ", ".join(sorted(p.name for p in path.iterdir())[:5]) or "nothing"
    raise UnsupportedModel(
        f"{path}: no config.json, so no Hugging Face checkpoint (there: {there}); pass {_ACCEPTED}"
    )


def _refuse_mistakes(path: Path) -> None:
    """Our own outputs, given where a model is wanted."""
    if (path / "manifest.json").is_file() and not (path / "config.json").is_file():
        raise UnsupportedModel(
            f"{path}: an engine directory, already built; pass it to `trtforge generate` or `trtforge package`, "
            "or pass the checkpoint that it was built from"
        )
    if (path / "config.pbtxt").is_file() or next(path.glob("*/config.pbtxt"), None):
        raise UnsupportedModel(
            f"{path}: a Triton model repository; start it with `trtforge serve`, or pass a checkpoint"
        )


def _refuse_tensorrt_llm(path: Path, config: dict[str, object]) -> None:
    if "pretrained_config" in config or next(path.glob("rank*.engine"), None):
        raise UnsupportedModel(
            f"{path}: a TensorRT-LLM engine directory; engines cannot be converted, "
            "pass the checkpoint that it was built from"
        )
    if "architectures" not in config and (
        "architecture" in config or next(path.glob("rank*.safetensors"), None)
    ):
        raise UnsupportedModel(
            f"{path}: a TensorRT-LLM checkpoint directory, which comes with a later version; "
            "pass the Hugging Face checkpoint that it was converted from"
        )
