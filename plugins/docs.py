"""docs/ops.md, made from the declarations: `python -m trtforge.plugins.docs > docs/ops.md`. A test holds it current."""

from collections.abc import Sequence

from trtforge.plugins import DOMAIN, DOMAIN_VERSION, OPS, OPSET, OpDef
from trtforge.plugins.cpu.ops import CPU_OPS
from trtforge.plugins.kv_dtypes import KV_DTYPES
from trtforge.plugins.opdef import Port

_INTRODUCTION = f"""\
# Plugin ops

Ops of ONNX domain `{DOMAIN}`, version {DOMAIN_VERSION}. A model carries each op's ONNX function body (opset
{OPSET}), which is the op's definition: ONNX Runtime executes it, and an executor that has a kernel uses the kernel.
This page is generated from the declarations in `plugins/` (`python -m trtforge.plugins.docs > docs/ops.md`).

`activation` is any float type, the same for all ports of a node; arithmetic is in fp32. `kv_dtype` is the type that
carries the cache. T: tokens of the step; B: sequences; R: rotary dimension. Ports marked "quantized" exist for KV
dtypes with scales only; in those marked "broadcast" any dimension may be 1.

On the CPU target (`plugins/cpu`) activations are FP32, and a pool is a UINT8 input whose last dimension is
`head_size * bytes`; the ops write it in place and do not give it as an output.

## KV dtypes

Stored = x / scale, rounded to nearest, ties to even, saturated; loaded = stored * scale. The scale is absmax / max per
token and KV head, for K and V each; a row of zeros has scale 0.

"""
_CPU_OPS = """
# Ops of the CPU target

A graph lowered for the CPU has these in the place of others. They have kernels and no function bodies. OpenVINO runs
graphs with `PackedEmbedding` and `PackedLinear` among other ops; the native host runs chains of `PackedEmbedding`,
`PackedLayer`s and `PackedHead`, and nothing else.
"""


def markdown() -> str:
    """The whole page."""
    rows = [
        (f"`{d.name}`", str(d.bytes), f"`{d.onnx}`", str(d.scales), f"{d.max:g}" if d.scales else "")
        for d in KV_DTYPES.values()
    ]
    types = _table(("KV dtype", "bytes", "carried in ONNX as", "FP32 scales per token and head", "max"), rows)
    sections = [*map(_section, OPS.values()), _CPU_OPS, *map(_section, CPU_OPS.values())]
    return _INTRODUCTION + types + "".join(sections)


def _section(op: OpDef) -> str:
    attributes = [
        (f"`{a.name}`", a.type.__name__, "" if a.default is None else f"{a.default:g}", a.doc)
        for a in op.attributes
    ]
    return (
        f"\n## {op.name}\n\n{op.doc}\n\n"
        + _table(("input", "type", "shape", ""), [_port(p) for p in op.inputs])
        + "\n"
        + _table(("output", "type", "shape", ""), [_port(p) for p in op.outputs])
        + "\n"
        + _table(("attribute", "type", "default", ""), attributes)
    )


def _port(port: Port) -> tuple[str, ...]:
    shape = ", ".join(str(d) for d in port.shape)
    marks = [mark for mark in ("quantized", "broadcast") if getattr(port, mark)]
    doc = port.doc + (f" ({', '.join(marks)})" if marks else "")
    return f"`{port.name}`", port.dtype.replace("|", " or "), f"`[{shape}]`", doc


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    print(markdown(), end="")
