"""Writing an engine directory so that what stands at its final name is whole, or is not there.

The engine is written into `.NAME.building-XXXX` beside the final name and renamed at the end. A build that
was killed leaves only that; the next build of the same name removes it. A running build holds a lock on its
own.
"""

import fcntl
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trtforge.plugins.errors import EnvironmentProblem, InvalidArgument
from trtforge.runtime.manifest import MANIFEST_NAME


@contextmanager
def staging(output: Path) -> Iterator[Path]:
    """A directory to write the engine into; it becomes `output` when the block ends without an exception.

    An engine that stands there already is replaced at that moment and not before. Raises InvalidArgument if
    something else stands there, EnvironmentProblem if the place cannot be written or the disk is full.
    """
    output = output.expanduser().resolve()
    check_replaceable(output)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(output)
        directory = Path(tempfile.mkdtemp(prefix=_prefix(output), dir=output.parent))
        lock = _lock(directory)
    except OSError as e:
        raise _cannot_write(output, e) from e
    try:
        yield directory
        directory.chmod(0o777 & ~_umask())
        check_replaceable(output)
        _publish(directory, output)
    except OSError as e:
        raise _cannot_write(output, e) from e
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def check_replaceable(output: Path) -> None:
    """Raise InvalidArgument unless `output` is absent, an empty directory, or an engine and nothing else."""
    if not output.exists():
        return
    remedy = "choose another output, or remove it yourself"
    if not output.is_dir():
        raise InvalidArgument(f"{output}: exists and is not a directory; {remedy}")
    if not any(output.iterdir()):
        return
    try:
        manifest = json.loads((output / MANIFEST_NAME).read_text())
        known = {MANIFEST_NAME, *manifest["files"]} if "format_version" in manifest else set()
    except (OSError, ValueError, KeyError, TypeError):
        known = set()
    if not known:
        raise InvalidArgument(f"{output}: exists and is not an engine directory; {remedy}")
    found = {str(f.relative_to(output)) for f in output.rglob("*") if not f.is_dir()}
    if foreign := sorted(found - known):
        raise InvalidArgument(
            f"{output}: holds {foreign[0]!r}, not of the engine there, which would be lost; {remedy}"
        )


def _publish(directory: Path, output: Path) -> None:
    """Rename into place. An old engine steps aside first; it is removed only after the new one stands."""
    if not output.exists():
        directory.rename(output)
        return
    aside = Path(tempfile.mkdtemp(prefix=_prefix(output), dir=output.parent))
    output.rename(aside)
    directory.rename(output)
    shutil.rmtree(aside, ignore_errors=True)


def _remove_leftovers(output: Path) -> None:
    """Remove what killed builds of this output left; a build that still runs holds its lock."""
    for leftover in output.parent.glob(glob.escape(_prefix(output)) + "*"):
        lock = _lock(leftover)
        if lock is not None:
            shutil.rmtree(leftover, ignore_errors=True)
            os.close(lock)


def _lock(directory: Path) -> int | None:
    """An exclusive lock on a directory, which dies with the process; None if another process has it."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def _prefix(output: Path) -> str:
    return f".{output.name}.building-"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _cannot_write(output: Path, error: OSError) -> EnvironmentProblem:
    """One line: where, why, and how much room there is."""
    try:
        room = f"; {shutil.disk_usage(output.parent).free >> 20} MB are free there"
    except OSError:
        room = ""
    return EnvironmentProblem(
        f"{output}: cannot write the engine: {error.strerror or error}{room}; nothing was left behind"
    )
