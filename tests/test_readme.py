"""Everything that the README shows is run, in its order, in a copy of the tree; its outputs are the real ones."""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tree

README = (tree.ROOT / "README.md").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Block:
    language: str
    text: str


BLOCKS = [Block(*found) for found in re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.M | re.S)]


def commands(block: Block) -> Iterator[tuple[str, list[str]]]:
    """The commands of a console block, each with the lines that it should print; make shows commands itself."""
    lines = block.text.splitlines()
    while lines:
        command = lines.pop(0).removeprefix("$ ")
        shown = []
        while lines and (command.startswith("make") or not lines[0].startswith("$ ")):
            shown.append(lines.pop(0))
        yield command, shown


def pattern(line: str) -> str:
    """Matches a line with other numbers, other spacing and, of the demo, other words of the model."""
    line = re.sub(r"^(\[\d\] +[\d.]+s).*", r"\1", line)
    exact = re.escape(re.sub(r"\s+", " ", line.strip()))
    return re.sub(r"\d+(\\\.\d+)?", r"\\d+(\\.\\d+)?", exact).replace(r"\ ", r"\s+")


def check_output(command: str, shown: list[str], output: str) -> None:
    """Each line shown is one of the output's; `...` stands for lines left out."""
    printed = [line.strip() for line in output.splitlines()]
    for line in filter(None, (line.strip() for line in shown)):
        if line != "...":
            assert any(re.match(pattern(line), other) for other in printed), (
                f"{command}\n{line}\nnot in\n{output}"
            )


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Shell:
    """Runs the README's commands in a copy of the tree with this environment as its .venv."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.ports = free_ports(3)
        self.server: subprocess.Popen[str] | None = None
        self.env = {**os.environ, "PATH": f"{place}/.venv/bin:{os.environ['PATH']}", "PYTHONSAFEPATH": "1"}

    def command(self, command: str, shown: list[str]) -> None:
        for default, port in zip((8000, 8001, 8002), self.ports, strict=True):
            command = command.replace(f"localhost:{default}", f"localhost:{port}")
        if command.startswith("make"):
            # The environment is there; were it not, make would be a test of the package index.
            command = (
                "make " + "".join(f"-o .venv/{stamp} " for stamp in STAMPS) + command.removeprefix("make")
            )
        if command.startswith("trtforge client"):
            command += f" --url grpc://localhost:{self.ports[1]}"
        if command.startswith("trtforge serve"):
            http, grpc, metrics = self.ports
            options = f" --http-port {http} --grpc-port {grpc} --metrics-port {metrics}"
            return self.serve(command.removesuffix("&") + options, shown)
        run = subprocess.run(
            ["bash", "-c", command], cwd=self.place, env=self.env, capture_output=True, text=True, timeout=600
        )
        assert run.returncode == 0, f"{command}\n{run.stdout}\n{run.stderr}"
        return check_output(command, shown, run.stdout)

    def serve(self, command: str, shown: list[str]) -> None:
        self.server = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=self.place, env=self.env, stdout=subprocess.PIPE, text=True
        )
        assert self.server.stdout is not None
        check_output(command, shown, self.server.stdout.readline())

    def python(self, program: str) -> None:
        for default, port in zip((8000, 8001, 8002), self.ports, strict=True):
            program = program.replace(f"localhost:{default}", f"localhost:{port}")
        run = subprocess.run(
            [sys.executable, "-c", program],
            cwd=self.place,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert run.returncode == 0, run.stderr
        assert run.stdout.strip()

    def close(self) -> None:
        if self.server is not None:
            self.server.terminate()
            with self.server:
                assert self.server.wait(60) == 0


STAMPS = ("bin/pip", "serve.stamp", "dev.stamp")


@pytest.fixture
def shell(tmp_path: Path, real_gguf: Path) -> Iterator[Shell]:
    for file in tree.files():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tree.ROOT / file, tmp_path / file)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / ".cache").symlink_to(real_gguf.parent)
    shell = Shell(tmp_path)
    yield shell
    shell.close()


@pytest.mark.slow
def test_everything_that_the_readme_shows(shell: Shell) -> None:
    ran = 0
    for block in BLOCKS:
        if block.language == "python":
            shell.python(block.text)
            ran += 1
        elif block.language == "console":
            for command, shown in commands(block):
                if command != "make test":  # that is what runs this
                    shell.command(command, shown)
                    ran += 1
    assert ran > 10


def test_no_block_is_of_a_kind_that_nothing_runs() -> None:
    assert {block.language for block in BLOCKS} == {"sh", "console", "python", "text"}


def test_the_packages_to_install_are_those_of_ci() -> None:
    [line] = (block.text for block in BLOCKS if block.language == "sh")
    packages = re.search(r"^packages=\((.*)\)$", (tree.ROOT / ".ci" / "run").read_text(), flags=re.M)
    assert packages is not None
    assert line.split("apt-get install ")[1].split() == packages[1].split()


def test_make_test_runs_the_tests() -> None:
    run = subprocess.run(
        ["make", *(f"-o.venv/{stamp}" for stamp in STAMPS), "--dry-run", "--no-print-directory", "test"],
        cwd=tree.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == [".venv/bin/pytest"]


def test_make_request_wants_a_prompt() -> None:
    command = [
        "make",
        *(f"-o.venv/{stamp}" for stamp in STAMPS),
        "--dry-run",
        "--no-print-directory",
        "request",
    ]
    run = subprocess.run(command, cwd=tree.ROOT, capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.endswith("PROMPT='...' is missing.  Stop.\n")
    prompt = 'It\'s $5, $(or) "$$6"'
    command = [
        "make",
        "--no-print-directory",
        "--eval",
        'echo: ; @echo "$$PROMPT"',
        "echo",
        f"PROMPT={prompt}",
    ]
    run = subprocess.run(command, cwd=tree.ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == prompt + "\n", "make expands nothing in it"


def test_the_map_shows_every_folder() -> None:
    [text] = (block.text for block in BLOCKS if block.language == "text")
    shown, top = set(), ""
    for line in text.splitlines():
        name = line.split()[0].rstrip("/")
        top = top if line.startswith(" ") else name
        shown.add(name if name == top else f"{top}/{name}")
    assert all((tree.ROOT / folder).is_dir() for folder in shown)
    packages = {str(module.parent) for module in tree.modules() if module.name == "__init__.py"}
    folders = {
        file.parts[0] for file in tree.files() if len(file.parts) > 1 and not file.parts[0].startswith(".")
    }
    assert shown == packages | folders


def test_every_page_is_linked_and_every_link_leads_somewhere() -> None:
    pages = [file for file in tree.files() if file.suffix == ".md"]
    linked = set()
    for page in pages:
        for target in re.findall(
            r"\]\(([^)#:]+)(?:#[^)]*)?\)", (tree.ROOT / page).read_text(encoding="utf-8")
        ):
            path = (tree.ROOT / page.parent / target).resolve()
            assert path.exists(), f"{page}: link to {target}"
            linked.add(path)
    unlinked = [
        page for page in pages if page.parts[0] == "docs" and (tree.ROOT / page).resolve() not in linked
    ]
    assert not unlinked
