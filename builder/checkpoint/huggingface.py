"""A Hugging Face directory: config.json, and weights in safetensors or PyTorch files, single or sharded."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trtforge.builder.blocks import BlockFormat, Blocks
from trtforge.builder.checkpoint.base import TensorInfo, TokenizerFiles
from trtforge.builder.checkpoint.safetensors import SafetensorsFile, parse_json
from trtforge.plugins.errors import CheckpointError, UnsupportedModel

MAX_JSON_BYTES = 100_000_000


class TensorFile(Protocol):
    """One file of weights."""

    path: Path
    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> NDArray[np.float32]: ...

    def close(self) -> None: ...


class HuggingFaceCheckpoint:
    """See base.Checkpoint. kind: safetensors or pytorch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: Mapping[str, Any] = read_json(path / "config.json")
        _refuse_quantized(path, self.config)
        generation = path / "generation_config.json"
        self.generation_config: Mapping[str, Any] = read_json(generation) if generation.is_file() else {}
        self.kind, self._files = _open_weights(path)
        self._file_of = {name: file for file in self._files for name in file.tensors}
        self.tensors: Mapping[str, TensorInfo] = {
            name: file.tensors[name] for name, file in self._file_of.items()
        }

    def read(self, name: str) -> NDArray[np.float32]:
        file = self._file_of.get(name)
        if file is None:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}")
        return file.read(name)

    def block_format(self, name: str) -> BlockFormat | None:
        return None

    def read_blocks(self, name: str) -> Blocks:
        raise AssertionError(f"{name} is not stored in blocks")

    def tokenizer(self) -> TokenizerFiles:
        from trtforge.builder.checkpoint.tokenizer_files import tokenizer_of_directory

        return tokenizer_of_directory(self.path, self.config)

    def close(self) -> None:
        for file in self._files:
            file.close()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of bounded size. Raises CheckpointError."""
    try:
        with path.open("rb") as f:
            data = f.read(MAX_JSON_BYTES + 1)
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({e.strerror})") from e
    if len(data) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: over {MAX_JSON_BYTES} bytes, which no such file needs")
    return parse_json(data, path, "the file")


def _open_pytorch(path: Path) -> TensorFile:
    from trtforge.builder.checkpoint.pytorch import PyTorchFile  # torch

    return PyTorchFile(path)


# kind, the single file's name, how one file is opened; the first whose file or index is there is taken
_FORMATS: tuple[tuple[str, str, Callable[[Path], TensorFile]], ...] = (
    ("safetensors", "model.safetensors", SafetensorsFile),
    ("pytorch", "pytorch_model.bin", _open_pytorch),
)


def _open_weights(path: Path) -> tuple[str, list[TensorFile]]:
    for kind, name, open_file in _FORMATS:
        if (path / name).is_file():
            return kind, [open_file(path / name)]
        index = path / f"{name}.index.json"
        if index.is_file():
            return kind, _open_shards(index, open_file)
    raise CheckpointError(
        f"{path}: has a config.json but no weights: neither model.safetensors nor pytorch_model.bin, "
        "nor the index of either; download the checkpoint whole"
    )


def _open_shards(index: Path, open_file: Callable[[Path], TensorFile]) -> list[TensorFile]:
    """All shards that the index names. Every listed tensor must be in its shard, and none in two."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map; download it again")
    for shard in weight_map.values():
        # a plain file name: nothing that could lead out of the directory, on any system
        if not isinstance(shard, str) or not shard or shard in (".", "..") or set(shard) & set("/\\\0:"):
            raise CheckpointError(f"{index}: names {str(shard)[:200]!r}, which is no file of this directory")
    files: dict[str, TensorFile] = {}
    try:
        for shard in sorted(set(weight_map.values())):
            if not (index.parent / shard).is_file():
                raise CheckpointError(
                    f"{index.parent / shard}: this shard is missing; download the checkpoint whole"
                )
            files[shard] = open_file(index.parent / shard)
        _check_shards(index, weight_map, files)
    except BaseException:
        for file in files.values():
            file.close()
        raise
    return list(files.values())


def _check_shards(index: Path, weight_map: Mapping[str, str], files: Mapping[str, TensorFile]) -> None:
    for name, shard in weight_map.items():
        if name not in files[shard].tensors:
            raise CheckpointError(f"{index}: says that {name[:200]!r} is in {shard}, which does not have it")
    seen: dict[str, str] = {}
    for shard, file in files.items():
        for name in file.tensors:
            if name in seen:
                raise CheckpointError(
                    f"{index.parent}: {name[:200]!r} is both in {seen[name]} and in {shard}"
                )
            seen[name] = shard


def _refuse_quantized(path: Path, config: Mapping[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "?") if isinstance(quantization, dict) else "?"
        raise UnsupportedModel(
            f"{path}: its weights are already quantized ({str(method)[:40]}), which is not read yet; "
            "pass the full-precision checkpoint and choose a recipe, or a GGUF file"
        )
