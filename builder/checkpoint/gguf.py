"""GGUF checkpoints: llama.cpp's names, layouts and metadata turned back into Hugging Face's.

What a family's conversion did beyond renaming stands in its `Family.gguf`: rows of Q and K interleaved for
llama.cpp's rotation, an offset added to norm weights, other names.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtforge.builder.blocks import BlockFormat, Blocks, round_to_blocks
from trtforge.builder.checkpoint.base import TensorInfo, TokenizerFiles
from trtforge.builder.checkpoint.gguf_blocks import BLOCK_TYPES, ROUNDED, read_blocks
from trtforge.builder.checkpoint.gguf_config import FACTOR_TABLES, Metadata, config_from_metadata
from trtforge.builder.checkpoint.gguf_format import QUANTIZED, GGUFFile, GGUFTensor
from trtforge.builder.families import Family, GGUFNames, families
from trtforge.plugins.errors import CheckpointError, UnsupportedModel

#: GGUF module -> Hugging Face module, outside the blocks and within one
_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+)")
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class GGUFCheckpoint:
    """See base.Checkpoint. A split model is opened by its first part."""

    kind = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = _open_parts(path)
        try:
            self._metadata = Metadata(path, self._files[0].metadata)
            self._family, self._names = _family(path, self._metadata.architecture)
            self._source = self._rename(_all_tensors(self._files))
            self.config: Mapping[str, Any] = self._config()
            self.generation_config: Mapping[str, Any] = _generation_config(self._metadata)
        except BaseException:
            self.close()
            raise
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(name, tensor.shape, tensor.dtype) for name, (_, tensor) in self._source.items()
        }

    def read(self, name: str) -> NDArray[np.float32]:
        if name not in self._source:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}")
        file, tensor = self._source[name]
        values = file.read(tensor)
        order = self._row_order(name, values.shape[0])
        if order is not None:
            values = values[order]
        if self._names.norm_offset and name.rsplit(".", 1)[0].endswith("norm"):
            values -= np.float32(self._names.norm_offset)
        return values

    def block_format(self, name: str) -> BlockFormat | None:
        tensor = self._source[name][1]
        if tensor.dtype not in QUANTIZED or len(tensor.shape) != 2:
            return None
        return BLOCK_TYPES[tensor.dtype].format if tensor.dtype in BLOCK_TYPES else ROUNDED

    def read_blocks(self, name: str) -> Blocks:
        file, tensor = self._source[name]
        rows, columns = tensor.shape
        if tensor.dtype not in BLOCK_TYPES:
            return round_to_blocks(self.read(name), ROUNDED)
        blocks = read_blocks(file.read_raw(tensor), BLOCK_TYPES[tensor.dtype], (rows, columns))
        order = self._row_order(name, rows)
        return blocks if order is None else blocks.rows(order)

    def tokenizer(self) -> TokenizerFiles:
        from trtforge.builder.checkpoint.gguf_tokenizer import tokenizer_of_gguf

        return tokenizer_of_gguf(self.path, self._metadata, self.config["vocab_size"])

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _rename(
        self, tensors: Mapping[str, tuple[GGUFFile, GGUFTensor]]
    ) -> dict[str, tuple[GGUFFile, GGUFTensor]]:
        """Under Hugging Face's names; what has none keeps its own, and will be reported as unused."""
        extra = self._names.names or {}
        found: dict[str, tuple[GGUFFile, GGUFTensor]] = {}
        self._tables = {name: tensors[name] for name in FACTOR_TABLES if name in tensors}
        for name, source in tensors.items():
            if name in FACTOR_TABLES:
                continue
            module, _, kind = name.rpartition(".")
            block = _BLOCK.fullmatch(module)
            if block and (target := ({**_BLOCK_NAMES, **extra}).get(block[2])):
                name = f"model.layers.{int(block[1])}.{target}.{kind}"
            elif not block and (target := ({**_GLOBAL_NAMES, **extra}).get(module)):
                name = f"{target}.{kind}"
            if name in found:
                raise CheckpointError(
                    f"{self.path}: two tensors are {name!r} in Hugging Face's terms; convert it again"
                )
            found[name] = source
        return found

    def _config(self) -> dict[str, Any]:
        embedding = self._source.get("model.embed_tokens.weight")
        if embedding is None:
            raise CheckpointError(
                f"{self.path}: tensor 'token_embd.weight' is missing; the file holds no language model"
            )
        factors = {}
        for name, (file, tensor) in self._tables.items():
            if len(tensor.shape) != 1 or tensor.shape[0] > 1 << 16:
                raise CheckpointError(
                    f"{self.path}: {name} has shape {list(tensor.shape)}, not one factor per frequency"
                )
            factors[name] = file.read(tensor)
        config = config_from_metadata(
            self._metadata,
            architecture=self._family.architectures[0],
            vocab_size=embedding[1].shape[0],
            tied="lm_head.weight" not in self._source,
            factors=factors,
        )
        special = self._names.config
        return {**config, **special(self._files[0].metadata)} if special else config

    def _row_order(self, name: str, rows: int) -> NDArray[np.intp] | None:
        """Which row of the file each row is, where the converter moved them: a head's rows are stored as
        [head_size / 2, 2], pairs side by side, and wanted as [2, head_size / 2]."""
        module = name.rsplit(".", 1)[0]
        if not self._names.permuted_qk or not module.endswith((".q_proj", ".k_proj")):
            return None
        heads = self.config["num_attention_heads" if module.endswith(".q_proj") else "num_key_value_heads"]
        if rows % (2 * heads):
            raise CheckpointError(
                f"{self.path}: {name} has {rows} rows, which {heads} heads do not divide evenly"
            )
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(rows)


