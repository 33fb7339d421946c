"""Reading a checkpoint tensor by tensor takes the memory of one tensor, whatever the checkpoint's size."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROWS, COLUMNS, TENSORS = 2048, 2048, 12  # FP32: 16 MiB a tensor, 192 MiB in all
TENSOR_BYTES = 4 * ROWS * COLUMNS

# VmHWM is the process's own; ru_maxrss begins with that of the process that started it
READ_ALL = """
import re, sys
from pathlib import Path
from trtforge.builder.checkpoint import open_checkpoint
checkpoint = open_checkpoint(sys.argv[1])
checkpoint.read("warm")
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak()
for name in checkpoint.tensors:
    checkpoint.read(name)
print(peak() - before)
"""


def write(directory: Path, kind: str) -> Path:
    import gguf
    import torch
    from safetensors.torch import save_file

    if kind in ("F32", "BF16"):
        dtype = torch.float32 if kind == "F32" else torch.bfloat16
        weight_map = {}
        for i in range(TENSORS):
            file = f"model-{i % 4}.safetensors"
            weight_map[f"w{i}"] = file
        weight_map["warm"] = "model-0.safetensors"
        for file in set(weight_map.values()):
            names = [n for n, f in weight_map.items() if f == file]
            save_file(
                {n: torch.ones((64, 64) if n == "warm" else (ROWS, COLUMNS), dtype=dtype) for n in names},
                directory / file,
            )
        (directory / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return directory
    writer = gguf.GGUFWriter(directory / "m.gguf", "llama")
    for key, value in (("block_count", TENSORS), ("context_length", 64), ("embedding_length", COLUMNS)):
        writer.add_uint32(f"llama.{key}", value)
    for key, value in (("feed_forward_length", ROWS), ("attention.head_count", 16)):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    dtype = gguf.GGMLQuantizationType[kind]
    rows = np.zeros((ROWS, gguf.quant_shape_to_byte_shape((COLUMNS,), dtype)[-1]), np.uint8)
    writer.add_tensor("token_embd.weight", np.zeros((64, COLUMNS), np.float32))
    writer.add_tensor("warm", rows[:1], raw_dtype=dtype)
    for i in range(TENSORS):
        writer.add_tensor(f"blk.{i}.attn_q.weight", rows, raw_dtype=dtype)  # permuted, so copied once more
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return directory / "m.gguf"


@pytest.mark.parametrize(("kind", "copies"), [("F32", 1), ("BF16", 1), ("Q4_0", 2), ("Q4_K", 2)])
def test_peak_is_near_one_tensor(kind: str, copies: int, tmp_path: Path) -> None:
    """copies: a permuted tensor exists twice for a moment. The rest is the piece in work."""
    run = subprocess.run(
        [sys.executable, "-c", READ_ALL, str(write(tmp_path, kind))],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert int(run.stdout) < copies * TENSOR_BYTES + (16 << 20)
