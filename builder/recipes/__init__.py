"""Quantization recipes: TOML files that a user can copy and change. The file's name is the recipe's name."""

import difflib
import importlib
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from trtforge.builder.spec import QuantSpec
from trtforge.plugins.errors import InvalidArgument

_WEIGHTS = ("none", "as_is", "int8", "int4")
_GROUP_SIZES = (0, 32, 64, 128)
_TYPES: dict[str, type] = {"weights": str, "group_size": int, "symmetric": bool, "exclude": list}


def names() -> tuple[str, ...]:
    """The recipes that come with trtforge."""
    return tuple(sorted(f.stem for f in Path(__file__).parent.glob("*.toml")))


def load(recipe: str) -> QuantSpec:
    """A recipe by its name, or from a `.toml` file of the user's own.

    Raises InvalidArgument for an unknown name (with the known ones), key or value.
    """
    if recipe in names():
        return _read(Path(__file__).parent / f"{recipe}.toml")
    file = Path(recipe)
    if file.suffix == ".toml" and file.is_file():
        own = _read(file)
        if own.name in names() and own != load(own.name):
            raise InvalidArgument(f"{file}: trtforge has another recipe of this name; rename the file")
        return own
    raise InvalidArgument(
        f"recipe {recipe!r} is unknown; choose from: {', '.join(names())}, or give a .toml file of your own"
    )


def _read(file: Path) -> QuantSpec:
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        raw: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise InvalidArgument(f"{file}: not a recipe: {e}") from e
    known = [f.name for f in fields(QuantSpec) if f.name != "name"]
    for key, value in raw.items():
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {nearest[0]!r}? " if nearest else ""
            raise InvalidArgument(f"{file}: unknown key {key!r}; {hint}known: {', '.join(known)}")
        if type(value) is not _TYPES[key] or (key == "exclude" and not all(type(x) is str for x in raw[key])):
            wanted = "a list of strings" if key == "exclude" else f"a {_TYPES[key].__name__}"
            raise InvalidArgument(f"{file}: {key} = {value!r} must be {wanted}")
    values: dict[str, Any] = {**raw, "exclude": tuple(raw.get("exclude", ()))}
    spec = QuantSpec(file.stem, **values)
    if spec.weights not in _WEIGHTS:
        raise InvalidArgument(
            f"{file}: weights = {spec.weights!r} is unknown; choose from: {', '.join(_WEIGHTS)}"
        )
    if spec.group_size not in _GROUP_SIZES:
        raise InvalidArgument(
            f"{file}: group_size = {spec.group_size} is not possible; choose from: "
            f"{', '.join(map(str, _GROUP_SIZES))} (0: per output channel)"
        )
    return spec
