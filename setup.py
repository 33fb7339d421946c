"""Compiles the CPU kernels (plugins/cpu) into two libraries; all else is in pyproject.toml.

libtrtforge_host.so is the native host, with nothing but the kernels in it. libtrtforge_cpu.so is an OpenVINO
extension, built against the pinned openvino wheel: its headers, its libopenvino and its TBB, found by the package's
place. Neither is a Python extension, so one wheel serves every Python version of a platform.
"""

import filecmp
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / "plugins" / "cpu"
CACHE = ROOT / "build" / "cpu"
#: Compiled once per instruction set; the others once.
KERNELS = ("kv_cache_update.cpp", "paged_attention.cpp", "packed_linear.cpp", "pointwise.cpp")
COMMON = ("kernels.cpp", "linear.cpp", "packed_embedding.cpp")
LIBRARIES = {
    "libtrtforge_cpu": ("openvino_ops.cpp", "openvino_packed.cpp"),
    "libtrtforge_host": ("team.cpp", "decoder.cpp", "host.cpp"),
}
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni"))]
ISA_FLAGS = {"generic": [], "avx2": AVX2, "avx512": AVX512}
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
]


def find_compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++")):
        if path := shutil.which(name):
            return path
    raise SystemExit("trtforge: no C++17 compiler found; install g++ (apt-get install g++) or set CXX")


def find_openvino() -> Path:
    spec = importlib.util.find_spec("openvino")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "trtforge: openvino is not installed; run pip without --no-build-isolation, or install it first"
        )
    return Path(spec.submodule_search_locations[0])


def shared_library(libs: Path, pattern: str) -> str:
    """The file name, which is the soname, of the one library that matches."""
    found = sorted(p.name for p in libs.glob(pattern) if not p.is_symlink())
    if len(found) != 1:
        raise SystemExit(
            f"trtforge: {libs} holds {found or 'no'} {pattern}; install the openvino that pyproject.toml pins"
        )
    return found[0]


def made(command: list[str], inputs: bytes, stem: str, suffix: str) -> Path:
    """The file that `command -o FILE` makes, reused if the command and what it reads are unchanged.

    Kept in build/cpu, which pip's isolated and editable builds share. The place of the openvino package, a
    temporary one in such builds, does not count; its version does.
    """
    place = str(find_openvino())
    key = repr([c.replace(place, "") for c in command]) + version("openvino")
    target = CACHE / f"{stem}-{hashlib.sha256(key.encode() + inputs).hexdigest()[:16]}{suffix}"
    if not target.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(f".{os.getpid()}")
        result = subprocess.run([*command, "-o", str(part)], capture_output=True, text=True)
        if result.returncode:
            raise SystemExit(f"trtforge: the C++ compiler failed: {' '.join(command)}\n{result.stderr}")
        part.rename(target)
    return target


def compile_objects(compiler: str) -> dict[str, list[Path]]:
    """The objects of each library."""
    headers = b"".join(p.read_bytes() for p in sorted(SOURCES.glob("*.hpp")))
    isas = ISA_FLAGS if platform.machine() in ("x86_64", "AMD64") else {"generic": []}
    openvino = ["-isystem", str(find_openvino() / "include")]
    jobs = [("", source, [], "") for source in COMMON]
    jobs += [
        ("", source, [*flags, f"-DTRTFORGE_ISA={isa}"], f"-{isa}")
        for isa, flags in isas.items()
        for source in KERNELS
    ]
    jobs += [
        (library, source, openvino if source.startswith("openvino") else [], "")
        for library, sources in LIBRARIES.items()
        for source in sources
    ]

    def compile_one(job: tuple[str, str, list[str], str]) -> Path:
        _, source, flags, suffix = job
        path = SOURCES / source
        command = [compiler, *FLAGS, *flags, "-c", str(path)]
        return made(command, headers + path.read_bytes(), path.stem + suffix, ".o")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(zip((job[0] for job in jobs), pool.map(compile_one, jobs), strict=True))
    return {name: [o for owner, o in objects if owner in ("", name)] for name in LIBRARIES}


def link(compiler: str, name: str, objects: list[Path]) -> Path:
    flags = ["-pthread", "-Wl,--no-undefined", "-Wl,-s"]
    if name == "libtrtforge_cpu":
        libs = find_openvino() / "libs"
        names = [shared_library(libs, "libopenvino.so.*"), shared_library(libs, "libtbb.so.*")]
        # site-packages/trtforge/plugins/cpu -> site-packages/openvino/libs; in an editable install the
        # libraries are found by soname, loaded before by `import openvino`
        rpath = "-Wl,-rpath,$ORIGIN/../../../openvino/libs"
        flags += [f"-L{libs}", *(f"-l:{file}" for file in names), rpath]
    return made([compiler, "-shared", *map(str, objects), *flags], b"", name, ".so")


class BuildLibrary(build_ext):
    """Compiles with the plain compiler; setuptools only decides where the libraries go."""

    def build_extension(self, ext: Extension) -> None:
        compiler, name = find_compiler(), ext.name.rpartition(".")[2]
        library = link(compiler, name, compile_objects(compiler)[name])
        target = Path(self.get_ext_fullpath(ext.name))
        if not target.exists() or not filecmp.cmp(library, target, shallow=False):
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_suffix(f".{os.getpid()}")
            shutil.copy(library, part)
            part.rename(target)  # atomic: a running process keeps the library that it has mapped

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    ext_modules=[
        Extension(
            f"trtforge.plugins.cpu.{name}",
            sources=[],
            depends=[str(p.relative_to(ROOT)) for p in sorted(SOURCES.glob("*.[ch]pp"))],  # go into the sdist
        )
        for name in LIBRARIES
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
)