def _family(path: Path, architecture: str) -> tuple[Family, GGUFNames]:
    """The family that llama.cpp calls `architecture`, and what its converter did to it."""
    known = {f.gguf.architecture: (f, f.gguf) for f in families().values() if f.gguf}
    if architecture not in known:
        raise UnsupportedModel(
            f"{path}: GGUF architecture {architecture[:40]!r} is not supported; "
            f"supported are {', '.join(sorted(known))}"
        )
    return known[architecture]


def _open_parts(path: Path) -> list[GGUFFile]:
    """The file, and if it is the first part of a split model, the others beside it."""
    match = _SPLIT.fullmatch(path.name)
    if match and int(match[2]) != 1:
        first = f"{match[1]}-00001-of-{match[3]}.gguf"
        raise CheckpointError(f"{path}: part {int(match[2])} of a split model; pass the first, {first}")
    files = [GGUFFile(path)]
    try:
        count = Metadata(path, files[0].metadata).size("split.count") or 1
        if count > 1 and (not match or int(match[3]) != count):
            raise CheckpointError(
                f"{path}: one of {count} parts of a model; name it NAME-00001-of-{count:05d}.gguf"
            )
        if count > 1 and match:
            names = (f"{match[1]}-{number:05d}-of-{match[3]}.gguf" for number in range(2, count + 1))
            files.extend(GGUFFile(path.with_name(name)) for name in names)
    except BaseException:
        for file in files:
            file.close()
        raise
    return files


def _all_tensors(files: list[GGUFFile]) -> dict[str, tuple[GGUFFile, GGUFTensor]]:
    tensors: dict[str, tuple[GGUFFile, GGUFTensor]] = {}
    for file in files:
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"{file.path}: tensor {name[:200]!r} is in another part, too; download it again"
                )
            tensors[name] = (file, tensor)
    return tensors


def _generation_config(metadata: Metadata) -> dict[str, Any]:
    """The end-of-text, end-of-turn and end-of-message tokens that the file names, in that order."""
    ends = dict.fromkeys(i for name in ("eos", "eot", "eom") if (i := metadata.token_id(name)) is not None)
    bos = metadata.token_id("bos")
    return ({"eos_token_id": list(ends)} if ends else {}) | ({} if bos is None else {"bos_token_id": bos})
