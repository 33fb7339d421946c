"""What is wrong with a Triton model repository: each fault with its file and key, before Triton hangs over it.

Triton itself tells most of these only in its log, and waits for ever for a model without model.py.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtforge.model_repo import parameters
from trtforge.model_repo.config import STREAMING, data_type, kind_of, model_name, protobuf
from trtforge.model_repo.package import CODE, CONFIG
from trtforge.model_repo.parameters import UNFILLED
from trtforge.model_repo.tensors import INPUTS, OUTPUTS, Kind
from trtforge.plugins.errors import EngineFormatError
from trtforge.runtime import manifest


@dataclass(frozen=True)
class Fault:
    """key: the field, parameter or file that is wrong. line: in a config.pbtxt, counted from 1."""

    file: Path
    key: str
    message: str
    line: int | None = None

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else str(self.file)
        return f"{place}: {self.key}: {self.message}"


@dataclass(frozen=True)
class Model:
    """A model's folder, parsed. kind is None for models that are none of ours."""

    folder: Path
    text: str
    config: Any
    kind: Kind | None
    prefix: str

    def fault(self, key: str, message: str, needle: str = "") -> Fault:
        return Fault(self.folder / CONFIG, key, message, line_of(self.text, needle or key))


def check(repository: Path, *, checksums: bool = False) -> list[Fault]:
    """All faults of a repository; none means that it can be served. checksums: read the engines whole."""
    if not repository.is_dir():
        return [Fault(repository, "repository", "no such directory; make one with `trtforge package`")]
    folders = sorted(d for d in repository.iterdir() if d.is_dir())
    if not folders:
        return [Fault(repository, "repository", "no model in it; make one with `trtforge package`")]
    faults: list[Fault] = []
    models: list[Model] = []
    for folder in folders:
        model = parse(folder, faults)
        if model is not None:
            models.append(model)
            faults += layout_faults(model)
            if model.kind is not None:
                faults += config_faults(model)
                faults += tensor_faults(model)
                faults += parameter_faults(model)
                faults += engine_faults(model, checksums)
    unparsed = {f.name for f in folders} - {m.folder.name for m in models}
    return [*faults, *family_faults(models, unparsed)]


def parse(folder: Path, faults: list[Fault]) -> Model | None:
    pb, text_format = protobuf()
    file = folder / CONFIG
    if not file.is_file():
        faults.append(
            Fault(file, CONFIG, "missing; Triton takes every directory for a model, hidden ones too")
        )
        return None
    try:
        text = file.read_text()
    except UnicodeDecodeError as e:
        faults.append(Fault(file, CONFIG, f"not UTF-8 text ({e.reason} at byte {e.start})"))
        return None
    unfilled = [
        Fault(file, key_around(line), f"{hole} was never filled in", number)
        for number, line in enumerate(text.splitlines(), 1)
        for hole in UNFILLED.findall(line.split("#", 1)[0])
        if '"' not in line
    ]
    faults += unfilled  # those inside a string parse, and are found with the parameters
    config = pb.ModelConfig()
    try:
        text_format.Parse(text, config)
    except text_format.ParseError as e:
        if not unfilled:
            message = re.sub(r"^\d+:\d+ : ", "", " ".join(str(e).split()))
            named = re.search(r'no field named "([^"]+)"', message)
            faults.append(
                Fault(file, named[1] if named else "syntax", message.rstrip(".") + ".", e.GetLine())
            )
        return None
    known = kind_of(folder.name)
    return Model(folder, text, config, known[0] if known else None, known[1] if known else "")


def layout_faults(model: Model) -> Iterator[Fault]:
    config, folder = model.config, model.folder
    if config.name and config.name != folder.name:
        yield model.fault(
            "name", f"{config.name!r}, but the directory is {folder.name!r}; they must be equal"
        )
    versions = sorted(d for d in folder.iterdir() if d.is_dir() and d.name.isdigit())
    if not versions:
        yield Fault(folder, "version", f"no version directory; there must be one, such as {folder.name}/1")
    elif config.version_policy.HasField("specific"):
        there, asked = {int(v.name) for v in versions}, list(config.version_policy.specific.versions)
        if there.isdisjoint(asked):
            yield model.fault(
                "version_policy", f"names {asked}, there is {sorted(there)}: none would be loaded"
            )
    for version in versions:
        code = config.default_model_filename or CODE
        if config.backend == "python" and not (version / code).is_file():
            yield Fault(version / code, code, "missing; Triton would wait for it for ever")


