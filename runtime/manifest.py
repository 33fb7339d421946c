"""The engine directory's format: `manifest.json` and the files that it vouches for.

This is the contract between builder and runtime, and the only module of the runtime that the builder imports.
Standard library only. An engine directory holds:

    manifest.json              this
    program.json, weights.bin  what the native host runs, and its weights (target cpu, quantized throughout)
    model.xml, model.bin       OpenVINO's graph and its weights (target cpu, all others)
    tokenizer.json             in the format of the `tokenizers` library
    tokenizer_config.json      bos/eos/pad tokens and whether BOS is added, in Hugging Face's terms
    chat_template.jinja        if the model has one
    generation_config.json     in Hugging Face's terms (eos_token_id may be a list)

It is written beside its final name and renamed at the end: an interrupted build leaves no half engine.
"""

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from trtforge.plugins.errors import EngineFormatError
from trtforge.plugins.kv_dtypes import KV_DTYPES

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"

#: Of each of the limits: positions and counts of tokens are INT32 in the graph.
MAX_LIMIT = 2**31 - 1

#: What `Manifest.model` has at least.
MODEL_KEYS: dict[str, type] = {
    "name": str,
    "source": str,
    "family": str,
    "architecture": str,
    "vocab_size": int,
    "hidden_size": int,
    "num_layers": int,
    "num_heads": int,
    "num_parameters": int,
}


@dataclass(frozen=True)
class Limits:
    """What one step and one request may hold; the defaults of `build`."""

    max_batch_size: int = 32  # requests in one step
    max_num_tokens: int = 512  # tokens in one step, all requests together
    max_seq_len: int = 2048  # tokens of one request, prompt and output


@dataclass(frozen=True)
class Rope:
    """One kind of rotation: row p of cos_sin is [cos(p * inv_freq), sin(p * inv_freq)] * attention_factor.

    inv_freq: FP32 values, rotary_dim / 2 of them; every scaling rule is already in them.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class KVGroup:
    """Layers that share a window, and so a pool, a slot mapping and block tables."""

    layers: tuple[int, ...]  # the model's layer numbers, in the pool's order
    kv_heads: int
    head_size: int
    window: int | None = None  # tokens that a query sees, itself included; None: all


@dataclass(frozen=True)
class KVLayout:
    """The pools, for each group g: `kv_pool.{g}` [num_blocks, layers, 2, kv_heads, tokens_per_block,
    head_size], and for a quantized dtype `kv_scales.{g}` FP32 [num_blocks, layers, 2, kv_heads,
    tokens_per_block, n].
    """

    dtype: str
    tokens_per_block: int
    groups: tuple[KVGroup, ...]

    def block_bytes(self, group: int) -> int:
        """Bytes of one block of a group, all layers, K and V, scales included."""
        g, d = self.groups[group], KV_DTYPES[self.dtype]
        return len(g.layers) * 2 * g.kv_heads * self.tokens_per_block * (g.head_size * d.bytes + 4 * d.scales)

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token over all groups."""
        return sum(self.block_bytes(i) for i in range(len(self.groups))) // self.tokens_per_block


