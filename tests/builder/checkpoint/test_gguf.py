"""GGUF files give the tensors, the config and the model of the checkpoint that they were converted from."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf_files
import numpy as np
import pytest

from trtforge.builder.checkpoint import open_checkpoint
from trtforge.builder.checkpoint.gguf_blocks import BLOCK_TYPES, read_blocks
from trtforge.builder.translate import translate
from trtforge.plugins.errors import CheckpointError, UnsupportedModel

#: type -> largest error of a stored value, in units of the largest value of its block
QUANTIZED = {
    "F16": 2**-11,
    "BF16": 2**-8,
    "Q8_0": 1 / 127,
    "Q4_0": 1 / 8,
    "Q4_1": 1 / 15,
    "Q5_0": 1 / 16,
    "Q5_1": 1 / 31,
}
SMALLEST = 2**-24  # half of FP16's smallest step, and room for FP32's rounding
VARIANTS = (
    "llama",
    "llama-tied",
    "llama-mha",
    "llama-mqa",
    "llama-head-size",
    "llama-bias",
    "llama-odd-vocab",
    "llama-linear",
    "llama-llama3",
    "llama-yarn",
    "qwen2",
    "qwen3",
    "phi3",
    "phi3-window",
    "phi3-partial",
    "phi3-longrope",
    "gemma3-untied",
)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gives_the_tensors_of_its_source(
    variant: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    source = open_checkpoint(tiny_checkpoint(variant))
    stored = open_checkpoint(gguf_files.write(tmp_path / "m.gguf", tiny_checkpoint(variant)))
    assert stored.kind == "gguf"
    assert sorted(stored.tensors) == sorted(source.tensors)
    for name in source.tensors:
        # Gemma's norms are stored with 1 added, which rounds
        rounding = 2**-23 if variant.startswith("gemma3") and name.endswith("norm.weight") else 0
        np.testing.assert_allclose(stored.read(name), source.read(name), rtol=0, atol=rounding, err_msg=name)
        assert stored.tensors[name].shape == source.tensors[name].shape


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("max_seq_len", [16, 64])
def test_gives_the_model_of_its_source(
    variant: str, max_seq_len: int, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """The whole ModelSpec is equal; rotations to float32's rounding, since GGUF keeps factors in float32."""
    source = translate(open_checkpoint(tiny_checkpoint(variant)), max_seq_len).spec
    path = gguf_files.write(tmp_path / f"{source.name}.gguf", tiny_checkpoint(variant))
    stored = translate(open_checkpoint(path), max_seq_len).spec
    for mine, theirs in zip(stored.ropes, source.ropes, strict=True):
        np.testing.assert_allclose(mine.inv_freq, theirs.inv_freq, rtol=3e-7)
        assert mine.attention_factor == pytest.approx(theirs.attention_factor, rel=3e-7)
    different = {k for k, v in vars(source).items() if k != "ropes" and getattr(stored, k) != v}
    assert not different, {k: (getattr(stored, k), getattr(source, k)) for k in different}


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_quantized_values_are_near_their_source(
    dtype: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = tiny_checkpoint("llama")
    source, stored = (
        open_checkpoint(directory),
        open_checkpoint(gguf_files.write(tmp_path / "m.gguf", directory, dtype)),
    )
    for name, info in source.tensors.items():
        want, got = source.read(name), stored.read(name)
        assert stored.tensors[name].dtype == (dtype if len(info.shape) == 2 else "F32")
        block = 1 if dtype in ("F16", "BF16") else 32
        largest = (
            np.abs(want.reshape(-1, block)).max(axis=1, keepdims=True) if want.ndim == 2 else np.zeros((1, 1))
        )
        # Q4_1 and Q5_1 steps are shares of the range, up to twice the largest value; half a step is rounded away
        error = np.abs(got - want).reshape(-1, block) if want.ndim == 2 else np.abs(got - want)
        assert (error <= largest * QUANTIZED[dtype] * 1.01 + SMALLEST).all(), name


def _k_block(kind: str, q: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """One 256-value block of a K type made by hand from its quants: (bytes, the values that it stands for).

    Layouts: ggml-common.h (block_q4_K and its like). d = 0.5, dmin = 0.25 are exact in FP16.
    """
    d, dmin = np.float16(0.5), np.float16(0.25)
    head = np.array([d, dmin], np.float16).view(np.uint8)
    if kind == "Q6_K":
        scales = rng.integers(-20, 20, 16).astype(np.int8)
        value = 0.5 * np.repeat(scales, 16).astype(np.float32) * (q - 32)
        low, high = np.zeros(128, np.uint8), np.zeros(64, np.uint8)
        for i, v in enumerate(q):
            half, j, lane = i // 128, i % 128 // 32, i % 32
            low[64 * half + 32 * (j % 2) + lane] |= (v & 15) << (4 * (j // 2))
            high[32 * half + lane] |= (v >> 4) << (2 * j)
        return np.concatenate([low, high, scales.view(np.uint8), head[:2]]), value
    scale, minimum = (rng.integers(0, 64, 8) for _ in range(2))
    packed = np.zeros(12, np.uint8)
    for j in range(8):
        if j < 4:
            packed[j] |= scale[j]
            packed[j + 4] |= minimum[j]
        else:
            packed[j + 4] = (scale[j] & 15) | (minimum[j] & 15) << 4
            packed[j - 4] |= (scale[j] >> 4) << 6
            packed[j] |= (minimum[j] >> 4) << 6
    value = 0.5 * np.repeat(scale, 32) * q - 0.25 * np.repeat(minimum, 32)
    low, high = np.zeros(128, np.uint8), np.zeros(32, np.uint8)
    for i, v in enumerate(q):
        group, lane = i // 32, i % 32
        low[32 * (group // 2) + lane] |= (v & 15) << (4 * (group % 2))
        high[lane] |= (v >> 4) << group
    return np.concatenate([head, packed, high, low] if kind == "Q5_K" else [head, packed, low]), value.astype(
        np.float32
    )


@pytest.mark.parametrize(("kind", "bits"), [("Q4_K", 4), ("Q5_K", 5), ("Q6_K", 6)])
def test_k_quants_decode_by_their_definition(
    kind: str, bits: int, tiny_checkpoint: Callable[[str], Path], tmp_path: Path, rng: np.random.Generator
) -> None:
    """Blocks made by hand from known quants and scales; the package has no quantizer for these types."""
    made = [_k_block(kind, rng.integers(0, 1 << bits, 256), rng) for _ in range(8)]
    stored = np.stack([block for block, _ in made])
    values = np.stack([value for _, value in made])
    path = _with_tensor(tiny_checkpoint("llama"), tmp_path / "m.gguf", kind, stored)
    np.testing.assert_array_equal(open_checkpoint(path).read("extra.weight"), values)


@pytest.mark.parametrize(("kind", "block_bytes", "scale_at"), [("Q2_K", 84, 80), ("Q3_K", 110, 108)])
def test_a_block_does_not_depend_on_its_neighbours(
    kind: str, block_bytes: int, scale_at: int, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Tensors are decoded in pieces; a piece must not show. The scale is linear, so twice it is twice the value."""
    rng = np.random.default_rng(7)
    blocks = rng.integers(0, 256, (4, block_bytes), np.uint8)
    blocks[:, scale_at:] = np.full((4, (block_bytes - scale_at) // 2), 0.5, np.float16).view(np.uint8)
    doubled = blocks[:1].copy()
    doubled[:, scale_at:] = np.full((1, (block_bytes - scale_at) // 2), 1.0, np.float16).view(np.uint8)
    stored = np.concatenate([blocks, doubled])
    path = _with_tensor(tiny_checkpoint("llama"), tmp_path / "m.gguf", kind, stored)
    got = open_checkpoint(path).read("extra.weight")
    assert np.isfinite(got).all() and len(np.unique(got[0])) > 8
    np.testing.assert_array_equal(got[4], 2 * got[0])


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks_stand_for_the_values(
    kind: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path, rng: np.random.Generator
) -> None:
    """Codes, scales and minimums of random bytes give the very values that the `gguf` package decodes."""
    block = BLOCK_TYPES[kind]
    stored = rng.integers(0, 256, (5, 256 // block.block_values, block.block_bytes), np.uint8)
    units = rng.normal(0, 0.02, (*stored.shape[:2], 2)).astype(np.float16).view(np.uint8)
    two = kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
    stored[..., : 4 if two else 2] = units[..., : 4 if two else 2]
    path = _with_tensor(tiny_checkpoint("llama"), tmp_path / "m.gguf", kind, stored.reshape(5, -1))
    checkpoint = open_checkpoint(path)
    assert checkpoint.block_format("extra.weight") == block.format
    blocks = checkpoint.read_blocks("extra.weight")
    np.testing.assert_array_equal(blocks.values(), checkpoint.read("extra.weight"))
    assert blocks.scales.shape == (5, 8) and len(np.unique(blocks.scales)) > 5
    low, high = (-128, 127) if block.format.bits == 8 else (-8, 7) if block.format.symmetric else (0, 15)
    assert low <= blocks.codes.min() and (blocks.codes.max() <= high or not block.format.symmetric)
    assert checkpoint.block_format("model.embed_tokens.weight") is None, "stored as values"


def test_blocks_do_not_depend_on_the_piece(rng: np.random.Generator) -> None:
    raw = rng.integers(0, 128, (12, 36), np.uint8)  # 12 rows of two blocks
    whole, pieces = (read_blocks(raw, BLOCK_TYPES["Q4_0"], (12, 64), piece) for piece in (1 << 20, 96))
    np.testing.assert_array_equal(whole.codes, pieces.codes)
    np.testing.assert_array_equal(whole.scales, pieces.scales)


@pytest.mark.parametrize("variant", ["llama", "llama-mqa", "phi3"])
def test_rows_of_blocks_are_in_the_order_of_values(
    variant: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(gguf_files.write(tmp_path / "m.gguf", tiny_checkpoint(variant), "Q4_1"))
    translation = translate(checkpoint, 64)
    for name, shape in translation.spec.weight_shapes().items():
        source = translation.sources[name]
        assert (source.block_format(checkpoint) is None) == (len(shape) == 1)
        if len(shape) == 2:
            np.testing.assert_array_equal(
                source.read_blocks(checkpoint).values(), source.read(checkpoint), err_msg=name
            )


def _with_tensor(directory: Path, path: Path, kind: str, blocks: np.ndarray) -> Path:
    """A GGUF of one tensor `extra.weight` beside an embedding, [len(blocks), 256] in the given K type."""
    import gguf

    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in gguf_files.model_metadata(config, "llama").items():
        gguf_files.add_entry(writer, key, value)
    writer.add_tensor("token_embd.weight", np.zeros((288, 64), np.float32))
    writer.add_tensor("extra.weight", blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_what_the_model_does_not_use_is_reported(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    extra = {"blk.0.mystery.weight": np.ones(3, np.float32), "rope_freqs.weight": np.ones(8, np.float32)}
    path = gguf_files.write(tmp_path / "m.gguf", tiny_checkpoint("llama"), extra=extra)
    coverage = translate(open_checkpoint(path), 64).coverage
    assert coverage.unused == ("blk.0.mystery.weight",)  # the factor table is used: it is in the config
    assert "blk.0.mystery.weight" in coverage.report()


def test_end_tokens_are_the_ones_that_the_file_names(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    metadata = {
        "tokenizer.ggml.eot_token_id": 257,
        "tokenizer.ggml.eom_token_id": 258,
        "tokenizer.ggml.unknown_token_id": 9,
    }
    path = gguf_files.write(tmp_path / "m.gguf", tiny_checkpoint("llama"), metadata=metadata)
    checkpoint = open_checkpoint(path)
    assert checkpoint.generation_config == {"eos_token_id": [258, 257], "bos_token_id": 256}


def test_a_split_model_is_read_by_its_first_part(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = open_checkpoint(gguf_files.write(tmp_path / "whole.gguf", tiny_checkpoint("llama")))
    gguf_files.write(tmp_path / "m.gguf", tiny_checkpoint("llama"), split_max_tensors=11)
    parts = open_checkpoint(tmp_path / "m-00001-of-00002.gguf")
    assert sorted(parts.tensors) == sorted(whole.tensors)
    for name in whole.tensors:
        np.testing.assert_array_equal(parts.read(name), whole.read(name))
    with pytest.raises(CheckpointError, match=r"pass the first, m-00001-of-00002\.gguf"):
        open_checkpoint(tmp_path / "m-00002-of-00002.gguf")
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.gguf: cannot be opened"):
        open_checkpoint(tmp_path / "m-00001-of-00002.gguf")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.attention.head_count_kv": [2, 1]}, "differs from layer to layer"),
        ({"llama.attention.key_length": 16, "llama.attention.value_length": 8}, "only equal sizes"),
        ({"llama.rope.scaling.type": "spiral"}, "spiral"),
        ({"general.architecture": "mamba"}, "'mamba' is not supported; supported are .*llama.*qwen2"),
    ],
)
def test_what_is_not_done_is_refused_by_name(
    metadata: dict[str, object], message: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    if "general.architecture" in metadata:
        _with_tensor(tiny_checkpoint("llama"), path, "Q6_K", np.zeros((1, 210), np.uint8))
        path.write_bytes(path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1))
    else:
        gguf_files.write(path, tiny_checkpoint("llama"), metadata=metadata)
    with pytest.raises(UnsupportedModel, match=message):
        open_checkpoint(path)


@pytest.mark.slow
def test_the_real_model_is_the_one_that_transformers_loads(real_gguf: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    theirs = AutoConfig.from_pretrained(real_gguf.parent, gguf_file=real_gguf.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    weights = load_gguf_checkpoint(str(real_gguf), return_tensors=True, model_to_load=model)["tensors"]
    checkpoint = open_checkpoint(real_gguf)
    assert sorted(weights) == sorted(checkpoint.tensors)
    for name, weight in weights.items():
        np.testing.assert_array_equal(checkpoint.read(name), weight.numpy(), err_msg=name)
    config = checkpoint.config
    for key in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "hidden_act",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
    ):
        assert config[key] == getattr(theirs, key), key
    assert config["rope_theta"] == theirs.rope_parameters["rope_theta"]
    assert np.float32(config["rms_norm_eps"]) == np.float32(theirs.rms_norm_eps)
    assert translate(checkpoint, 2048).coverage.unused == ()
