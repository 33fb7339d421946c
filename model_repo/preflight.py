"""What this machine must have before anything is installed, told in one line per fault.

    python3 model_repo/preflight.py      prints the path of a suitable Python, or says what to install

Standard library only, and run by whatever `python3` is, from 3.6 on: what runs this need not be the one
that is chosen. `trtforge doctor` and `trtforge serve` use the same checks.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from typing import NamedTuple  # class syntax: the newest that 3.6 has

OLDEST, NEWEST = (3, 10), (3, 12)  # nvidia-pytriton's server needs numpy<2, which has no wheels past 3.12
CANDIDATES = ("python3.11", "python3.12", "python3.10", "python3")
OLDEST_GLIBC = (2, 35)
PACKAGED = {"venv", "libpython", "compiler"}
ONE_LINE_FOR_ALL = "apt-get install git make g++ python3-venv libpython3-dev"


class Finding(NamedTuple):
    """The outcome of one check: what was found, and, if that is not well, what to do about it."""

    name: str
    ok: bool
    detail: str
    mend: str = ""
    fatal: bool = True  # False: something works less well, nothing fails

    def line(self) -> str:
        return f"{self.name}: {self.detail}" + (f"; {self.mend}" if self.mend and not self.ok else "")


def _dotted(version: "tuple[int, ...]") -> str:
    return ".".join(str(part) for part in version)


def _is_distribution_python() -> bool:
    """Whether apt installed this interpreter (a virtual environment counts as the one it was made from)."""
    return os.path.realpath(sys.executable).startswith("/usr/bin/")


def interpreter() -> Finding:
    version = sys.version_info[:2]
    detail = f"{sys.executable} is Python {_dotted(sys.version_info[:3])}"
    mend = (
        f"trtforge needs {_dotted(OLDEST)} to {_dotted(NEWEST)}: apt-get install python3.12 python3.12-venv "
        "libpython3.12-dev (or, where the distribution has none, PYTHON_CONFIGURE_OPTS=--enable-shared "
        "pyenv install 3.12), then name it with PYTHON=python3.12"
    )
    return Finding("interpreter", OLDEST <= version <= NEWEST, detail, mend)


def ensurepip() -> Finding:
    """Debian and Ubuntu split `venv` off the interpreter's package."""
    version = _dotted(sys.version_info[:2])
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as e:
        detail = f"Python {version} cannot make virtual environments ({e})"
        return Finding("venv", False, detail, f"apt-get install python3-venv (or python{version}-venv)")
    return Finding("venv", True, f"Python {version} can make virtual environments")


def _is_shared_object(path: str) -> bool:
    try:
        with open(path, "rb") as f:
            return f.read(4) == b"\x7fELF"
    except OSError:
        return False


def _loader_cache() -> "dict[str, str]":
    """Name -> path of what the dynamic loader knows, for this machine's word size."""
    ldconfig = shutil.which("ldconfig") or shutil.which("ldconfig", path="/usr/sbin:/sbin")
    if not ldconfig:
        return {}
    text = subprocess.run([ldconfig, "-p"], stdout=subprocess.PIPE).stdout.decode(errors="replace")
    libraries = {}  # type: dict[str, str]
    for line in text.splitlines():
        name, arrow, path = line.strip().partition(" => ")
        if arrow:
            libraries.setdefault(name.split(" ")[0], path)
    return libraries


def find_libpython() -> "str | None":
    """The shared libpythonX.Y.so.1.0 of this interpreter: Triton's Python stub is linked against it."""
    name = f"libpython{_dotted(sys.version_info[:2])}.so.1.0"
    libdir = sysconfig.get_config_var("LIBDIR") or ""
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    places = [libdir, os.path.join(libdir, multiarch), os.path.join(sys.base_prefix, "lib")]
    candidates = [os.path.join(place, name) for place in places]
    cached = _loader_cache().get(name)
    if cached:
        candidates.append(cached)
    return next((path for path in candidates if _is_shared_object(path)), None)


def libpython() -> Finding:
    version = _dotted(sys.version_info[:2])
    found = find_libpython()
    if found:
        return Finding("libpython", True, found)
    if _is_distribution_python():
        mend = f"apt-get install libpython3-dev (or libpython{version})"
    else:
        mend = "build this Python with --enable-shared, or use the distribution's with libpython3-dev"
    detail = f"no shared libpython{version}.so.1.0, without which Triton never becomes live"
    return Finding("libpython", False, detail, mend)


