"""The commands that run an engine without a server."""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trtforge.plugins.errors import EnvironmentProblem, ForgeError, InvalidArgument
from trtforge.runtime.cli_options import engine_config, engine_options, sampling_options, sampling_params

if TYPE_CHECKING:
    from trtforge.runtime.jsonl import Line
    from trtforge.runtime.llm import LLM
    from trtforge.runtime.request import SamplingParams
    from trtforge.runtime.stream import Stream


@sampling_options
@engine_options
@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--prompt", metavar="TEXT", help="One prompt; its text is shown as it grows.")
@click.option("--chat", is_flag=True, help="Give --prompt as a user's turn in the model's own chat template.")
@click.option(
    "--prompts", metavar="FILE.jsonl", help="One request a line, all in one in-flight batch; - is stdin."
)
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON line for each request, in the order they came."
)
@click.option(
    "--stats", type=click.Path(path_type=Path), metavar="FILE", help="Write the run's counters, as JSON."
)
def generate(
    engine: Path,
    prompt: str | None,
    chat: bool,
    prompts: str | None,
    as_json: bool,
    stats: Path | None,
    **options: Any,
) -> None:
    """Generate text with an engine.

    A line of --prompts is a JSON object: "prompt", "token_ids" or "messages", and any of "id", "max_tokens",
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos" and the other sampling parameters;
    the options are the defaults of what it leaves out.
    """
    if (prompt is None) == (prompts is None):
        raise click.UsageError("give either --prompt or --prompts")
    if chat and prompt is None:
        raise click.UsageError('--chat goes with --prompt; lines of --prompts have "messages"')
    options = _with_bytes(options)
    config = engine_config(options, max_queue_requests=None)
    defaults = sampling_params(options)
    _check(defaults, alone=prompt is not None)
    if stats is not None:
        _check_writable(stats)
    text = None if prompts is None else _read(prompts)

    from trtforge.runtime.jsonl import Line, output_line, read_lines
    from trtforge.runtime.llm import LLM
    from trtforge.runtime.request import GenerationRequest

    with LLM(engine, config) as llm:
        click.echo(llm.engine.describe_pool(), err=True)
        if text is not None:
            lines = list(read_lines(text, prompts or "", defaults, llm.engine.tokenizer))
        else:
            turn = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
            lines = [Line("--prompt", 1, GenerationRequest("--prompt", params=defaults, **turn))]
        streams = [_submit(llm, line) for line in lines]
        if prompt is not None and not as_json:
            for output in streams[0]:
                click.echo(output.text, nl=False)
                sys.stdout.flush()
            click.echo()
        else:
            for line, stream in _progress(zip(lines, streams, strict=True), len(lines)):
                output = _result(line, stream)
                click.echo(output_line(line.id, output) if as_json else f"== {line.id}\n{output.text}")
        metrics = llm.engine.metrics()
    if stats is not None:
        import json

        _write(stats, json.dumps(metrics.stats()) + "\n")


@engine_options
@click.command()
@click.argument("engine", type=click.Path(path_type=Path), required=False)
@click.option("--url", help="A server in place of an engine: grpc://host:port or http://host:port.")
@click.option("--concurrency", type=click.IntRange(1), default=1, show_default=True, help="Requests at once.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--output-tokens", type=click.IntRange(2), default=64, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON line.")
def bench(
    engine: Path | None,
    url: str | None,
    concurrency: int,
    prompt_tokens: int,
    output_tokens: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure an engine or a server.

    Greedy, all requests at once, after one warm-up. For an engine, the share of the memory bandwidth compares
    the bytes that a decoded token must move with what this machine reads per second, measured just before.
    """
    if (engine is None) == (url is None):
        raise click.UsageError("give either ENGINE or --url")
    config = engine_config(_with_bytes(options), max_queue_requests=None)

    from trtforge.runtime.bench import Speeds, measure, measure_server

    report: Speeds
    if engine is not None:
        report = measure(engine, config, concurrency, prompt_tokens, output_tokens)
    else:
        report = measure_server(_server(url or ""), concurrency, prompt_tokens, output_tokens)
    if as_json:
        import json

        click.echo(json.dumps(report.to_dict()))
    else:
        click.echo(report.table())


def _server(url: str) -> Callable[[str, int], Iterator[str]]:
    from trtforge.model_repo.client import Prompt, send

    # An end token that there is not: every answer has all the tokens that were asked for.
    return lambda text, max_tokens: send(url, Prompt(text, max_tokens, options={"end_id": -1}))


def _with_bytes(options: dict[str, Any]) -> dict[str, Any]:
    """The options with --kv-memory as a number."""
    from trtforge.builder.units import parse_bytes

    text = options["kv_memory"]
    return {**options, "kv_memory": None if text is None else parse_bytes(text)}


def _submit(llm: "LLM", line: "Line") -> "Stream":
    try:
        return llm.submit(line.request)
    except ForgeError as e:
        raise type(e)(f"{line.where}: {e}") from e


def _result(line: "Line", stream: "Stream") -> Any:
    try:
        return stream.result()
    except ForgeError as e:
        raise type(e)(f"{line.where}: {e}") from e


def _read(prompts: str) -> str:
    try:
        data = sys.stdin.buffer.read() if prompts == "-" else Path(prompts).read_bytes()
        return data.decode("utf-8-sig")  # without the mark that Windows puts in front
    except (OSError, UnicodeDecodeError) as e:
        raise InvalidArgument(f"{prompts}: cannot be read: {e}") from e


def _check(defaults: "SamplingParams", alone: bool) -> None:
    """What options say, before the engine is loaded; none of them names tokens. Not alone, the lines of a file may
    allow as many tokens as --min-tokens wants.
    """
    (defaults if alone else replace(defaults, min_tokens=0)).check(vocab_size=0)


def _check_writable(path: Path) -> None:
    """Raises EnvironmentProblem now and not after the run. What is there stays as it is; a pipe is left alone, since
    its reader would take this for the end.
    """
    existed = path.exists()
    if existed and not path.is_file() and not path.is_dir():
        return
    try:
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as e:
        raise EnvironmentProblem(f"{path}: cannot be written: {e}") from e


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as e:
        raise EnvironmentProblem(f"{path}: cannot be written: {e}") from e


def _progress(items: Iterable[tuple["Line", "Stream"]], total: int) -> Iterator[tuple["Line", "Stream"]]:
    """A bar on stderr, where people look at it and nothing else is shown."""
    if not sys.stderr.isatty() or sys.stdout.isatty():
        yield from items
        return
    with click.progressbar(items, length=total, label="generating", file=sys.stderr) as bar:
        yield from bar
