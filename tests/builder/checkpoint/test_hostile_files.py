"""Files are hostile: every length, count, offset and path in them is checked before it is believed.

Each case is one fault in an otherwise good file; the error says which, in one line.
"""

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import pytest
import torch

from trtforge.builder.checkpoint import open_checkpoint
from trtforge.plugins.errors import CheckpointError, ForgeError, UnsupportedModel

CONFIG = {"architectures": ["LlamaForCausalLM"]}


def refused(source: Path, message: str, kind: type[ForgeError] = CheckpointError) -> None:
    with pytest.raises(kind, match=message) as error:
        checkpoint = open_checkpoint(source)
        for name in checkpoint.tensors:
            checkpoint.read(name)
        checkpoint.tokenizer()
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000


# ---- safetensors ----


def safetensors(directory: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """A checkpoint whose one file has this header (JSON, or bytes) and data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    stated = struct.pack("<Q", len(raw) if length is None else length)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "model.safetensors").write_bytes(stated + raw + data)
    return directory


def entry(begin: int = 0, end: int = 8, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": list(shape) if isinstance(shape, tuple) else shape,
        "data_offsets": [begin, end],
    }


def test_the_good_file_is_good(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(safetensors(tmp_path, {"a": entry(), "b": entry(8, 16)}, bytes(16)))
    assert set(checkpoint.tensors) == {"a", "b"}


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001, 10_000])
def test_a_header_longer_than_the_file(length: int, tmp_path: Path) -> None:
    refused(safetensors(tmp_path, {"a": entry()}, bytes(8), length=length), f"claims {length} bytes")


@pytest.mark.parametrize("size", [0, 7])
def test_a_file_too_short_for_a_header(size: int, tmp_path: Path) -> None:
    safetensors(tmp_path, {})
    (tmp_path / "model.safetensors").write_bytes(bytes(size))
    refused(tmp_path, "too short for a safetensors file")


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"9" * 10_000,
        b'{"a": 1, "a": 2}',
        b"null",
        b"[]",
        b"NaN",
    ],
    ids=[
        "empty",
        "cut",
        "not utf-8",
        "deep list",
        "deep object",
        "long number",
        "key twice",
        "null",
        "list",
        "NaN",
    ],
)
def test_a_header_that_is_no_json_object(header: bytes, tmp_path: Path) -> None:
    refused(safetensors(tmp_path, header), "its header is not")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("text", "no dtype, shape and data_offsets"),
        ({"dtype": "F32", "shape": [2]}, "no dtype, shape and data_offsets"),
        (entry(shape=(-2,)), "its shape is no list of sizes"),
        (entry(shape=(2.0,)), "its shape is no list of sizes"),
        (entry(shape=(True, 2)), "its shape is no list of sizes"),
        (entry(shape="22"), "its shape is no list of sizes"),
        (entry(shape=(1,) * 8 + (2,)), "its shape is no list of sizes"),
        (entry(-8, 0), "data_offsets are not two numbers"),
        ({**entry(), "data_offsets": [0]}, "data_offsets are not two numbers"),
        ({**entry(), "data_offsets": [0, 8, 16]}, "data_offsets are not two numbers"),
        (entry(8, 0), "are not in the file"),
        (entry(0, 9), "are not in the file"),
        (entry(2**63, 2**63 + 8), "are not in the file"),
        (entry(shape=(3,)), "does not take the 8 bytes"),
        (entry(shape=(2**63, 2)), "does not take the 8 bytes"),
        (entry(shape=(2**32, 2**32, 2)), "does not take the 8 bytes"),  # 0 bytes in 64-bit arithmetic
        (entry(dtype="F64"), "does not take the 8 bytes"),
    ],
)
def test_a_tensor_that_lies(value: Any, message: str, tmp_path: Path) -> None:
    refused(safetensors(tmp_path, {"a": value}, bytes(8)), f"tensor 'a': .*{message}")


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F4", "", "f32", None, 7, ["F32"], "x" * 10_000])
def test_a_dtype_that_is_not_read(dtype: Any, tmp_path: Path) -> None:
    refused(
        safetensors(tmp_path, {"a": entry(dtype=dtype)}, bytes(8)),
        "has dtype .*; read are F32",
        UnsupportedModel,
    )


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry(), "b": entry(0, 8)}, "overlaps"),
        ({"a": entry(), "b": entry(4, 12)}, "overlaps"),
        ({"a": entry(), "b": entry(12, 20)}, "has a gap before it"),
        ({"a": entry(8, 16)}, "has a gap before it"),
        ({"a": entry()}, "12 bytes after the last tensor"),
    ],
)
def test_tensors_that_do_not_tile_the_file(header: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(safetensors(tmp_path, header, bytes(20)), message)


def test_a_file_cut_short_after_it_was_opened(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(safetensors(tmp_path, {"a": entry()}, bytes(8)))
    os.truncate(tmp_path / "model.safetensors", 40)
    with pytest.raises(CheckpointError, match="it was changed meanwhile"):
        checkpoint.read("a")


# ---- shards ----


@pytest.mark.parametrize(
    "shard",
    [
        "../model.safetensors",
        "/etc/passwd",
        "a/../../x",
        "..",
        ".",
        "",
        "a\\..\\x",
        "C:x",
        "a\0b",
        7,
        None,
        ["a"],
    ],
)
def test_an_index_that_leads_out_of_its_directory(shard: Any, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    safetensors(tmp_path, {"a": entry()}, bytes(8))  # what `../model.safetensors` would reach
    (inside / "config.json").write_text(json.dumps(CONFIG))
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    refused(inside, "which is no file of this directory")


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (None, "has no weight_map"),
        ([], "has no weight_map"),
        ({}, "has no weight_map"),
        ({"a": "x.safetensors", "b": "gone.safetensors"}, r"gone\.safetensors: this shard is missing"),
        ({"a": "x.safetensors", "c": "x.safetensors"}, r"'c' is in x\.safetensors, which does not have it"),
        (
            {"a": "x.safetensors", "b": "y.safetensors"},
            r"'a' is both in x\.safetensors and in y\.safetensors",
        ),
    ],
)
def test_an_index_that_does_not_fit_its_shards(weight_map: Any, message: str, tmp_path: Path) -> None:
    for name in ("x", "y"):
        safetensors(tmp_path, {"a": entry(), "b": entry(8, 16)}, bytes(16))
        (tmp_path / "model.safetensors").rename(tmp_path / f"{name}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused(tmp_path, message)


def test_shards_may_be_links_as_in_the_hub_cache(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir(), snapshot.mkdir()
    safetensors(blobs, {"a": entry()}, bytes(8))
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(blobs / name)
    assert set(open_checkpoint(snapshot).tensors) == {"a"}


# ---- JSON files and PyTorch ----


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000, b'{"a":1,"a":1}'])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_a_json_file_that_is_none(content: bytes, name: str, tmp_path: Path) -> None:
    safetensors(tmp_path, {"a": entry()}, bytes(8))
    if name.endswith("index.json"):
        (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_bytes(content)
    refused(tmp_path, f"{name}: the file is not")


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("touch evil",))


@pytest.mark.parametrize("content", ["code", "cut", "text", "empty", "list", "not tensors", "legacy pickle"])
def test_a_pytorch_file_that_is_no_state_dict(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "pytorch_model.bin"
    if content in ("text", "empty"):
        path.write_bytes(b"hello" if content == "text" else b"")
    elif content == "legacy pickle":
        path.write_bytes(pickle.dumps({"a": Evil()}))
    else:
        values = {"code": {"a": Evil()}, "list": [torch.ones(2)], "not tensors": {"a": "text"}}
        torch.save(values.get(content, {"a": torch.ones(1000)}), path)
    if content == "cut":
        os.truncate(path, path.stat().st_size // 2)
    refused(tmp_path, r"pytorch_model\.bin: ")
    assert not (tmp_path / "evil").exists()  # nothing of the file was run


# ---- GGUF ----


@pytest.fixture
def good(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    return gguf_files.write(tmp_path / "m.gguf", tiny_checkpoint("llama"), "Q4_0")


def patch(path: Path, at: int, fmt: str, value: Any) -> Path:
    data = bytearray(path.read_bytes())
    struct.pack_into("<" + fmt, data, at, value)
    path.write_bytes(data)
    return path


def after(path: Path, text: bytes) -> int:
    """Where what follows `text` begins."""
    return path.read_bytes().index(text) + len(text)


@pytest.mark.parametrize(
    ("at", "fmt", "value", "message", "kind"),
    [
        (0, "I", 0x46554746, "not a GGUF file", CheckpointError),
        (4, "I", 1, "GGUF version 1", UnsupportedModel),
        (4, "I", 99, "GGUF version 99", UnsupportedModel),
        (4, "I", 3 << 24, "big-endian", UnsupportedModel),
        (8, "Q", 2**63, "more than fit in it", CheckpointError),
        (8, "Q", 2**64 - 1, "more than fit in it", CheckpointError),
        (16, "Q", 2**63, "more than fit in it", CheckpointError),
        (
            8,
            "Q",
            23,
            "cut short or damaged",
            CheckpointError,
        ),  # one tensor too many: what follows is no header
        (24, "Q", 2**63, "claims 9223372036854775808 bytes", CheckpointError),
        (24, "Q", 60_000, "cut short or damaged", CheckpointError),
    ],
)
def test_a_gguf_preamble_that_lies(
    at: int, fmt: str, value: int, message: str, kind: type[ForgeError], good: Path
) -> None:
    refused(patch(good, at, fmt, value), message, kind)


@pytest.mark.parametrize(
    ("key", "skip", "fmt", "value", "message"),
    [
        (b"general.architecture", 0, "I", 99, "has the unknown type 99"),
        (b"general.architecture", 4, "Q", 2**63, "claims 9223372036854775808 bytes"),
        (b"general.architecture", 4, "Q", 2**28, "runs past its end"),
        (b"tokenizer.ggml.tokens", 4, "I", 9, "array of the unknown type 9"),  # arrays of arrays
        (b"tokenizer.ggml.tokens", 8, "Q", 2**60, "array of 1152921504606846976 strings, runs past its end"),
        (
            b"tokenizer.ggml.token_type",
            8,
            "Q",
            2**62,
            "array of 4611686018427387904 numbers, runs past its end",
        ),
        (b"llama.block_count", 4, "I", 2**31, "'llama.block_count' is 2147483648, not a size"),
        (b"llama.attention.head_count", 0, "I", 6, "'llama.attention.head_count' is .*not a size"),
        (b"llama.embedding_length", 4, "I", 0, "'llama.embedding_length' is missing or 0"),
        (b"llama.attention.layer_norm_rms_epsilon", 4, "f", float("nan"), "not a finite number"),
        (b"blk.0.attn_q.weight", 0, "I", 5, "has 5 dimensions"),
        (b"blk.0.attn_q.weight", 0, "I", 2**31, "has 2147483648 dimensions"),
        (b"blk.0.attn_q.weight", 4, "Q", 2**63, "which cannot be in it"),
        (b"blk.0.attn_q.weight", 4, "Q", 0, "which cannot be in it"),
        (b"blk.0.attn_q.weight", 4, "Q", 63, "which cannot be in it"),  # no whole blocks
        (b"blk.0.attn_q.weight", 20, "I", 1234, "has the unknown type 1234"),
        (b"blk.0.attn_q.weight", 24, "Q", 2**63, "'blk.0.attn_q.weight' ends at"),
        (b"blk.0.attn_q.weight", 24, "Q", 0, "overlaps another one"),
        (b"blk.0.attn_q.weight", 24, "Q", 33, "overlaps another one or is not aligned"),
    ],
)
def test_a_gguf_field_that_lies(
    key: bytes, skip: int, fmt: str, value: Any, message: str, good: Path
) -> None:
    refused(patch(good, after(good, key) + skip, fmt, value), message)


def test_a_gguf_tensor_type_that_is_not_read(good: Path) -> None:
    refused(
        patch(good, after(good, b"blk.0.attn_q.weight") + 20, "I", 34),
        "type TQ1_0; read are F32",
        UnsupportedModel,
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"llama.block_count", b"llama.block_bount", "'llama.block_count' is missing"),
        (b"general.architecture", b"general.architectura", "'general.architecture' is missing"),
        (b"blk.0.attn_k.weight", b"blk.0.attn_q.weight", "'blk.0.attn_q.weight' stands twice"),
        (b"llama.context_length", b"llama.context_lengt\xff", "is not UTF-8"),
        (b"llama.attention.head_count_kv", b"llama.attention.head_count\x00kv", "no size"),
        (b"token_embd.weight", b"token_embe.weight", "'token_embd.weight' is missing"),
        (b"tokenizer.ggml.eos_token_id", b"tokenizer.ggml.bos_token_id", "stands twice"),
    ],
)
def test_a_gguf_name_that_was_changed(old: bytes, new: bytes, message: str, good: Path) -> None:
    data = good.read_bytes()
    assert data.count(old) >= 1 and len(old) == len(new)
    good.write_bytes(data.replace(old, new, 1))
    if message == "no size":
        assert open_checkpoint(good).config["num_key_value_heads"] == 4  # as many as there are heads
    else:
        refused(good, message)


@pytest.mark.parametrize("alignment", [0, 3, 2**31])
def test_a_gguf_alignment_that_is_none(
    alignment: int, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    path = gguf_files.write(tmp_path / "m.gguf", tiny_checkpoint("llama"), metadata={"general.alignment": 64})
    refused(patch(path, after(path, b"general.alignment") + 4, "I", alignment), "no power of two")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.3, 0.7, 0.999])
def test_a_gguf_file_cut_short(share: float, good: Path) -> None:
    os.truncate(good, int(good.stat().st_size * share))
    refused(good, "cut short")


def test_a_gguf_scale_that_is_infinite_is_only_a_number(good: Path, tmp_path: Path) -> None:
    """Damage in the weights themselves is not seen by a reader; it must not crash or warn either."""
    checkpoint = open_checkpoint(good)
    data = bytearray(good.read_bytes())
    data[-18 * 64 :] = bytes([0xFF, 0x7F]) * (9 * 64)
    good.write_bytes(data)
    assert not all(np.isfinite(checkpoint.read(name)).all() for name in checkpoint.tensors)
