"""The command line: exit codes, one line per error, options in both spellings, and what the commands print."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from trtforge.builder import cli
from trtforge.plugins.errors import CheckpointError, Overloaded


def invoke(*args: object) -> Result:
    return CliRunner().invoke(cli.main, [str(arg) for arg in args])


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Makes `trtforge inspect PATH` raise."""

    def install(error: BaseException) -> None:
        def command(path: str) -> None:
            raise error

        monkeypatch.setattr(cli, "inspect", click.command("inspect")(click.argument("path")(command)))

    return install


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (
            CheckpointError("model.gguf: truncated;\n get it again"),
            "error: model.gguf: truncated; get it again",
            1,
        ),
        (Overloaded("the queue is full", 100), "error: the queue is full", 1),
        (KeyError("oops"), "internal error: KeyError: 'oops'; run again with --debug", 1),
        (
            ConnectionResetError("gone"),
            "internal error: ConnectionResetError: gone; run again with --debug",
            1,
        ),
        (PermissionError(13, "Permission denied", "/a/b"), "error: /a/b: Permission denied", 1),
        (OSError(28, "No space left on device"), "error: output: No space left on device", 1),
    ],
)
def test_an_error_is_one_line_on_stderr(
    failing: Callable[[BaseException], None], error: Exception, line: str, code: int
) -> None:
    failing(error)
    result = invoke("inspect", "x")
    assert (result.stderr, result.stdout, result.exit_code) == (line + "\n", "", code)


@pytest.mark.parametrize("args", [("--debug", "inspect", "x"), ("inspect", "x", "--debug")])
def test_debug_shows_the_traceback_wherever_it_stands(
    failing: Callable[[BaseException], None], args: tuple[str, ...]
) -> None:
    failing(CheckpointError("damaged"))
    result = invoke(*args)
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert "in command" in result.stderr
    assert result.stderr.endswith("error: damaged\n")


def test_ctrl_c_is_quiet(failing: Callable[[BaseException], None]) -> None:
    failing(KeyboardInterrupt())
    result = invoke("inspect", "x")
    assert (result.output, result.exit_code) == ("", 130)


