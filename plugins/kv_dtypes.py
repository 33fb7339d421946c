"""The cache types that a KV pool can hold: the one table that ops, manifest, plan and docs read.

Standard library only: the engine directory's format depends on it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class KVDtype:
    """How one K or V element lies in a pool.

    name: as on the command line; bytes: per element; scales: FP32 scales per token and KV head (0: not quantized);
    max: the largest magnitude that the quantized type holds (scale = absmax / max); onnx: the tensor type that
    carries the pool in an ONNX graph. ONNX Runtime scatters and gathers bfloat16 but not float8, so fp8 travels
    as INT8 bits, and so does int8. The CPU target carries every pool as bytes (see plugins/cpu).
    """

    name: str
    bytes: int
    onnx: str
    scales: int = 0
    max: float = 0.0


KV_DTYPES: dict[str, KVDtype] = {
    d.name: d
    for d in (
        KVDtype("fp32", 4, "FLOAT"),
        KVDtype("fp16", 2, "FLOAT16"),
        KVDtype("bf16", 2, "BFLOAT16"),
        KVDtype("int8", 1, "INT8", scales=1, max=127.0),
        KVDtype("fp8", 1, "INT8", scales=1, max=448.0),  # e4m3
    )
}

#: `--kv-cache-dtype auto`.
AUTO_KV_DTYPE = "fp16"
