"""The command line answers at once: help imports nothing heavy, and each command's line is true."""

import subprocess
import sys

import click
import pytest

from trtforge.builder import cli

HEAVY = {
    "gguf", "google", "grpc", "huggingface_hub", "jinja2", "ml_dtypes", "numpy", "onnx", "onnx_ir", "onnxscript",
    "onnxruntime", "openvino", "safetensors", "tokenizers", "torch", "transformers", "tritonclient",
}  # fmt: skip


def run_and_list_modules(code: str) -> tuple[str, set[str]]:
    """What `code` prints in a fresh interpreter, and the names of all modules that are loaded after it."""
    program = f"{code}\nimport sys\nprint('\\n' + ' '.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    output, _, modules = run.stdout.rstrip().rpartition("\n")
    return output, set(modules.split())


def heavy(modules: set[str]) -> set[str]:
    return {name.split(".")[0] for name in modules} & HEAVY


def help_of(*args: str) -> tuple[str, set[str]]:
    call = f"main({[*args, '--help']!r}, prog_name='trtforge', standalone_mode=False)"
    return run_and_list_modules(f"from trtforge.builder.cli import main\n{call}")


def test_the_probe_sees_imports() -> None:
    assert heavy(run_and_list_modules("import numpy")[1]) == {"numpy"}


def test_help_of_the_root_lists_all_commands_and_imports_none() -> None:
    output, modules = help_of()
    for command, (_, line) in cli.COMMANDS.items():
        assert f"  {command} " in output
        assert line in output
    assert not heavy(modules)
    others = {module for module, _ in cli.COMMANDS.values()} - {"trtforge.builder.cli"}
    assert not others & modules


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_of_a_command_imports_nothing_heavy(command: str) -> None:
    output, modules = help_of(command)
    assert output.startswith(f"Usage: trtforge {command} ")
    assert not heavy(modules)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_the_line_in_the_table_is_the_commands_own(command: str) -> None:
    loaded = cli.main.get_command(click.Context(cli.main), command)
    assert loaded is not None
    assert loaded.help is not None
    assert loaded.help.strip().splitlines()[0] == cli.COMMANDS[command][1]
