"""The commands that make a Triton repository, check it, serve it and talk to it."""

import sys
from pathlib import Path

import click

from trtforge.model_repo.environment import DEFAULT_PORTS


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Repository to write.")
@click.option(
    "--decoupled-mode",
    type=bool,
    default=True,
    show_default=True,
    metavar="true|false",
    help="false: one response a request, for clients that call infer(); true: streams as well.",
)
@click.option("--name", default="", metavar="PREFIX", help="Goes before each model's name: several engines.")
@click.option(
    "--parameter",
    "parameters",
    multiple=True,
    metavar="KEY=VALUE",
    help="A parameter of the engine model's config.pbtxt; may be repeated.",
)
def package(engine: Path, output: Path, decoupled_mode: bool, name: str, parameters: tuple[str, ...]) -> None:
    """Write a Triton model repository around an engine."""
    from trtforge.model_repo.package import package as write

    given = {}
    for parameter in parameters:
        key, equals, value = parameter.partition("=")
        if not equals:
            raise click.BadParameter(f"{parameter!r} is not KEY=VALUE", param_hint="--parameter")
        given[key] = value
    names = write(engine, output, prefix=name, decoupled=decoupled_mode, parameters=given)
    click.echo(f"{output}: {', '.join(names)}")


@click.command()
@click.argument("repository", type=click.Path(path_type=Path))
@click.option("--checksums", is_flag=True, help="Read the engines whole.")
def check(repository: Path, checksums: bool) -> None:
    """Name what is wrong with a Triton model repository.

    One line for each fault, with its file and key; exit status 1 if there is any.
    """
    from trtforge.model_repo.check import check as find_faults

    faults = find_faults(repository, checksums=checksums)
    for fault in faults:
        click.echo(str(fault))
    if faults:
        sys.exit(1)
    click.echo(f"{repository}: no faults")


def port_options(function: "click.decorators.FC") -> "click.decorators.FC":
    for name, default in reversed(DEFAULT_PORTS.items()):
        option = click.option(
            f"--{name}-port",
            type=click.IntRange(0, 65535),
            default=default,
            show_default=True,
            help="0 takes a free one.",
        )
        function = option(function)
    return click.option(
        "--address", default="127.0.0.1", show_default=True, help="Where to listen; 0.0.0.0 is everywhere."
    )(function)


@click.command()
@click.argument("repository", type=click.Path(path_type=Path))
@port_options
@click.option("--timeout", type=float, default=600, show_default=True, help="Seconds until it must be ready.")
@click.option("--log", type=click.Path(path_type=Path), help="Write Triton's log to this file.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def serve(
    repository: Path,
    address: str,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    timeout: float,
    log: Path | None,
    arguments: tuple[str, ...],
) -> None:
    """Start a Triton Inference Server on a repository.

    Runs until it is told to stop (Ctrl-C, SIGTERM), and ends with an error when the server or one of its
    models dies, so that a supervisor can start it again. ARGUMENTS after `--` go to tritonserver as they are.
    """
    from trtforge.model_repo.serve import TritonServer, run

    server = TritonServer(
        repository,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        address=address,
        ready_timeout=timeout,
        arguments=arguments,
        log_file=log,
        on_error=lambda line: click.echo(f"triton: {line}", err=True),
    )
    run(server, click.echo)


@click.command()
@click.option("--url", default="grpc://127.0.0.1:8001", show_default=True, help="grpc://... or http://...")
@click.option(
    "--model", default="ensemble", show_default=True, help="The text model's name in the repository."
)
@click.option("--prompt", help="The text; standard input if it is not given.")
@click.option("--chat", is_flag=True, help="The prompt is a user's turn: apply the model's chat template.")
@click.option("--stream/--no-stream", default=True, show_default=True, help="Print the text as it arrives.")
@click.option("--max-tokens", type=int, default=128, show_default=True)
@click.option("--temperature", type=float, help="Greedy if neither this, top-k nor top-p is given.")
@click.option("--top-k", type=int)
@click.option("--top-p", type=float)
@click.option("--seed", type=int)
@click.option("--stop", multiple=True, help="A text that ends the answer; may be repeated.")
def client(
    url: str,
    model: str,
    prompt: str | None,
    chat: bool,
    stream: bool,
    max_tokens: int,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    stop: tuple[str, ...],
) -> None:
    """Send a prompt to a running server."""
    from trtforge.model_repo.client import Prompt, send

    if temperature is not None and top_k is None and top_p is None:
        top_p = 1.0  # the tensors' old meaning: greedy at any temperature without a top_k or top_p
    sampling = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "stop_words": stop or None,
    }
    options = {name: value for name, value in sampling.items() if value is not None}
    text = sys.stdin.read() if prompt is None else prompt
    for piece in send(url, Prompt(text, max_tokens, chat, stream, options), model):
        click.echo(piece, nl=False)
        sys.stdout.flush()
    click.echo()


@click.command()
@port_options
def doctor(address: str, http_port: int, grpc_port: int, metrics_port: int) -> None:
    """Say what this machine lacks for building and serving.

    Exit status 1 if something is missing that an engine for the CPU needs to be built, served and asked.
    """
    from trtforge.model_repo.doctor import examine
    from trtforge.model_repo.environment import Surroundings

    ports = {"http": http_port, "grpc": grpc_port, "metrics": metrics_port}
    if not examine(Surroundings(address, ports), click.echo):
        sys.exit(1)
