"""`trtforge doctor`: what this machine has and lacks for each purpose, and what to do about it."""

import importlib.metadata
import platform
import sys
from collections.abc import Callable

from trtforge.model_repo import environment
from trtforge.model_repo.environment import Surroundings

VERSIONS = ("numpy", "onnx", "onnxruntime", "tokenizers", "torch", "transformers", "tritonclient")


def examine(surroundings: Surroundings, echo: Callable[[str], None]) -> bool:
    """Print every check under what needs it, the faulty ones with their mend; whether all that the CPU path
    needs is there. `ok`, `--` (something is lacking, nothing fails) or `NO` begins each line."""
    version = importlib.metadata.version("trtforge")
    echo(f"trtforge {version}, Python {platform.python_version()} ({sys.executable})")
    installed = [(name, environment.version_of(name)) for name in VERSIONS]
    echo(", ".join(f"{name} {version or 'absent'}" for name, version in installed))
    results = {check: environment.examine(check, surroundings) for check in environment.CHECKS}
    well = True
    for purpose in environment.PURPOSES:
        echo(f"{purpose}:")
        for check, findings in results.items():
            if check.needed_for[0] != purpose:
                continue
            for finding in findings:
                well = well and (finding.ok or not finding.fatal)
                mark = "ok" if finding.ok else "NO" if finding.fatal else "--"
                echo(f"  {mark} {finding.line()}")
    return well
