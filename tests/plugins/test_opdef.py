"""The declarations: everything derived from them is checked against the thing itself."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import paged
import pytest

from trtforge.plugins import DOMAIN, OPS
from trtforge.plugins.docs import markdown
from trtforge.plugins.errors import InvalidArgument
from trtforge.plugins.kv_dtypes import KV_DTYPES
from trtforge.plugins.opdef import OpDef

UPDATE, ATTENTION = OPS["KVCacheUpdate"], OPS["PagedAttention"]
ATTRIBUTES: dict[str, Any] = {
    "layer": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_size": 8,
    "kv_dtype": "int8",
}


def update_inputs(**shapes: list[int | str]) -> dict[str, ir.Value]:
    """Inputs of a KVCacheUpdate that fit ATTRIBUTES, some shapes replaced."""
    pool: list[int | str] = ["num_blocks", 3, 2, 2, 16]
    inputs: dict[str, tuple[ir.DataType, list[int | str]]] = {
        "q": (ir.DataType.FLOAT16, ["T", 32]),
        "k": (ir.DataType.FLOAT16, ["T", 16]),
        "v": (ir.DataType.FLOAT16, ["T", 16]),
        "cos_sin": (ir.DataType.FLOAT, ["T", 8]),
        "slot_mapping": (ir.DataType.INT64, ["T"]),
        "kv_pool": (ir.DataType.INT8, [*pool, 8]),
        "kv_scales": (ir.DataType.FLOAT, [*pool, 1]),
    }
    return {
        name: ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shapes.get(name, shape)))
        for name, (dtype, shape) in inputs.items()
    }


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("op", [OPS[name] for name in paged.PAGED_OPS], ids=paged.PAGED_OPS)
def test_onnx_accepts_every_body(op: OpDef, kv_dtype: str) -> None:
    case = paged.Case(kv_dtype=kv_dtype)
    onnx.checker.check_model(paged.body_model(op.name, case), full_check=True)
    function = op.function(kv_dtype)
    inputs, outputs = op.ports(kv_dtype)
    assert (function.domain, function.name) == (DOMAIN, op.name)
    assert list(function.input) == [p.name for p in inputs]
    assert list(function.output) == [p.name for p in outputs]
    assert list(function.attribute) == [a.name for a in op.attributes]


def test_node_has_typed_and_shaped_outputs() -> None:
    node = UPDATE.node(update_inputs(), ATTRIBUTES, outputs=["q1", "pool1", "scales1"])
    q, pool, scales = node.outputs
    assert [o.name for o in node.outputs] == ["q1", "pool1", "scales1"]
    assert q.dtype == ir.DataType.FLOAT16 and q.shape is not None and q.shape[1] == 32
    assert pool.dtype == ir.DataType.INT8 and pool.shape is not None and pool.shape[1:] == (3, 2, 2, 16, 8)
    assert scales.dtype == ir.DataType.FLOAT and scales.shape is not None and scales.shape[5] == 1
    assert str(q.shape[0]) == "T" and str(pool.shape[0]) == "num_blocks"


def test_node_fills_in_defaults() -> None:
    values = ATTENTION.complete({**ATTRIBUTES, "scale": 1})
    assert (values["window"], values["softcap"], values["scale"]) == (0, 0.0, 1.0)
    assert list(values) == [a.name for a in ATTENTION.attributes]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": None}, "attribute 'layer' is missing"),
        ({"layers": 1}, "no attribute 'layers'"),
        ({"num_heads": 4.0}, "num_heads=4.0 must be int"),
        ({"kv_dtype": "fp4"}, "unknown KV cache dtype 'fp4'"),
        ({"kv_dtype": "fp16"}, "inputs .*kv_scales.* want"),
        ({"num_heads": 8}, r"q has shape .* num_heads \* head_size = 64"),
    ],
)
def test_node_refuses_wrong_attributes(change: dict[str, Any], message: str) -> None:
    attributes = {k: v for k, v in {**ATTRIBUTES, **change}.items() if v is not None}
    with pytest.raises(InvalidArgument, match=message):
        UPDATE.node(update_inputs(), attributes)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"k": ["T", 24]}, "k has shape"),
        ({"kv_pool": ["num_blocks", 3, 2, 2, 8]}, "kv_pool has rank 5"),
        ({"kv_scales": ["num_blocks", 4, 2, 2, 16, 1]}, "kv_scales has shape .* layers = 3"),
        ({"slot_mapping": [7], "q": [9, 32]}, "slot_mapping has shape .* T = 9"),
    ],
)
def test_node_refuses_wrong_shapes(shapes: dict[str, list[int | str]], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        UPDATE.node(update_inputs(**shapes), ATTRIBUTES)


@pytest.mark.parametrize("op", paged.PAGED_OPS)
def test_the_cpp_op_has_the_declared_attributes(op: str) -> None:
    """Names and values, after the conversion from ONNX."""
    case = paged.Case(window=5, softcap=2.5)
    model = paged.read_lowered(op, case)
    node = next(n for n in model.get_ops() if n.get_type_name() == op)
    found = node.get_attributes()
    want = OPS[op].complete(case.attributes(op))
    assert set(found) == set(want)
    for name, value in want.items():
        assert found[name] == (pytest.approx(value) if isinstance(value, float) else value), name


def test_attributes_survive_openvinos_own_format(tmp_path: Path) -> None:
    import openvino

    case = replace(paged.Case(window=5, softcap=2.5, kv_dtype="fp8"))
    model = paged.read_lowered("PagedAttention", case)
    openvino.save_model(model, tmp_path / "model.xml", compress_to_fp16=False)
    again = paged.core().read_model(tmp_path / "model.xml")
    node = next(n for n in again.get_ops() if n.get_type_name() == "PagedAttention")
    assert node.get_attributes()["window"] == 5 and node.get_attributes()["kv_dtype"] == "fp8"
    assert np.isclose(node.get_attributes()["softcap"], 2.5)


def test_the_docs_are_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "ops.md"
    assert page.read_text() == markdown(), "run `python -m trtforge.plugins.docs > docs/ops.md`"


def test_declarations_need_no_heavy_import() -> None:
    code = (
        "import sys, trtforge.plugins.cpu, trtforge.plugins.docs\n"
        "print({'onnx', 'onnx_ir', 'numpy', 'openvino'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
