"""The command line: the root `trtforge` and the commands that concern building.

Composition root: it may import any part, inside functions only, so that `trtforge --help` answers at once.
This is the one place where a ForgeError becomes a line and an exit code.
"""

import errno
import importlib
import json
import logging
import os
import select
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtforge.builder.spec import BuildConfig
from trtforge.plugins.errors import ForgeError, InvalidArgument
from trtforge.plugins.kv_dtypes import AUTO_KV_DTYPE, KV_DTYPES
from trtforge.runtime.manifest import Limits

if TYPE_CHECKING:
    from trtforge.builder.devices import Device

#: Command -> module that has it under that name, and its line in `trtforge --help`, which so needs no import.
#: A test holds each line equal to the first line of the command's own help.
COMMANDS: dict[str, tuple[str, str]] = {
    "plan": ("trtforge.builder.cli", "Say what a model will need before anything is built."),
    "build": ("trtforge.builder.cli", "Build an engine directory from a checkpoint."),
    "verify": ("trtforge.builder.cli", "Compare an engine with its checkpoint run by a plain reference."),
    "inspect": ("trtforge.builder.cli", "Say what a path is: checkpoint, engine or Triton repository."),
    "generate": ("trtforge.runtime.cli", "Generate text with an engine."),
    "bench": ("trtforge.runtime.cli", "Measure an engine or a server."),
    "package": ("trtforge.model_repo.cli", "Write a Triton model repository around an engine."),
    "check": ("trtforge.model_repo.cli", "Name what is wrong with a Triton model repository."),
    "serve": ("trtforge.model_repo.cli", "Start a Triton Inference Server on a repository."),
    "client": ("trtforge.model_repo.cli", "Send a prompt to a running server."),
    "doctor": ("trtforge.model_repo.cli", "Say what this machine lacks for building and serving."),
}

DEBUG = "trtforge.debug"  # key in click's context meta


class Root(click.Group):
    """Loads a command when it is called, and turns what it raises into a line on stderr and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name)
        assert isinstance(command, click.Command), cmd_name
        if all(p.name != "debug" for p in command.params):
            command.params.append(debug_option())  # so that it may be added at the end of a failed command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except OSError as e:  # --help and --version are written before a command is invoked
            click.echo(f"error: output: {e.strerror}", err=True)
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:  # closed by whoever started us
                setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115  (for as long as we live)
        logging.basicConfig(format="%(levelname)s: %(message)s")
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except (click.ClickException, click.exceptions.Exit):
            raise
        except ForgeError as e:
            fail(ctx, f"error: {one_line(e)}", e.exit_code)
        except (KeyboardInterrupt, click.Abort):
            ctx.exit(128 + signal.SIGINT)
        except BrokenPipeError:
            if not stdout_closed():
                fail(ctx, "error: the connection was closed by the other side; is the server still up?", 1)
            sys.stdout = None  # nobody reads it, and Python shall not complain when it flushes it
            ctx.exit(128 + signal.SIGPIPE)
        except Exception as e:
            if isinstance(e, OSError) and (e.filename is not None or e.errno == errno.ENOSPC):
                fail(ctx, f"error: {e.filename or 'output'}: {e.strerror}", 1)
            fail(ctx, f"internal error: {type(e).__name__}: {one_line(e)}; run again with --debug", 1)
        return result


def fail(ctx: click.Context, message: str, exit_code: int) -> None:
    if ctx.meta.get(DEBUG):
        import traceback

        traceback.print_exc()
    click.echo(message, err=True)
    ctx.exit(exit_code)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def stdout_closed() -> bool:
    """Whether the reader of our standard output is gone (`trtforge ... | head`)."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError):  # not a real file, as under a test runner
        return False


