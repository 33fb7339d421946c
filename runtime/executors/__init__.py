"""Executors: one file per target, found by being in this folder (`tensorrt_rtx.py` runs `tensorrt-rtx`).

Each defines `open_executor(engine_dir, manifest, threads)`.
"""

import importlib
import pkgutil
from pathlib import Path
from typing import cast

from trtforge.plugins.errors import EngineFormatError
from trtforge.runtime import manifest as manifest_format
from trtforge.runtime.executors.base import Executor
from trtforge.runtime.manifest import Manifest


def open_executor(
    engine_dir: Path, manifest: Manifest | None = None, *, threads: int | None = None
) -> Executor:
    """Open an engine directory for running; `allocate` its pools before the first `run`.

    manifest: already loaded, or None to load it here. threads: None means the CPUs that this process may use.
    Raises EngineFormatError for an engine that is not whole or needs another version, EnvironmentProblem
    for a part of this installation that is missing.
    """
    manifest = manifest or manifest_format.load(engine_dir)
    module = manifest.target.replace("-", "_")
    known = {m.name for m in pkgutil.iter_modules(__path__)} - {"base"}
    if module not in known:
        names = ", ".join(sorted(n.replace("_", "-") for n in known))
        raise EngineFormatError(
            f"{engine_dir}: made for target {manifest.target!r}, which this trtforge cannot run "
            f"(it runs: {names}); build the engine for one of these"
        )
    executor = importlib.import_module(f"{__name__}.{module}").open_executor(engine_dir, manifest, threads)
    return cast(Executor, executor)
