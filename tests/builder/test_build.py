"""build: what an engine directory holds, what is refused before anything is written, and that a build that is
stopped at any moment leaves nothing that looks whole."""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest

from trtforge.builder.build import build
from trtforge.builder.spec import BuildConfig
from trtforge.plugins.errors import (
    CheckpointError,
    EnvironmentProblem,
    ForgeError,
    InvalidArgument,
    UnsupportedModel,
)
from trtforge.runtime import manifest as manifest_format
from trtforge.runtime.executors import open_executor
from trtforge.runtime.manifest import Limits, Manifest

Checkpoint = Callable[[str], Path]


def change_json(file: Path, **values: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    content = {**json.loads(file.read_text()), **values} if file.exists() else values
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A checkpoint that a test may change."""
    return checkpoints.save("llama", tmp_path / "llama")


def test_engine_directory_is_whole_and_says_what_it_is(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = BuildConfig(kv_cache_dtype="int8", tokens_per_block=32, limits=Limits(4, 64, 48))
    manifest = build(tiny_checkpoint("mistral-window"), tmp_path / "engine", config)
    assert manifest_format.load(tmp_path / "engine", checksums=True) == manifest
    assert sorted([*manifest.files, "manifest.json"]) == sorted(os.listdir(tmp_path / "engine"))
    assert {"model.xml", "model.bin", "tokenizer.json", "tokenizer_config.json"} < set(manifest.files)
    assert {"generation_config.json", "chat_template.jinja"} < set(manifest.files)
    assert (manifest.target, manifest.recipe, manifest.activations) == ("cpu", "full_prec", "fp32")
    assert manifest.model["family"] == "mistral" and manifest.model["vocab_size"] == 288
    assert manifest.limits == Limits(4, 64, 48)
    assert (manifest.kv.dtype, manifest.kv.tokens_per_block) == ("int8", 32)
    assert [(g.layers, g.window) for g in manifest.kv.groups] == [((0, 1), 8)]
    assert set(manifest.versions) == {"trtforge", "openvino", "ops"}
    special = json.loads((tmp_path / "engine" / "tokenizer_config.json").read_text())
    assert special["eos_token"] == "<|im_end|>" and special["add_bos_token"] is False


def test_auto_is_fp16_and_an_open_length_is_the_model_s_own(
    tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    manifest = build(tiny_checkpoint("llama"), tmp_path / "e", BuildConfig(limits=Limits(max_seq_len=0)))
    assert manifest.kv.dtype == "fp16"
    assert manifest.limits.max_seq_len == 64


def test_open_length_has_a_bound(llama: Path, tmp_path: Path) -> None:
    change_json(llama / "config.json", max_position_embeddings=1 << 20)
    assert build(llama, tmp_path / "e", BuildConfig(limits=Limits(max_seq_len=0))).limits.max_seq_len == 8192


def test_length_beyond_the_model_s_is_reported(
    tiny_checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build(tiny_checkpoint("llama"), tmp_path / "e", BuildConfig(limits=Limits(max_seq_len=65)))
    assert "max_seq_len 65 is beyond the 64 positions" in caplog.text


@pytest.mark.parametrize(
    ("generation", "config", "wanted"),
    [([258, 7], 3, (258, 7)), (5, 3, (5,)), (None, 3, (258,)), (0, 3, (0,))],
)
def test_end_tokens_come_from_the_generation_config_then_the_tokenizer(
    llama: Path, tmp_path: Path, generation: Any, config: int, wanted: tuple[int, ...]
) -> None:
    change_json(llama / "generation_config.json", eos_token_id=generation)
    change_json(llama / "config.json", eos_token_id=config)
    assert build(llama, tmp_path / "engine", BuildConfig()).eos_token_ids == wanted


def test_model_without_end_token_is_reported(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("config.json", "generation_config.json"):
        change_json(llama / name, eos_token_id=None)
    change_json(llama / "tokenizer_config.json", eos_token=None)
    assert build(llama, tmp_path / "engine", BuildConfig()).eos_token_ids == ()
    assert "names no end token" in caplog.text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            BuildConfig(kv_cache_dtype="fp4"),
            "'fp4' is unknown; choose from: auto, fp32, fp16, bf16, int8, fp8",
        ),
        (BuildConfig(tokens_per_block=24), "24 is not possible; choose from: 8, 16, 32, 64, 128"),
        (BuildConfig(recipe="int3"), "'int3' is unknown; choose from: as_is, full_prec, int4_wo, int8_wo"),
        (BuildConfig(target="abacus"), "'abacus' is unknown; choose from: cpu"),
        (BuildConfig(target="tensorrt"), "target 'tensorrt' comes with a later version; choose from: cpu"),
        (BuildConfig(target="tensorrt_rtx"), "target 'tensorrt-rtx' comes with a later version"),
        (BuildConfig(limits=Limits(max_num_tokens=0)), "max_num_tokens 0 is not possible; give at least 1"),
        (BuildConfig(limits=Limits(max_batch_size=0)), "max_batch_size 0 is not possible; give at least 1"),
        (BuildConfig(limits=Limits(max_seq_len=-1)), "max_seq_len -1 is not possible; give at least 0"),
        (
            BuildConfig(limits=Limits(max_seq_len=2**31)),
            "max_seq_len 2147483648 is not possible; give at most",
        ),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(
    config: BuildConfig, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        build(tmp_path / "no checkpoint is even looked for", tmp_path / "deep" / "engine", config)
    assert message in str(refused.value)
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize("ids", ["x", ["x"], 1.5, [True], {"a": 1}])
def test_end_tokens_that_are_no_token_ids_are_refused(
    ids: object, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    llama = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "llama")
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(CheckpointError, match=r"eos_token_id is .*, want a token id or a list of them"):
        build(llama, tmp_path / "engine", BuildConfig())


def test_a_name_that_is_no_text_is_made_one(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """File names are bytes; what is not UTF-8 in them comes as half surrogate pairs, which cannot be written."""
    llama = shutil.copytree(tiny_checkpoint("llama"), tmp_path / os.fsdecode(b"caf\xe9"))
    manifest = build(llama, tmp_path / "engine", BuildConfig())
    assert (manifest.model["name"], manifest.model["source"]) == ("caf?", "caf?")


def test_recipe_that_excludes_what_is_not_there_is_refused(
    tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('weights = "int8"\nsymmetric = true\nexclude = ["lm_head", "layers.1.mlp.dwon"]\n')
    with pytest.raises(InvalidArgument, match=r"'layers.1.mlp.dwon'.*nearest: 'layers.1.mlp.down'"):
        build(tiny_checkpoint("llama"), tmp_path / "engine", BuildConfig(recipe=str(recipe)))
    recipe.write_text(recipe.read_text().replace("dwon", "down"))
    mine = build(tiny_checkpoint("llama"), tmp_path / "engine", BuildConfig(recipe=str(recipe)))
    all_int8 = build(tiny_checkpoint("llama"), tmp_path / "int8", BuildConfig(recipe="int8_wo"))
    excluded = 3 * (288 * 64 + 64 * 96)  # bytes that they take more in FP32
    difference = mine.files["model.bin"].bytes - all_int8.files["weights.bin"].bytes
    assert mine.recipe == "mine" and abs(difference - excluded) < 2000  # the scales


def test_failed_build_leaves_nothing(llama: Path, tmp_path: Path) -> None:
    change_json(llama / "config.json", architectures=["LlamaForEverything"])
    with pytest.raises(UnsupportedModel):
        build(llama, tmp_path / "out" / "engine", BuildConfig())
    assert not (tmp_path / "out").exists() or not os.listdir(tmp_path / "out")


@pytest.mark.parametrize(
    ("recipe", "limit"),
    [("full_prec", 1 << 10), ("full_prec", 200 << 10), ("int8_wo", 1 << 10), ("int8_wo", 90 << 10)],
)
def test_full_disk_is_one_line_and_leaves_nothing(
    recipe: str, limit: int, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """At the graph of ours, and at OpenVINO's; early and late in a program's weights. The weights are 300 kB, or 105
    in eight bits; the limit is on a file's size."""
    checkpoint, output = tiny_checkpoint("llama"), tmp_path / "out" / "engine"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        with pytest.raises(EnvironmentProblem, match="cannot write the engine") as full:
            build(checkpoint, output, BuildConfig(recipe=recipe))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(full.value)
    assert os.listdir(output.parent) == []


def test_unwritable_place_is_one_line(tiny_checkpoint: Checkpoint) -> None:
    with pytest.raises(ForgeError) as refused:
        build(tiny_checkpoint("llama"), Path("/proc/engine"), BuildConfig())
    assert "/proc/engine: cannot write the engine" in str(refused.value)


#: argv: checkpoint, output. Builds in children that die by SIGKILL at their n-th file event, for n spread over the
#: whole build and dense at its end, where the engine is published; prints what then stands at the output.
KILLER = """
import os, shutil, signal, sys
from pathlib import Path
import openvino, onnx_ir, tokenizers
from trtforge.builder.build import build
from trtforge.builder.spec import BuildConfig
from trtforge.plugins.errors import ForgeError
from trtforge.runtime import manifest

source, output = sys.argv[1], Path(sys.argv[2])
old, pipe = output.parent.with_name("old"), os.pipe()
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.chmod", "shutil.rmtree", "os.rmdir")

def run(stop):
    count = 0
    def hook(event, args):
        nonlocal count
        count += event in EVENTS
        if event in EVENTS and count == stop:
            os.kill(os.getpid(), signal.SIGKILL)
    shutil.rmtree(output.parent, ignore_errors=True)
    if over_engine:
        shutil.copytree(old, output)
    pid = os.fork()
    if pid == 0:
        sys.addaudithook(hook)
        build(source, output, BuildConfig())
        os.write(pipe[1], b"%d" % count)
        os._exit(0)
    return os.waitpid(pid, 0)[1]

def standing():
    try:
        return manifest.load(output, checksums=True).recipe
    except ForgeError:
        return "broken" if output.exists() else "absent"

build(source, old, BuildConfig(recipe="int8_wo"))
for over_engine in (False, True):
    assert run(-1) == 0
    total = int(os.read(pipe[0], 100))
    for stop in sorted({*range(1, total, total // 10), *range(total - 15, total + 1)}):
        assert run(stop) == signal.SIGKILL, stop
        print("over_engine" if over_engine else "over_nothing", standing())
run(total // 2)
"""


def test_build_killed_at_any_moment_leaves_a_whole_engine_or_none(
    tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    output = tmp_path / "out" / "engine"
    command = [sys.executable, "-c", KILLER, str(tiny_checkpoint("llama")), str(output)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    found = Counter(result.stdout.splitlines())
    assert found.total() >= 40
    assert set(found) <= {
        f"{case} {standing}"
        for case, allowed in {
            "over_nothing": ("absent", "full_prec"),
            "over_engine": ("absent", "int8_wo", "full_prec"),
        }.items()
        for standing in allowed
    }, found
    assert found["over_nothing absent"] and found["over_engine int8_wo"] and found["over_engine full_prec"]

    assert len(os.listdir(output.parent)) > 1, "a killed build leaves its own directory"
    manifest = build(tiny_checkpoint("llama"), output, BuildConfig())
    assert os.listdir(output.parent) == ["engine"], "the next build removes what a killed one left"
    open_executor(output, manifest).close()


#: argv: checkpoint, output, recipe. Prints the bytes that a build adds to the process's peak.
PEAK = """
import sys
from pathlib import Path
import onnx_ir, openvino, tokenizers
from trtforge.builder.build import build
from trtforge.builder.spec import BuildConfig
from trtforge.builder import graph, passes
from trtforge.builder.targets import cpu

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))

openvino.Core()
before = peak()
build(sys.argv[1], Path(sys.argv[2]), BuildConfig(recipe=sys.argv[3]))
print(peak() - before)
"""


@pytest.mark.parametrize("recipe", ["full_prec", "int8_wo"])
def test_memory_stays_near_the_output_and_the_largest_tensor(
    recipe: str, tmp_path_factory: pytest.TempPathFactory, big_checkpoint: Path
) -> None:
    output = tmp_path_factory.mktemp("big") / "engine"
    command = [sys.executable, "-c", PEAK, str(big_checkpoint), str(output), recipe]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    manifest = Manifest.from_json((output / "manifest.json").read_text())
    size = max(entry.bytes for entry in manifest.files.values())
    assert size > (150e6 if recipe == "full_prec" else 40e6)
    # A program is written tensor by tensor; OpenVINO holds its whole graph.
    bound = 1.5 * size + BIG_TENSOR_BYTES if recipe == "full_prec" else 2.5 * BIG_TENSOR_BYTES
    assert size / 10 < int(result.stdout) <= bound


BIG = {"vocab_size": 16384, "hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 4}
BIG_TENSOR_BYTES = 4 * BIG["vocab_size"] * BIG["hidden_size"]


@pytest.fixture(scope="module")
def big_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """180 MB of weights, beside a small one's config: almost all zeros, in a sparse file."""
    directory = checkpoints.save("llama", tmp_path_factory.mktemp("big") / "llama")
    change_json(directory / "config.json", **BIG, head_dim=16)
    hidden, inner, vocab = BIG["hidden_size"], BIG["intermediate_size"], BIG["vocab_size"]
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    shapes["model.norm.weight"] = (hidden,)
    for i in range(BIG["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}{n}.weight": (hidden,) for n in ("input_layernorm", "post_attention_layernorm")}
        for name, rows in {"q": 64, "k": 32, "v": 32}.items():
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (rows, hidden)
        shapes[f"{layer}self_attn.o_proj.weight"] = (hidden, 64)
        shapes |= {f"{layer}mlp.{n}_proj.weight": (inner, hidden) for n in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (hidden, inner)
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 4 * int.__mul__(*shape) if len(shape) == 2 else 4 * shape[0]
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
        for i, entry in enumerate(header.values()):  # OpenVINO stores equal tensors once
            file.seek(8 + len(text) + entry["data_offsets"][0])
            file.write(np.float32(1 + i).tobytes())
    return directory