def compiler() -> Finding:
    """The C++ compiler that the CPU kernels are built with at install time."""
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["g++", "clang++", "c++"]:
        path = shutil.which(name.split()[0])
        if path:
            return Finding("compiler", True, path)
    if wanted:
        return Finding("compiler", False, f"CXX={wanted} is not on PATH", "unset CXX, or apt-get install g++")
    return Finding("compiler", False, "no C++ compiler (g++, clang++) on PATH", "apt-get install g++")


def glibc() -> Finding:
    needed = _dotted(OLDEST_GLIBC)
    mend = f"Triton's binary needs {needed}: use Debian 12, Ubuntu 22.04 or newer"
    try:
        version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split(" ")[1]
    except (ValueError, OSError, IndexError):
        return Finding("glibc", False, "the C library is not glibc", mend)
    ok = tuple(int(part) for part in version.split(".")[:2]) >= OLDEST_GLIBC
    return Finding("glibc", ok, f"version {version}", mend)


def disk(where: str = ".", needed_gb: float = 1.0) -> Finding:
    free = shutil.disk_usage(where).free / 1e9
    detail = f"{free:.1f} GB free in {os.path.abspath(where)}"
    return Finding("disk", free >= needed_gb, detail, f"make room: {needed_gb:g} GB are needed")


def examine(python: str) -> "list[Finding] | None":
    """Run the checks about an interpreter in that interpreter; None if there is no such working program."""
    path = shutil.which(python)
    if not path:
        return None
    probe = subprocess.run(
        [path, "-I", os.path.abspath(__file__), "--about-yourself"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        return [Finding(*fields) for fields in json.loads(probe.stdout.decode())]
    except ValueError:  # a pyenv shim without a version behind it, Python 2
        return None


def _does_not_run(python: str) -> Finding:
    probe = subprocess.run(
        [shutil.which(python) or python, "-I", "-c", ""], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    said = probe.stderr.decode(errors="replace").strip().partition("\n")[0] or "no word of why"
    mend = f"give the path of an interpreter itself, PYTHON=/path/to/{os.path.basename(python)}"
    return Finding("interpreter", False, f"{python} does not run ({said})", mend)


def choose_python(candidates: "tuple[str, ...]") -> "tuple[str | None, list[Finding]]":
    """The first candidate that has everything, or None and the faults of the one that comes nearest."""
    nearest = None  # type: list[Finding] | None
    for candidate in candidates:
        findings = examine(candidate)
        if findings is None:
            continue
        if all(finding.ok for finding in findings):
            return shutil.which(candidate), findings
        if not findings[0].ok:
            findings = findings[:1]  # what else a Python of the wrong version lacks does not matter
        if nearest is None or len(findings) > len(nearest):
            nearest = findings
    if nearest is None and len(candidates) == 1 and shutil.which(candidates[0]):
        nearest = [_does_not_run(candidates[0])]
    if nearest is None:
        mend = "apt-get install python3 python3-venv libpython3-dev"
        nearest = [Finding("interpreter", False, "no working " + ", ".join(candidates), mend)]
    return None, nearest


def main() -> int:
    parser = argparse.ArgumentParser(description="Check this machine before trtforge is installed.")
    parser.add_argument("--python", help="the interpreter to use (default: the first suitable one)")
    parser.add_argument("--disk-gb", type=float, default=1.0, help="free space needed here")
    parser.add_argument("--about-yourself", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.about_yourself:
        print(json.dumps([interpreter(), ensurepip(), libpython()]))
        return 0
    chosen, findings = choose_python((options.python,) if options.python else CANDIDATES)
    findings += [compiler(), glibc(), disk(".", options.disk_gb)]
    faults = [finding for finding in findings if not finding.ok]
    for fault in faults:
        print("preflight: " + fault.line(), file=sys.stderr)
    if any(fault.name in PACKAGED for fault in faults):
        print("preflight: on Debian and Ubuntu all of it comes with: " + ONE_LINE_FOR_ALL, file=sys.stderr)
    if faults or chosen is None:
        return 1
    print(chosen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
