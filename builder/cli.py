"""The command line: the root `trtforge` and the commands that concern building.

Composition root: it may import any part, inside functions only, so that `trtforge --help` answers at once.
This is the one place where a ForgeError becomes a line and an exit code.
"""

import importlib
import select
import signal
import sys
from pathlib import Path
from typing import Any

import click

from trtforge.builder.spec import BuildConfig
from trtforge.plugins.errors import ForgeError
from trtforge.plugins.kv_dtypes import KV_DTYPES

#: Command -> module that has it under that name, and its line in `trtforge --help`: the list that needs no import.
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

    def invoke(self, ctx: click.Context) -> Any:
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
            sys.stdout = None  # type: ignore[assignment]  # nobody reads it: no second error when Python flushes it
            ctx.exit(128 + signal.SIGPIPE)
        except Exception as e:
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
        ["--debug"], is_flag=True, expose_value=False, callback=remember, is_eager=True, help="Show tracebacks."
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
