"""Hugging Face directories: safetensors and PyTorch files, single and sharded, every dtype."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from trtforge.builder.checkpoint import cover, open_checkpoint
from trtforge.plugins.errors import CheckpointError, UnsupportedModel

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return tmp_path


def one_of_each() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    values = {name: (torch.randn(3, 5) * 50).to(dtype) for name, dtype in DTYPES.items()}
    return values | {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "cube": torch.randn(2, 3, 4)}


@pytest.mark.parametrize("kind", ["safetensors", "pytorch"])
def test_every_dtype_is_read_as_fp32(kind: str, directory: Path) -> None:
    tensors = one_of_each()
    if kind == "safetensors":
        save_file(tensors, directory / "model.safetensors")
    else:
        torch.save(tensors, directory / "pytorch_model.bin")
    checkpoint = open_checkpoint(directory)
    assert checkpoint.kind == kind
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in tensors.items():
        got = checkpoint.read(name)
        assert got.dtype == np.float32
        assert checkpoint.tensors[name].shape == got.shape == tuple(tensor.shape)
        assert checkpoint.tensors[name].dtype == (name if name in DTYPES else "F32")
        np.testing.assert_array_equal(got, tensor.to(torch.float32).numpy())


def test_a_tensor_larger_than_one_piece_is_read_whole(directory: Path) -> None:
    """BF16 is decoded a million elements at a time; the seams must not show."""
    tensor = torch.arange(2_500_003, dtype=torch.float32).to(torch.bfloat16)
    save_file({"long": tensor}, directory / "model.safetensors")
    np.testing.assert_array_equal(open_checkpoint(directory).read("long"), tensor.float().numpy())


@pytest.mark.parametrize("kind", ["safetensors", "pytorch"])
def test_shards_are_one_checkpoint(kind: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    sharded = tiny_checkpoint("llama-sharded")
    files = sorted(sharded.glob("*.safetensors"))
    assert len(files) > 1
    want = {name: tensor for file in files for name, tensor in load_file(file).items()}
    if kind == "pytorch":
        for file in files:
            torch.save(load_file(file), tmp_path / f"{file.stem}.bin")
        (tmp_path / "config.json").write_bytes((sharded / "config.json").read_bytes())
        index = (sharded / "model.safetensors.index.json").read_text().replace(".safetensors", ".bin")
        (tmp_path / "pytorch_model.bin.index.json").write_text(index)
        sharded = tmp_path
    checkpoint = open_checkpoint(sharded)
    assert checkpoint.kind == kind
    assert set(checkpoint.tensors) == set(want)
    for name, tensor in want.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor.numpy())


def test_safetensors_go_before_pytorch_files(directory: Path) -> None:
    save_file({"w": torch.ones(2)}, directory / "model.safetensors")
    torch.save({"w": torch.zeros(2)}, directory / "pytorch_model.bin")
    assert open_checkpoint(directory).kind == "safetensors"


def test_pytorch_files_need_torch(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.zeros(2)}, directory / "pytorch_model.bin")
    monkeypatch.setitem(sys.modules, "torch", None)  # as where it is not installed
    with pytest.raises(UnsupportedModel, match=r"pip install trtforge\[pytorch\]"):
        open_checkpoint(directory)


def test_generation_config_is_the_files(directory: Path) -> None:
    save_file({"w": torch.ones(2)}, directory / "model.safetensors")
    assert open_checkpoint(directory).generation_config == {}
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert open_checkpoint(directory).generation_config == {"eos_token_id": [2, 7]}


def test_quantized_weights_are_refused_by_their_method(directory: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "gptq"}}
    (directory / "config.json").write_text(json.dumps(config))
    save_file({"w": torch.ones(2)}, directory / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="gptq"):
        open_checkpoint(directory)


def test_coverage_names_what_is_missing_wrong_or_left_over(directory: Path) -> None:
    tensors = {
        "model.norm.weight": torch.ones(4),
        "model.rotary_emb.inv_freq": torch.ones(2),
        "b": torch.ones(2, 3),
    }
    save_file(tensors, directory / "model.safetensors")
    checkpoint = open_checkpoint(directory)
    coverage = cover(checkpoint, {"model.norm.weight": (4,)})
    assert coverage.unused == ("b",)  # inv_freq follows from the config
    assert coverage.report() == "1 tensors of the checkpoint are not used: b"
    assert cover(checkpoint, {"model.norm.weight": (4,), "b": (2, 3)}).report() == ""
    with pytest.raises(
        CheckpointError, match=r"'model\.normal\.weight' is missing; the nearest there is 'model\.norm"
    ):
        cover(checkpoint, {"model.normal.weight": (4,)})
    with pytest.raises(CheckpointError, match=r"'b' has shape \[2, 3\], its config demands \[3, 2\]"):
        cover(checkpoint, {"b": (3, 2)})
    with pytest.raises(CheckpointError, match="no tensor 'c'"):
        checkpoint.read("c")
