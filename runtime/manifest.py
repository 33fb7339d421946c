"""The engine directory's format: `manifest.json` and the files that it vouches for.

This is the contract between builder and runtime, and the only module of the runtime that the builder imports.
Standard library only. An engine directory holds:

    manifest.json           this
    model.xml, model.bin    the compiled graph with its weights (target cpu)
    tokenizer.json          in the format of the `tokenizers` library
    tokenizer_config.json   bos/eos/pad tokens and whether BOS is added, in Hugging Face's terms
    chat_template.jinja     if the model has one
    generation_config.json  in Hugging Face's terms (eos_token_id may be a list)

It is written beside its final name and renamed at the end: an interrupted build leaves no half engine.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from trtforge.plugins.errors import EngineFormatError
from trtforge.plugins.kv_dtypes import KV_DTYPES

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"


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
    # name, source, family, architecture, vocab_size, hidden_size, num_layers, num_heads, num_parameters
    model: Mapping[str, Any]
    recipe: str
    kv: KVLayout
    limits: Limits
    ropes: tuple[Rope, ...]
    eos_token_ids: tuple[int, ...]  # the model's own list; may be empty
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    activations: str = "fp32"
    versions: Mapping[str, str] = field(default_factory=dict)  # trtforge, openvino, plugin hash, ...
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
        except ValueError as e:
            raise EngineFormatError(f"{where}: not JSON ({e}); build the engine again") from e
        if not isinstance(raw, dict):
            raise EngineFormatError(f"{where}: not a JSON object; build the engine again")
        if raw.get("format_version") != FORMAT_VERSION:
            raise EngineFormatError(
                f"{where}: engine format {raw.get('format_version')!r}, this trtforge reads {FORMAT_VERSION};"
                " build the engine again with this version"
            )
        unknown = set(raw) - {f.name for f in fields(cls)}
        if unknown:
            raise EngineFormatError(f"{where}: unknown field {sorted(unknown)[0]!r}; build the engine again")
        try:
            return cls(
                **{
                    **raw,
                    "kv": KVLayout(
                        raw["kv"]["dtype"],
                        raw["kv"]["tokens_per_block"],
                        tuple(KVGroup(**{**g, "layers": tuple(g["layers"])}) for g in raw["kv"]["groups"]),
                    ),
                    "limits": Limits(**raw["limits"]),
                    "ropes": tuple(Rope(tuple(r["inv_freq"]), r["attention_factor"]) for r in raw["ropes"]),
                    "eos_token_ids": tuple(raw["eos_token_ids"]),
                    "files": {k: FileEntry(**v) for k, v in raw["files"].items()},
                }
            )
        except (KeyError, TypeError, AttributeError) as e:
            raise EngineFormatError(f"{where}: damaged ({e!r}); build the engine again") from e


def load(engine_dir: Path, *, checksums: bool = False) -> Manifest:
    """Read and check an engine directory: every file is there with its size, and its sha256 if asked.

    Raises EngineFormatError that names the first fault.
    """
    path = engine_dir / MANIFEST_NAME
    if not path.is_file():
        raise EngineFormatError(
            f"{engine_dir}: no {MANIFEST_NAME}: not an engine directory; make one with `trtforge build`"
        )
    manifest = Manifest.from_json(path.read_text(), str(path))
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
