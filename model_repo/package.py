"""An engine directory -> a Triton model repository around it.

The repository holds the engine and no absolute path, so that it can be moved, mounted read-only or fetched by
Triton from object storage. It is written beside its final name and put there in one step.
"""

import ctypes
import os
import py_compile
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from trtforge.model_repo import parameters as model_parameters
from trtforge.model_repo.config import model_config, model_name, to_text
from trtforge.model_repo.tensors import Kind
from trtforge.plugins.errors import InvalidArgument, RepositoryError
from trtforge.runtime import manifest as engine_format

VERSION = "1"
CONFIG = "config.pbtxt"
CODE = "model.py"

#: Where each model's class is.
CLASSES = {
    Kind.TOKENS: ("engine_model", "EngineModel"),
    Kind.TEXT: ("text_models", "TextModel"),
    Kind.BLS: ("text_models", "BlsModel"),
    Kind.PREPROCESSING: ("text_models", "Preprocessing"),
    Kind.POSTPROCESSING: ("text_models", "Postprocessing"),
}

#: Parameters that the text models read too; the rest is the engine model's.
SHARED_PARAMETERS = ("exclude_input_in_output", "default_deadline_ms")


def package(
    engine_dir: Path,
    repository: Path,
    *,
    prefix: str = "",
    decoupled: bool = True,
    parameters: Mapping[str, str] | None = None,
) -> list[str]:
    """Write the five models of an engine into a repository and give their names.

    prefix: goes before each name, so that several engines can live in one repository; models of the same names
    are replaced, others stay. parameters: keys of parameters.PARAMETERS, checked here.

    Raises EngineFormatError for an engine that is not whole, RepositoryError for a place that holds something
    else, InvalidArgument for a bad prefix or parameter.
    """
    if prefix and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", prefix):
        raise InvalidArgument(
            f"--name {prefix!r}: letters, digits, '_', '.' and '-' only, a letter or digit first"
        )
    given = dict(parameters or {})
    model_parameters.read(given)
    limits = engine_format.load(engine_dir, checksums=True).limits
    others = other_models(repository, {model_name(k, prefix) for k in Kind})
    repository.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{repository.name}.", suffix=".partial", dir=repository.parent))
    partial.chmod(0o755)
    try:
        for model in others:
            copy_tree(model, partial / model.name)
        for kind in Kind:
            write_model(partial, kind, prefix, decoupled, limits.max_batch_size, given)
        engine_place = partial / model_name(Kind.TOKENS, prefix) / VERSION / model_parameters.ENGINE_PATH
        copy_tree(engine_dir, engine_place)
        put_in_place(partial, repository)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # after an exchange it holds what was there before
    return [model_name(k, prefix) for k in Kind]


def other_models(repository: Path, ours: set[str]) -> list[Path]:
    """The models that stay. Refuses a place that holds anything but models: it is about to be replaced."""
    if not repository.exists():
        return []
    if not repository.is_dir():
        raise RepositoryError(f"{repository} is a file; choose another place for the repository")
    entries = sorted(repository.iterdir())
    for entry in entries:
        if not (entry / CONFIG).is_file():
            raise RepositoryError(
                f"{repository} is no model repository ({entry.name} has no {CONFIG}); choose a new or empty place"
            )
    return [e for e in entries if e.name not in ours]


def write_model(
    repository: Path, kind: Kind, prefix: str, decoupled: bool, max_batch_size: int, given: Mapping[str, str]
) -> None:
    if kind is Kind.TOKENS:
        own = {
            "gpt_model_type": "inflight_fused_batching",
            "gpt_model_path": model_parameters.ENGINE_PATH,
        } | dict(given)
        own["gpt_model_path"] = model_parameters.ENGINE_PATH
    else:
        own = {"engine_model": model_name(Kind.TOKENS, prefix)}
        own |= {k: v for k, v in given.items() if k in SHARED_PARAMETERS}
    config = model_config(
        kind, prefix=prefix, decoupled=decoupled, max_batch_size=max_batch_size, parameters=own
    )
    folder = repository / config.name
    code = folder / VERSION / CODE
    code.parent.mkdir(parents=True)
    (folder / CONFIG).write_text(to_text(config))
    code.write_text(code_of(kind))
    # Triton takes a new file in the folder for a new model and would load it twice, so the bytecode that Python
    # would write at the first load is there already; checked by hash, since times do not survive a copy.
    py_compile.compile(
        str(code), dfile=CODE, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH
    )


def code_of(kind: Kind) -> str:
    module, name = CLASSES[kind]
    return (
        f'"""The model `{kind.value}`, written by `trtforge package`: the code is in trtforge.model_repo."""\n\n'
        f"from trtforge.model_repo.{module} import {name}\n\n\n"
        f"class TritonPythonModel({name}):\n"
        f'    """What Triton looks for in this file."""\n'
    )


def copy_tree(source: Path, target: Path) -> None:
    """Files are linked where the file system can, so that an engine is on the disk once."""
    shutil.copytree(source, target, copy_function=link_or_copy)


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def put_in_place(new: Path, place: Path) -> None:
    """One rename, or one exchange with what is there, which lies at `new` afterwards."""
    if not place.exists():
        new.rename(place)
        return
    exchange = 2  # RENAME_EXCHANGE of renameat2(2)
    at_cwd = -100
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(at_cwd, os.fsencode(new), at_cwd, os.fsencode(place), exchange) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise RepositoryError(f"{place} cannot be replaced ({reason}); remove it and package again")