@dataclass(frozen=True)
class FileEntry:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What an engine is, was built from and can do."""

    target: str  # cpu, tensorrt, tensorrt-rtx, null
    model: Mapping[str, Any]  # MODEL_KEYS, and what else a builder has to tell
    recipe: str
    kv: KVLayout
    limits: Limits
    ropes: tuple[Rope, ...]
    eos_token_ids: tuple[int, ...]  # the model's own list; may be empty
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    activations: str = "fp32"
    versions: Mapping[str, str] = field(default_factory=dict)  # trtforge, ops; openvino if that runs it
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @property
    def vocab_size(self) -> int:
        return int(self.model["vocab_size"])

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = MANIFEST_NAME) -> "Manifest":
        """Raises EngineFormatError for anything that is not a manifest of this format version."""
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as e:
            raise EngineFormatError(f"{where}: not JSON ({e}); build the engine again") from e
        if not isinstance(raw, dict):
            raise EngineFormatError(f"{where}: not a JSON object; build the engine again")
        if type(raw.get("format_version")) is not int or raw["format_version"] != FORMAT_VERSION:
            raise EngineFormatError(
                f"{where}: engine format {raw.get('format_version')!r}, this trtforge reads {FORMAT_VERSION};"
                " build the engine again with this version"
            )
        manifest: Manifest = _typed(cls, raw, where)
        _check(manifest, where)
        return manifest


def _typed(kind: Any, value: Any, where: str) -> Any:
    """A JSON value as what a field's annotation says: a dataclass, tuple[X, ...], Mapping[str, X], X | None, str,
    int or float (finite). Raises EngineFormatError with the path of the first value that is something else.
    """
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        known = {f.name: f for f in fields(kind)}
        for name in sorted(value.keys() - known.keys()):
            raise _damaged(where, f"unknown field {name!r}")
        for name, f in known.items():
            if name not in value and f.default is MISSING and f.default_factory is MISSING:
                raise _damaged(where, f"{name} is missing")
        types = get_type_hints(kind)
        return kind(**{name: _typed(types[name], v, f"{where}: {name}") for name, v in value.items()})
    if origin is UnionType:  # X | None
        return None if value is None else _typed(args[0], value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_typed(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is Mapping and isinstance(value, dict):
        return {k: _typed(args[1], v, f"{where}: {k}") for k, v in value.items()}
    if kind is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return float(value)
    if kind in (int, str) and type(value) is kind:
        return value
    raise _damaged(where, f"{value!r:.60} is not possible")


def _check(manifest: Manifest, where: str) -> None:
    """What the types do not say. Raises EngineFormatError that names the first value that cannot be."""
    for key, kind in MODEL_KEYS.items():
        value = manifest.model.get(key)
        if type(value) is not kind or (isinstance(value, int) and value < 0):
            raise _damaged(where, f"model: {key} is {value!r:.60}, want {kind.__name__}")
    for name in manifest.files:
        if Path(name).name != name:
            raise _damaged(where, f"files: {name!r} is not a file's name")
    kv = manifest.kv
    if kv.dtype not in KV_DTYPES:
        raise _damaged(where, f"kv: dtype {kv.dtype!r} is none of {', '.join(KV_DTYPES)}")
    layers = sorted(layer for group in kv.groups for layer in group.layers)
    if (
        layers != list(range(len(layers)))
        or len(layers) != manifest.model["num_layers"]
        or not all(g.layers for g in kv.groups)
    ):
        raise _damaged(where, f"kv: groups hold {len(layers)} layers, not each of the model's once")
    sizes = {f"limits: {name}": value for name, value in asdict(manifest.limits).items()}
    sizes |= {"model: vocab_size": manifest.vocab_size, "kv: tokens_per_block": kv.tokens_per_block}
    for i, group in enumerate(kv.groups):
        shape = {"kv_heads": group.kv_heads, "head_size": group.head_size, "window": group.window or 1}
        sizes |= {f"kv: groups[{i}]: {name}": value for name, value in shape.items()}
    for name, value in sizes.items():
        if not 1 <= value <= MAX_LIMIT:
            raise _damaged(where, f"{name} {value} must be from 1 to {MAX_LIMIT}")


def _damaged(where: str, what: str) -> EngineFormatError:
    return EngineFormatError(f"{where}: {what}; build the engine again")


def load(engine_dir: Path, *, checksums: bool = False) -> Manifest:
    """Read and check an engine directory: every file is there with its size, and its sha256 if asked.

    Raises EngineFormatError that names the first fault.
    """
    path = engine_dir / MANIFEST_NAME
    if not path.is_file():
        raise EngineFormatError(
            f"{engine_dir}: no {MANIFEST_NAME}: not an engine directory; make one with `trtforge build`"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise EngineFormatError(f"{path}: cannot be read: {e}") from e
    manifest = Manifest.from_json(text, str(path))
    for name, entry in manifest.files.items():
        file = engine_dir / name
        if not file.is_file():
            raise EngineFormatError(f"{file}: missing; build the engine again")
        if file.stat().st_size != entry.bytes:
            raise EngineFormatError(
                f"{file}: {file.stat().st_size} bytes, not the {entry.bytes} of the manifest; build it again"
            )
        if checksums and sha256(file) != entry.sha256:
            raise EngineFormatError(f"{file}: its sha256 is not the manifest's; build the engine again")
    return manifest


def sha256(file: Path) -> str:
    with file.open("rb") as f:
        digest = hashlib.sha256()
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
