"""The lowering for OpenVINO: pools become plain inputs of bytes; what it computes is tested through built engines."""

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest

from trtforge.builder.checkpoint import open_checkpoint
from trtforge.builder.graph import build_graph, lazy_weights
from trtforge.builder.targets.cpu import lower
from trtforge.builder.translate import translate
from trtforge.plugins import DOMAIN
from trtforge.plugins.kv_dtypes import KV_DTYPES


@pytest.fixture
def graph(request: pytest.FixtureRequest, tiny_checkpoint: Callable[[str], Path]) -> ir.Model:
    """Two groups of two layers each."""
    checkpoint = open_checkpoint(tiny_checkpoint("qwen2-window"))
    translation = translate(checkpoint, 64)
    kv = translation.spec.kv_layout(request.param, 8)
    return build_graph(translation.spec, lazy_weights(translation, checkpoint), kv)


def ops(model: ir.Model, op_type: str) -> list[ir.Node]:
    return [node for node in model.graph if (node.domain, node.op_type) == (DOMAIN, op_type)]


@pytest.mark.parametrize("graph", KV_DTYPES, indirect=True)
def test_no_pool_is_an_output_and_all_ops_read_the_input_itself(graph: ir.Model) -> None:
    lowered = lower(graph)
    assert [o.name for o in lowered.graph.outputs] == ["logits"]
    assert not lowered.functions
    pools = {i.name: i for i in lowered.graph.inputs if i.name.startswith(("kv_pool", "kv_scales"))}
    dtype = KV_DTYPES[ops(graph, "KVCacheUpdate")[0].attributes["kv_dtype"].as_string()]
    assert len(pools) == 2 * (2 if dtype.scales else 1)
    for name, pool in pools.items():
        users = [use.node.op_type for use in pool.uses()]
        assert sorted(users) == ["KVCacheUpdate"] * 2 + ["PagedAttention"] * 2
        if name.startswith("kv_pool"):
            assert pool.dtype == ir.DataType.UINT8
            assert list(pool.shape)[1:] == [2, 2, 2, 8, 16 * dtype.bytes]
            assert isinstance(pool.shape[0], ir.SymbolicDim)
    assert [len(node.outputs) for node in ops(lowered, "KVCacheUpdate")] == [1] * 4
    for update, attention in zip(ops(lowered, "KVCacheUpdate"), ops(lowered, "PagedAttention"), strict=True):
        assert attention.inputs[0] is update.outputs[0], "the rotated q orders the write before the read"
        assert attention.inputs[1] is update.inputs[5]


@pytest.mark.parametrize("graph", ["int8"], indirect=True)
def test_plain_graph_is_left_as_it_was(graph: ir.Model) -> None:
    before = ir.to_proto(graph).SerializeToString(deterministic=True)
    lower(graph)
    assert ir.to_proto(graph).SerializeToString(deterministic=True) == before
