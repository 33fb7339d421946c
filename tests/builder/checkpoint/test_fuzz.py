"""Files damaged at random: reading one ends in success or in one of our errors, in little memory.

Run as a script in a process of its own, whose address space is bounded: a length that is believed shows as a
MemoryError, not as a slow test.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

CASES = 500
SPARE_BYTES = 256 << 20


def damage(data: bytearray, rng: np.random.Generator) -> bytearray:
    """One of: a few bits flipped, a number made huge, a piece doubled or cut out, the end cut off; headers most."""
    limit = len(data) if rng.random() < 0.2 else min(len(data), 12_000)
    at = int(rng.integers(limit))
    match int(rng.integers(5)):
        case 0:
            for _ in range(int(rng.integers(1, 6))):
                data[int(rng.integers(limit))] ^= 1 << int(rng.integers(8))
        case 1:
            huge = int(rng.choice([0, 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]).astype(np.uint64))
            data[at : at + 8] = huge.to_bytes(8, "little")
        case 2:
            data[at:at] = data[at : at + int(rng.integers(1, 64))]
        case 3:
            del data[at : at + int(rng.integers(1, 64))]
        case _:
            del data[at:]
    return data


def read_everything(source: Path) -> str:
    """The outcome: `read`, or the kind of error. Anything but ours is raised."""
    from trtforge.builder.checkpoint import open_checkpoint
    from trtforge.builder.translate import translate
    from trtforge.plugins.errors import CheckpointError, UnsupportedModel

    try:
        checkpoint = open_checkpoint(source)
        try:
            for name, info in checkpoint.tensors.items():
                assert checkpoint.read(name).shape == info.shape
            checkpoint.tokenizer()
            translate(checkpoint, 64)
        finally:
            checkpoint.close()
    except (CheckpointError, UnsupportedModel) as e:
        assert "\n" not in str(e), e
        return type(e).__name__
    return "read"


def fuzz(file: Path, source: Path) -> dict[str, int]:
    """Damage `file` in many ways; `source` is what is opened."""
    good, rng = file.read_bytes(), np.random.default_rng(11)
    outcomes = {"read": 0, "CheckpointError": 0, "UnsupportedModel": 0}
    assert read_everything(source) == "read"  # also imports and warms all that a case needs
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, resource.RLIM_INFINITY))
    for case in range(CASES):
        file.write_bytes(damage(bytearray(good), rng))
        try:
            outcomes[read_everything(source)] += 1
        except BaseException:
            print(f"case {case}", file=sys.stderr)
            raise
    return outcomes


@pytest.mark.parametrize("kind", ["safetensors", "gguf", "tokenizer.model"])
def test_damaged_files(kind: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    import gguf_files

    directory = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("llama"), directory)
    file, source = directory / "model.safetensors", directory
    if kind == "gguf":
        file = source = gguf_files.write(tmp_path / "m.gguf", directory, "Q8_0")
    elif kind == "tokenizer.model":
        (directory / "tokenizer.json").unlink()
        file = directory / "tokenizer.model"
        pieces = [(f"<0x{b:02X}>", 6) for b in range(256)] + [("<unk>", 2), ("a", 1), ("b", 1), ("ab", 1)]
        file.write_bytes(
            b"".join(
                b"\x0a"
                + bytes([len(t) + 9])
                + b"\x0a"
                + bytes([len(t)])
                + t.encode()
                + b"\x15\0\0\0\0\x18"
                + bytes([k])
                for t, k in pieces
            )
            + b"\x12\x02\x18\x02\x1a\x02\x20\x00"
        )
    run = subprocess.run(
        [sys.executable, __file__, str(file), str(source)],
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    outcomes = json.loads(run.stdout.splitlines()[-1])
    assert sum(outcomes.values()) == CASES
    assert outcomes["CheckpointError"] > CASES / 4 and outcomes["read"] > 0, outcomes


if __name__ == "__main__":
    print(json.dumps(fuzz(Path(sys.argv[1]), Path(sys.argv[2]))))
