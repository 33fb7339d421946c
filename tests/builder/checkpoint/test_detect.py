"""What is given as a model is recognised and said, our own outputs and other tools' too."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf_files
import huggingface_hub
import pytest

from trtforge.builder.checkpoint import open_checkpoint
from trtforge.plugins.errors import CheckpointError, UnsupportedModel


def make(directory: Path, **files: object) -> Path:
    """Files by name, `__` for a folder and a dot before the last part: text, or JSON."""
    for name, content in files.items():
        path = directory / name.replace("__", "/").replace("_json", ".json").replace("_pbtxt", ".pbtxt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def test_each_kind_is_said(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    assert open_checkpoint(str(tiny_checkpoint("llama"))).kind == "safetensors"
    path = gguf_files.write(tmp_path / "m.gguf", tiny_checkpoint("llama"))
    assert open_checkpoint(path).kind == "gguf"
    assert open_checkpoint(tmp_path).kind == "gguf"  # the only one in its directory
    unnamed = path.rename(tmp_path / "model")
    assert open_checkpoint(unnamed).kind == "gguf"  # told by its first bytes


def test_of_several_gguf_files_one_must_be_chosen(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(UnsupportedModel, match=r"2 GGUF models; pass one of them: a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"config_json": {"architecture": "LlamaForCausalLM", "dtype": "float16"}},
            "a TensorRT-LLM checkpoint",
        ),
        ({"config_json": {"pretrained_config": {}, "build_config": {}}}, "a TensorRT-LLM engine"),
        ({"manifest_json": {}}, "an engine directory, already built"),
        ({"ensemble__config_pbtxt": "name: 'ensemble'"}, "a Triton model repository"),
        ({"config_pbtxt": "name: 'tensorrt_llm'"}, "a Triton model repository"),
        ({"readme": "hello"}, r"no config.json.*\(there: readme\)"),
        ({}, r"\(there: nothing\)"),
    ],
)
def test_what_is_no_model_is_named(files: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        open_checkpoint(make(tmp_path, **files))


def test_a_directory_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no weights"):
        open_checkpoint(make(tmp_path, config_json={"architectures": ["LlamaForCausalLM"]}))


@pytest.mark.parametrize(
    ("name", "message"),
    [("model.safetensors", "pass its directory"), ("notes.txt", "not a checkpoint that is read")],
)
def test_a_single_file_of_another_kind_is_refused(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("x")
    with pytest.raises(UnsupportedModel, match=message):
        open_checkpoint(tmp_path / name)


@pytest.mark.parametrize("source", ["missing", "./missing/dir", "/missing/dir", "a/b/c", "https://hub/a/b"])
def test_a_missing_path_is_not_looked_for_on_the_hub(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError, match="no such file or directory; pass a Hugging Face directory"):
        open_checkpoint(source)


@pytest.mark.parametrize("source", ["x" * 5000, "~nobody-of-this-name/model"])
def test_a_path_that_cannot_be_is_an_error_like_others(source: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be opened"):
        open_checkpoint(source)


def test_a_hub_id_fetches_what_a_build_needs(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the download call: safetensors are asked for first, PyTorch files only where there are none."""
    calls: list[list[str]] = []

    def download(repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert repo_id == "org/name-1.0" and ignore_patterns == ["*/*"]
        calls.append(allow_patterns)
        return str(tiny_checkpoint("llama") if found else tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = True
    assert open_checkpoint("org/name-1.0").kind == "safetensors"
    assert len(calls) == 1
    assert {"*.json", "*.jinja", "tokenizer.model", "model*.safetensors"} == set(calls[0])
    found = False
    with pytest.raises(UnsupportedModel, match=r"no config\.json"):
        open_checkpoint("org/name-1.0")
    assert "pytorch_model*.bin" in calls[2]


def test_without_a_network_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="pass the local directory") as error:
        open_checkpoint("org/name")
    assert "\n" not in str(error.value)
