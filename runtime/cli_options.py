"""Options that the commands which run an engine share. Their defaults are EngineConfig's and
SamplingParams'.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import click

from trtforge.runtime.config import POLICIES, EngineConfig
from trtforge.runtime.request import SamplingParams

F = TypeVar("F", bound=Callable[..., Any])

_ENGINE_OPTIONS = (
    click.Option(["--kv-memory"], metavar="BYTES", help="KV pool size, e.g. 512MiB or a plain number."),
    click.Option(["--kv-cache-tokens"], type=int, metavar="N", help="KV pool size as the tokens it holds."),
    click.Option(["--users"], type=int, metavar="U", help="KV pool for U requests of --context tokens each."),
    click.Option(["--context"], type=int, metavar="L", help="Tokens of one request, prompt and output."),
    click.Option(["--max-batch-size"], type=int, help="Requests in one step; at most the engine's."),
    click.Option(["--max-num-tokens"], type=int, help="Tokens in one step; at most the engine's."),
    click.Option(["--max-seq-len"], type=int, help="Tokens of one request; at most the engine's."),
    click.Option(
        ["--policy"],
        type=click.Choice(POLICIES),
        default=POLICIES[0],
        show_default=True,
        help="Admit by what a request needs now, or by all it may need.",
    ),
    click.Option(["--threads"], type=int, help="CPU threads; all that this process may use if not given."),
)

_SAMPLING_OPTIONS = (
    click.Option(["--max-tokens"], type=int, default=SamplingParams.max_tokens, show_default=True),
    click.Option(["--min-tokens"], type=int, default=0),
    click.Option(["--temperature"], type=float, default=0.0, show_default=True, help="0 is greedy."),
    click.Option(["--top-k"], type=int, default=0),
    click.Option(["--top-p"], type=float, default=1.0),
    click.Option(["--min-p"], type=float, default=0.0),
    click.Option(["--repetition-penalty"], type=float, default=1.0),
    click.Option(["--presence-penalty"], type=float, default=0.0),
    click.Option(["--frequency-penalty"], type=float, default=0.0),
    click.Option(["--seed"], type=int, help="Random if not given."),
    click.Option(["--stop"], multiple=True, metavar="TEXT", help="Ends the text before it; may be repeated."),
    click.Option(["--ignore-eos"], is_flag=True, help="The model's own end tokens do not end the text."),
)


def engine_options(command: click.Command) -> click.Command:
    """Decorator: the command gets an option for each field of EngineConfig that people set."""
    command.params.extend(_ENGINE_OPTIONS)
    return command


def sampling_options(command: click.Command) -> click.Command:
    """Decorator: the command gets an option for each field of SamplingParams that people set."""
    command.params.extend(_SAMPLING_OPTIONS)
    return command


def engine_config(options: dict[str, Any], **fixed: Any) -> EngineConfig:
    """Take EngineConfig's fields out of a command's options."""
    return EngineConfig(
        **{f.name: options.pop(f.name) for f in fields(EngineConfig) if f.name in options}, **fixed
    )


def sampling_params(options: dict[str, Any]) -> SamplingParams:
    """Take SamplingParams' fields out of a command's options."""
    return SamplingParams(
        **{f.name: options.pop(f.name) for f in fields(SamplingParams) if f.name in options}
    )
