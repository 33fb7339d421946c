"""manifest.json: what the builder writes is read back the same; damage is named here, never met later on."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trtforge.plugins.errors import EngineFormatError
from trtforge.runtime import manifest as manifest_format
from trtforge.runtime.manifest import Manifest

MISSING = object()


@pytest.fixture
def raw(tiny_engine: Callable[..., Path]) -> Any:
    return json.loads((tiny_engine("gemma3", max_seq_len=64) / "manifest.json").read_text())


def test_reading_gives_what_was_written(raw: Any) -> None:
    manifest = Manifest.from_json(json.dumps(raw))
    assert json.loads(manifest.to_json()) == raw
    assert manifest.kv.groups[0].window == 8
    assert isinstance(manifest.kv.groups[0].layers, tuple)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format_version", True, "engine format True"),
        ("format_version", 2, "engine format 2, this trtforge reads 1"),
        ("target", MISSING, "target is missing"),
        ("target", None, "target: None is not possible"),
        ("speed", 1, "unknown field 'speed'"),
        ("model", None, "model: None is not possible"),
        ("model.name", MISSING, "model: name is None, want str"),
        ("model.vocab_size", MISSING, "model: vocab_size is None, want int"),
        ("model.vocab_size", 0, "model: vocab_size 0 must be from 1"),
        ("model.num_layers", 5, "kv: groups hold 4 layers, not each of the model's once"),
        ("model.num_layers", 10**15, "kv: groups hold 4 layers, not each"),
        ("recipe", [], "recipe: [] is not possible"),
        ("versions", [], "versions: [] is not possible"),
        ("eos_token_ids", "x", "eos_token_ids: 'x' is not possible"),
        ("eos_token_ids.0", None, "eos_token_ids[0]: None is not possible"),
        ("bos_token_id", 1.5, "bos_token_id: 1.5 is not possible"),
        ("limits.max_seq_len", None, "limits: max_seq_len: None is not possible"),
        ("limits.max_seq_len", 0, "limits: max_seq_len 0 must be from 1 to 2147483647"),
        ("limits.max_num_tokens", 2**31, "limits: max_num_tokens 2147483648 must be from 1"),
        ("limits.max_batch_size", True, "limits: max_batch_size: True is not possible"),
        ("limits.max_users", 1, "limits: unknown field 'max_users'"),
        ("kv.dtype", "fp12", "kv: dtype 'fp12' is none of fp32"),
        ("kv.tokens_per_block", 0, "kv: tokens_per_block 0 must be from 1"),
        ("kv.groups", [], "kv: groups hold 0 layers"),
        ("kv.groups.0.layers.0", 3, "kv: groups hold 4 layers, not each"),
        ("kv.groups.0.kv_heads", 0, "kv: groups[0]: kv_heads 0 must be from 1"),
        ("kv.groups.1.head_size", -1, "kv: groups[1]: head_size -1 must be from 1"),
        ("kv.groups.1.head_size", "24", "kv: groups[1]: head_size: '24' is not possible"),
        ("kv.groups.0.window", -8, "kv: groups[0]: window -8 must be from 1"),
        ("ropes.0.attention_factor", math.nan, "ropes[0]: attention_factor: nan is not possible"),
        ("ropes.0.inv_freq.0", 10**400, "ropes[0]: inv_freq[0]: 1000"),
        ("files.model.xml", 5, "files: model.xml: 5 is not possible"),
        ("files.../../outside", {"bytes": 1, "sha256": ""}, "files: '../../outside' is not a file's name"),
    ],
)
def test_damage_is_named(raw: Any, path: str, value: Any, message: str) -> None:
    place, keys = raw, path.split(".", 1) if path.startswith("files.") else path.split(".")
    steps = [int(key) if key.isdecimal() else key for key in keys]
    for key in steps[:-1]:
        place = place[key]
    if value is MISSING:
        del place[steps[-1]]
    else:
        place[steps[-1]] = value
    with pytest.raises(EngineFormatError, match=rf"^here: {re.escape(message)}.*build the engine again"):
        Manifest.from_json(json.dumps(raw), "here")


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "5", "null", "9" * 5000])
def test_a_text_that_is_no_manifest(text: str) -> None:
    with pytest.raises(
        EngineFormatError, match=r"^here: (not JSON|not a JSON object).*build the engine again"
    ):
        Manifest.from_json(text, "here")


@pytest.mark.parametrize(
    "spoil", [lambda f: f.write_bytes(b"\xff{}"), lambda f: (f.unlink(), f.symlink_to("."))]
)
def test_a_file_that_cannot_be_read_as_text(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    file = tmp_path / "manifest.json"
    file.write_text("{}")
    spoil(file)
    with pytest.raises(EngineFormatError, match=r"manifest\.json"):
        manifest_format.load(tmp_path)