def test_a_reader_that_goes_away_is_no_error(tiny_checkpoint: Callable[[str], Path]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    code = "from trtforge.builder.cli import main; main()"
    run = subprocess.run(
        [sys.executable, "-c", code, "inspect", str(tiny_checkpoint("llama"))],
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write_end)
    assert (run.stderr, run.returncode) == ("", 128 + signal.SIGPIPE)


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["build", "--help"]], ids=" ".join)
def test_a_full_disk_is_one_line(args: list[str]) -> None:
    code = "import sys; from trtforge.builder.cli import main; main(sys.argv[1:])"
    with Path("/dev/full").open("w") as full:
        run = subprocess.run(
            [sys.executable, "-c", code, *args], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (run.stderr, run.returncode) == ("error: output: No space left on device\n", 1)


@pytest.mark.parametrize("closed", [1, 2])
def test_a_stream_may_be_closed(closed: int, tiny_engine: Callable[..., Path]) -> None:
    code = "import sys; from trtforge.builder.cli import main; main(sys.argv[1:])"
    args = ["generate", str(tiny_engine("llama", max_seq_len=64)), "--prompt", "a", "--max-tokens", "2"]
    run = subprocess.run(
        [sys.executable, "-c", code, *args],
        preexec_fn=lambda: os.close(closed),
        stdout=None if closed == 1 else subprocess.PIPE,
        stderr=None if closed == 2 else subprocess.PIPE,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert closed == 2 or "error" not in run.stderr


def test_usage_errors_exit_with_2() -> None:
    for args in (
        ["bulid"],
        ["build"],
        ["plan", "x", "--recipee", "y"],
        ["build", "x", "-o", "y", "--kv-cache-dtype", "z"],
    ):
        result = invoke(*args)
        assert result.exit_code == 2, args
        assert "Usage: " in result.stderr


def test_the_version_is_told() -> None:
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("trtforge 0.")


def test_underscores_do_as_well_as_dashes_and_values_are_left_alone(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "my_recipe.toml").write_text('weights = "int8"\n')
    options = [
        "--kv_cache_dtype",
        "int8",
        "--max_seq_len=64",
        "--recipe",
        tmp_path / "my_recipe.toml",
        "--memory=1GB",
    ]
    result = invoke("plan", tiny_checkpoint("llama"), *options, "--json")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert (answer["kv_cache_dtype"], answer["max_seq_len"], answer["recipe"]) == ("int8", 64, "my_recipe")
    assert answer["kv_bytes_per_token"] == 2 * 2 * 2 * (16 + 4)


def test_plan_exits_with_1_when_it_is_impossible(tiny_checkpoint: Callable[[str], Path]) -> None:
    result = invoke("plan", tiny_checkpoint("llama"), "--memory", "100kB")
    assert result.exit_code == 1
    assert "impossible: weights (" in result.stdout


def test_plan_for_another_target_wants_its_gpu(tiny_checkpoint: Callable[[str], Path]) -> None:
    """Else it would plan for the CPU here without a word."""
    model = tiny_checkpoint("llama")
    assert invoke("plan", model, "--target", "tensorrt", "--gpu", "L4", "--max-seq-len", 64).exit_code == 0
    result = invoke("plan", model, "--target", "tensorrt")
    assert (result.exit_code, "--gpu" in result.stderr) == (2, True)
    result = invoke("plan", model, "--target", "abacus", "--gpu", "L4")
    assert (result.exit_code, "'abacus' is unknown" in result.stderr) == (1, True)


def test_plan_for_a_gpu(tiny_checkpoint: Callable[[str], Path]) -> None:
    result = invoke("plan", tiny_checkpoint("gemma3"), "--gpu", "h100", "--json", "--max-seq-len", 64)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["device"]["sm"] == 90


def test_build_says_what_it_made_and_what_comes_next(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    output = tmp_path / "engine"
    result = invoke("build", tiny_checkpoint("llama"), "--output_dir", output, "--max-seq-len", 64)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    made, following = result.stdout.splitlines()
    assert made.startswith(f"{output}: llama for cpu, full_prec, ")
    assert f"trtforge package {output}" in following
    assert (output / "manifest.json").is_file()


def test_build_warns_of_a_chat_template_that_does_not_parse(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    model, output = tmp_path / "model", tmp_path / "engine"
    shutil.copytree(tiny_checkpoint("llama"), model)
    template = "{% for m in messages %}{{ m.content }}"
    (model / "chat_template.jinja").write_text(template)
    code = "import sys; from trtforge.builder.cli import main; main(sys.argv[1:])"
    args = ["build", str(model), "-o", str(output), "--max-seq-len", "64"]
    built = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    assert built.returncode == 0
    (warning,) = built.stderr.splitlines()
    assert warning.startswith("WARNING: the model's chat template does not parse (line 1: Unexpected end of")
    assert (output / "chat_template.jinja").read_text() == template
    refused = invoke("generate", output, "--prompt", "a", "--chat")
    assert refused.exit_code == 1
    assert refused.stderr.splitlines()[-1].endswith(
        "; give its prompt as plain text, without --chat or messages"
    )
    assert "the model's chat template does not parse (line 1: " in refused.stderr
    assert invoke("generate", output, "--prompt", "a", "--max-tokens", 2).exit_code == 0


def test_what_comes_next_can_be_pasted(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    output = tmp_path / "my engine"
    result = invoke("build", tiny_checkpoint("llama"), "-o", output, "--max-seq-len", 64)
    assert f"trtforge generate '{output}' --prompt" in result.stdout.splitlines()[1]


@pytest.mark.parametrize("command", ["inspect", "generate", "build", "plan", "package", "check", "verify"])
def test_a_name_that_is_too_long_is_one_line(command: str) -> None:
    more = {
        "generate": ["--prompt", "x"],
        "build": ["-o", "x"],
        "package": ["-o", "x"],
        "verify": ["--reference", "x"],
    }
    result = invoke(command, "x" * 300, *more.get(command, []))
    assert result.exit_code == 1
    assert re.fullmatch(r"error: x{300}.*File name too long.*\n", result.stderr)


def test_an_empty_path_is_not_this_directory(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_checkpoint("llama"))
    for command in (["inspect"], ["plan"], ["build", "-o", tmp_path / "engine"]):
        result = invoke(*command, "")
        assert (result.exit_code, "path is empty" in result.stderr) == (1, True)


def test_verify_refuses_a_text_that_is_none(tiny_engine: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"\xff\xfe")
    engine = tiny_engine("llama", max_seq_len=64)
    result = invoke("verify", engine, "--reference", "x", "--text", tmp_path / "text")
    assert (result.exit_code, "text: not UTF-8" in result.stderr) == (1, True)
    assert invoke("verify", engine, "--reference", "x", "--tokens", "-5").exit_code == 2


def test_a_path_that_is_nothing(tmp_path: Path) -> None:
    result = invoke("inspect", tmp_path)
    assert result.exit_code == 1
    assert result.stderr == f"error: {tmp_path}: an empty directory\n"
    assert invoke("inspect", tmp_path / "absent").exit_code == 1


def test_inspect_a_checkpoint(tiny_checkpoint: Callable[[str], Path]) -> None:
    directory = tiny_checkpoint("llama-tied")
    answer = json.loads(invoke("inspect", directory, "--json").stdout)
    assert (answer["kind"], answer["format"], answer["family"]) == ("checkpoint", "safetensors", "llama")
    assert answer["parameters"] == sum(int.__mul__(*[*t["shape"], 1][:2]) for t in answer["tensors"])
    assert answer["dtypes"] == {"F32": len(answer["tensors"])}
    assert "LlamaForCausalLM" in invoke("inspect", directory).stdout


def test_inspect_an_architecture_that_is_not_done(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    for file in tiny_checkpoint("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalML"]}))
    answer = json.loads(invoke("inspect", tmp_path, "--json").stdout)
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": 5}))
    assert json.loads(invoke("inspect", tmp_path, "--json").stdout)["architecture"] == "unknown"
    assert answer["family"] is None
    assert "LlamaForCausalLM" in answer["unsupported"]


def test_inspect_an_engine(tiny_engine: Callable[..., Path]) -> None:
    engine = tiny_engine("mistral-window", kv_cache_dtype="fp8", max_seq_len=64)
    answer = json.loads(invoke("inspect", engine, "--json").stdout)
    assert (answer["kind"], answer["target"], answer["kv_cache_dtype"]) == ("engine", "cpu", "fp8")
    assert answer["kv_groups"] == [{"layers": 2, "window": 8}]
    assert answer["bytes"] == sum(f.stat().st_size for f in engine.iterdir() if f.name != "manifest.json")
    assert "fp8" in invoke("inspect", engine).stdout


def test_inspect_a_repository(tiny_engine: Callable[..., Path], tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    result = invoke("package", tiny_engine("llama", max_seq_len=64), "-o", repository)
    assert result.exit_code == 0, result.stderr
    answer = json.loads(invoke("inspect", repository, "--json").stdout)
    assert answer["kind"] == "repository"
    models = {m["name"]: m for m in answer["models"]}
    assert set(models) >= {"tensorrt_llm", "ensemble", "tensorrt_llm_bls"}
    assert sum(len(m["engines"]) for m in models.values()) == 1
    assert all(m["versions"] == [1] for m in models.values())
    assert "tensorrt_llm" in invoke("inspect", repository).stdout