def debug_option() -> click.Option:
    def remember(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            ctx.meta[DEBUG] = True

    return click.Option(
        ["--debug"],
        is_flag=True,
        expose_value=False,
        callback=remember,
        is_eager=True,
        help="Show tracebacks.",
    )


# Options with dashes or underscores: the context hands this down to every command, and values are left alone.
@click.group(
    cls=Root,
    params=[debug_option()],
    context_settings={
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
    },
)
@click.version_option(package_name="trtforge", message="trtforge %(version)s")
def main() -> None:
    """From an LLM checkpoint to an inference engine to a Triton Inference Server model repository."""


# What a build may be asked, as options of `build` and `plan`; the defaults are the dataclasses'.
_DEFAULT = BuildConfig()
BUILD_OPTIONS = (
    click.option("--target", default=_DEFAULT.target, show_default=True, help="What will run the engine."),
    click.option(
        "--recipe",
        default=_DEFAULT.recipe,
        show_default=True,
        help="Quantization: name or .toml file; auto: as_is for a GGUF file, full_prec for others.",
    ),
    click.option(
        "--activations",
        default=_DEFAULT.activations,
        show_default=True,
        help="What is multiplied with quantized weights: int8 (in groups of 32) or fp32; auto: int8 for as_is.",
    ),
    click.option(
        "--kv-cache-dtype",
        type=click.Choice(["auto", *KV_DTYPES]),
        default=_DEFAULT.kv_cache_dtype,
        show_default=True,
        help="How K and V lie in the cache; auto is " + AUTO_KV_DTYPE + ".",
    ),
    click.option(
        "--max-batch-size",
        type=int,
        default=_DEFAULT.limits.max_batch_size,
        show_default=True,
        help="Requests in one step.",
    ),
    click.option(
        "--max-num-tokens",
        type=int,
        default=_DEFAULT.limits.max_num_tokens,
        show_default=True,
        help="Tokens in one step, all requests together.",
    ),
    click.option(
        "--max-seq-len",
        type=int,
        default=_DEFAULT.limits.max_seq_len,
        show_default=True,
        help="Tokens of one request, prompt and output; 0: the model's own maximum.",
    ),
    click.option(
        "--tokens-per-block",
        type=int,
        default=_DEFAULT.tokens_per_block,
        show_default=True,
        help="Tokens in a block of the cache.",
    ),
)
JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def build_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(BUILD_OPTIONS):
        command = option(command)
    return command


def build_config(max_batch_size: int, max_num_tokens: int, max_seq_len: int, **options: Any) -> BuildConfig:
    return BuildConfig(limits=Limits(max_batch_size, max_num_tokens, max_seq_len), **options)


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """Gives a function (what, done, total) that keeps a line on the terminal, or None where there is none."""
    if not sys.stderr.isatty():
        yield None
        return

    def report(what: str, done: int, total: int) -> None:
        share = f"{100 * done // total:3}%" if total else ""
        click.echo(f"\r\033[K{what} {share}", err=True, nl=False)

    try:
        yield report
    finally:
        click.echo("\r\033[K", err=True, nl=False)


@click.command()
@click.argument("model")
@click.option("-o", "--output", "--output-dir", "output", required=True, type=click.Path(path_type=Path))
@build_options
def build(model: str, output: Path, **options: Any) -> None:
    """Build an engine directory from a checkpoint.

    MODEL is a Hugging Face directory, a .gguf file or a hub id.
    """
    from trtforge.builder.build import build as build_engine
    from trtforge.builder.units import format_bytes

    with progress() as report:
        manifest = build_engine(model, output, build_config(**options), report)
    warn_of_chat_template(output)
    size = sum(entry.bytes for entry in manifest.files.values())
    click.echo(
        f"{output}: {manifest.model['name']} for {manifest.target}, {manifest.recipe}, {format_bytes(size)}; "
        f"activations {manifest.activations}; "
        f"KV cache {manifest.kv.dtype}, {manifest.kv.bytes_per_token} bytes per token"
    )
    quoted = shlex.quote(str(output))
    click.echo(f"next: trtforge generate {quoted} --prompt TEXT, or trtforge package {quoted} -o REPO")


def warn_of_chat_template(engine: Path) -> None:
    """Of one that no request can use. The builder takes it as it is; the runtime knows what it must be."""
    from trtforge.runtime.chat_template import ChatTemplate
    from trtforge.runtime.tokenizer import CHAT_TEMPLATE

    file = engine / CHAT_TEMPLATE
    if file.is_file():
        try:
            ChatTemplate(file.read_text(encoding="utf-8"), {})
        except InvalidArgument as e:
            logging.getLogger(__name__).warning("%s", one_line(e))


@click.command()
@click.argument("model")
@build_options
@click.option("--gpu", help="Plan for this GPU; without it, for this machine's CPU.")
@click.option("--memory", help="For weights and cache, like 8GiB; by default what the device has.")
@JSON_OPTION
def plan(model: str, gpu: str | None, memory: str | None, as_json: bool, **options: Any) -> None:
    """Say what a model will need before anything is built.

    Reads the config and the tensors' headers of MODEL, no weights. Exits with 1 if it is impossible.
    """
    from dataclasses import replace

    from trtforge.builder import devices, targets
    from trtforge.builder import plan as planning
    from trtforge.builder.build import check_config, settle
    from trtforge.builder.checkpoint import open_checkpoint
    from trtforge.builder.units import parse_bytes

    config = build_config(**options)
    check_config(config)
    if targets.canonical(config.target) != "cpu" and not gpu:
        raise click.UsageError(f"--target {config.target} runs on a GPU: name it with --gpu")
    checkpoint = open_checkpoint(model)
    try:
        translation, config = settle(checkpoint, config)
    finally:
        checkpoint.close()
    device = devices.gpu(gpu) if gpu else this_machine()
    if memory:
        device = replace(device, memory=parse_bytes(memory))
    answer = planning.plan(translation.spec, config, device, translation.formats)
    click.echo(json.dumps(answer.to_json()) if as_json else planning.as_text(answer))
    if answer.impossible:
        click.get_current_context().exit(1)


def this_machine() -> "Device":
    """The CPU here: the memory that is free now, and the bandwidth as it is measured now."""
    from trtforge.builder.devices import Device
    from trtforge.runtime.bench import read_bandwidth
    from trtforge.runtime.config import available_memory

    return Device("this machine's CPU", available_memory(), read_bandwidth())


@click.command()
@click.argument("path")
@JSON_OPTION
def inspect(path: str, as_json: bool) -> None:
    """Say what a path is: checkpoint, engine or Triton repository."""
    from trtforge.builder.describe import as_text, describe

    description = describe(path)
    click.echo(json.dumps(description) if as_json else as_text(description))


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option(
    "--reference", required=True, help="The checkpoint that the engine was built from, or a better one."
)
@click.option(
    "--text", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="A text of your own."
)
@click.option(
    "--tokens", type=click.IntRange(2), default=1024, show_default=True, help="Compare at most so many."
)
@JSON_OPTION
def verify(engine: Path, reference: str, text: Path | None, tokens: int, as_json: bool) -> None:
    """Compare an engine with its checkpoint run by a plain reference.

    Perplexity, KL divergence and agreement, over a text. Exits with 1 past the limits of the engine's recipe.
    """
    from dataclasses import asdict

    from tokenizers import Tokenizer

    from trtforge.builder import verify as verifying
    from trtforge.builder.checkpoint import open_checkpoint
    from trtforge.runtime.score import Scorer

    scorer = Scorer(engine)
    try:
        words = (text or verifying.DEFAULT_TEXT).read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise InvalidArgument(f"{text}: not UTF-8 text: {e}") from e
    token_ids = Tokenizer.from_file(str(engine / "tokenizer.json")).encode(words).ids[:tokens]
    checkpoint = open_checkpoint(reference)
    try:
        with progress() as report:
            result = verifying.verify(scorer, checkpoint, token_ids, report or (lambda *_: None))
    finally:
        checkpoint.close()
        scorer.close()
    faults = result.faults(verifying.limits(scorer.manifest))
    if as_json:
        click.echo(json.dumps({**asdict(result), "faults": faults}))
    else:
        for key, value in asdict(result).items():
            click.echo(f"{key + ':':24}{value:.6g}" if isinstance(value, float) else f"{key + ':':24}{value}")
        click.echo("past the limits: " + "; ".join(faults) if faults else "within the limits of its recipe")
    if faults:
        click.get_current_context().exit(1)