def config_faults(model: Model) -> Iterator[Fault]:
    pb, _ = protobuf()
    config = model.config
    if config.backend != "python" or config.platform:
        given = config.backend or config.platform
        yield model.fault("backend", f"{given!r}, must be 'python'; package the engine again", given)
    if config.max_batch_size < 1:
        yield model.fault(
            "max_batch_size", f"{config.max_batch_size}, must be at least 1: clients send a batch dimension"
        )
    if config.HasField("sequence_batching"):
        message = "the engine batches by itself; a request's state is its own, remove the field"
        yield model.fault("sequence_batching", message)
    if config.response_cache.enable:
        message = "a sampled answer would be given again, and streams cannot be cached; remove the field"
        yield model.fault("response_cache", message)
    if not config.instance_group:
        yield model.fault("instance_group", "missing: Triton would make one engine for each GPU")
    for group in config.instance_group:
        if group.count != 1:
            yield model.fault(
                "instance_group.count", f"{group.count}, must be 1: each instance is an engine", "count"
            )
        if group.kind != pb.ModelInstanceGroup.KIND_CPU:
            kind = pb.ModelInstanceGroup.Kind.Name(group.kind)
            yield model.fault(
                "instance_group.kind", f"{kind}, must be KIND_CPU: the engine knows its device", "kind"
            )


def tensor_faults(model: Model) -> Iterator[Fault]:
    """Inputs and outputs against their declaration."""
    pb, _ = protobuf()
    assert model.kind is not None
    for field, declared, present in (
        ("input", INPUTS[model.kind], model.config.input),
        ("output", OUTPUTS[model.kind], model.config.output),
    ):
        by_name = {t.name: t for t in declared}
        for tensor in present:
            key, needle = f"{field}.{tensor.name}", f'"{tensor.name}"'
            if tensor.name not in by_name:
                yield model.fault(key, f"unknown {field} of {model.kind.value}", needle)
                continue
            wanted = by_name[tensor.name]
            if tensor.data_type != data_type(wanted.dtype):
                given = pb.DataType.Name(tensor.data_type)
                yield model.fault(f"{key}.data_type", f"{given}, must be TYPE_{wanted.dtype}", needle)
            if tuple(tensor.dims) != wanted.dims:
                yield model.fault(f"{key}.dims", f"{list(tensor.dims)}, must be {list(wanted.dims)}", needle)
        there = {t.name for t in present}
        if lacking := [name for name in by_name if name not in there]:
            message = f"lacks {', '.join(lacking)}: clients that use them would be refused; package the engine again"
            yield model.fault(field, message, field)


def parameter_faults(model: Model) -> Iterator[Fault]:
    given = {k: p.string_value for k, p in sorted(model.config.parameters.items())}  # a map: in no order
    for key, message in parameters.faults(given):
        yield model.fault(f"parameters.{key}", message, f'"{key}"')


def engine_faults(model: Model, checksums: bool) -> Iterator[Fault]:
    if model.kind is not Kind.TOKENS:
        return
    key = "parameters.gpt_model_path"
    raw = (
        model.config.parameters["gpt_model_path"].string_value
        if "gpt_model_path" in model.config.parameters
        else ""
    )
    if UNFILLED.search(raw):
        return  # named already
    for version in sorted(d for d in model.folder.iterdir() if d.is_dir() and d.name.isdigit()):
        engine = version / (raw or parameters.ENGINE_PATH)
        if not engine.is_dir():
            yield model.fault(
                key, f"{raw!r}: no engine at {engine}; package the engine again", '"gpt_model_path"'
            )
            continue
        try:
            manifest.load(engine, checksums=checksums)
        except EngineFormatError as e:
            yield model.fault(key, str(e), '"gpt_model_path"')


def family_faults(models: list[Model], unparsed: set[str]) -> Iterator[Fault]:
    """What must agree between the models around one engine. unparsed: folders whose own fault is named already."""
    by_name = {m.folder.name: m for m in models}
    for model in models:
        if model.kind is None or model.kind is Kind.TOKENS:
            continue
        given = (
            model.config.parameters["engine_model"].string_value
            if "engine_model" in model.config.parameters
            else ""
        )
        if UNFILLED.search(given) or given in unparsed:
            continue
        engine = by_name.get(given)
        if engine is None or engine.kind is not Kind.TOKENS:
            wanted = model_name(Kind.TOKENS, model.prefix)
            yield model.fault(
                "parameters.engine_model",
                f"{given!r} is no engine model of this repository; must be {wanted!r}",
                '"engine_model"',
            )
        elif model.kind in STREAMING and decoupled(model) != decoupled(engine):
            yield model.fault(
                "model_transaction_policy.decoupled",
                f"{decoupled(model)}, but {engine.folder.name} has {decoupled(engine)}; they must be equal",
                "decoupled",
            )


def decoupled(model: Model) -> bool:
    return bool(model.config.model_transaction_policy.decoupled)


def line_of(text: str, needle: str) -> int | None:
    """The first line that has it, outside comments."""
    for number, line in enumerate(text.splitlines(), 1):
        if needle in line.split("#", 1)[0]:
            return number
    return None


def key_around(line: str) -> str:
    named = re.match(r"\s*(\w+)\s*:", line)
    return named[1] if named else line.strip()
