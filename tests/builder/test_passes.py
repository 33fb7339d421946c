"""Passes: weight-only quantization against its definition, and the verifier against broken graphs."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from checkpoints import prompt_ids
from graph_runner import GraphRunner

from trtforge.builder.blocks import INT8_PER_CHANNEL, BlockFormat, format_of, round_to_blocks
from trtforge.builder.checkpoint import Checkpoint, open_checkpoint
from trtforge.builder.graph import build_graph, lazy_weights, save_graph
from trtforge.builder.passes import run_passes
from trtforge.builder.passes.fuse_projections import fuse_projections
from trtforge.builder.passes.verify import GraphError, verify
from trtforge.builder.spec import QuantSpec
from trtforge.builder.translate import Translation, translate
from trtforge.plugins import DOMAIN

INT8 = QuantSpec("int8_wo", "int8", 0, True)
INT4 = QuantSpec("int4_wo", "int4", 128, False)
AS_IS = QuantSpec("as_is", "as_is")

FORMATS = [
    BlockFormat(bits, group, symmetric) for bits in (8, 4) for group in (0, 32) for symmetric in (True, False)
]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_a_weight_is_off_by_at_most_half_a_step(fmt: BlockFormat, rng: np.random.Generator) -> None:
    weight = (rng.standard_normal((24, 64)) + 0.3).astype(np.float32)
    weight[3] = 0.0
    weight[5] = np.linspace(2.0, 3.0, 64)  # groups on one side of zero
    blocks = round_to_blocks(weight, fmt)
    assert blocks.scales.shape == (24, 2 if fmt.group_size else 1) and (blocks.scales > 0).all()
    assert (blocks.minimums is None) == fmt.symmetric
    step = np.repeat(blocks.scales, fmt.group_size or 64, axis=1)
    # with minimums, the zero is rounded to a step too
    bound = 0.5 if fmt.symmetric else 1.0
    assert (np.abs(blocks.values() - weight) <= bound * step * (1 + 1e-5)).all()
    assert (blocks.values()[3] == 0).all(), "zero is exact"
    used = np.unique(blocks.codes.astype(np.int32))
    assert used.min() >= (-(2 ** (fmt.bits - 1)) if fmt.symmetric else 0)
    assert len(used) > 0.8 * min(2**fmt.bits, 128), "all levels are in use"


def test_rounding_does_not_depend_on_the_slab(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = rng.standard_normal((24, 64)).astype(np.float32)
    whole = round_to_blocks(weight, BlockFormat(4, 32, False))
    monkeypatch.setattr("trtforge.builder.blocks._SLAB", 5 * 64)
    np.testing.assert_array_equal(round_to_blocks(weight, BlockFormat(4, 32, False)).values(), whole.values())


def test_groups_are_the_largest_that_divide() -> None:
    found = [format_of(INT4, "layers.0.mlp.up.weight", columns, None) for columns in (1536, 576, 96)]
    assert [fmt and fmt.group_size for fmt in found] == [128, 64, 32]
    assert format_of(INT4, "layers.0.mlp.up.weight", 40, None) is None
    own = format_of(QuantSpec("own", "int4", 32, True), "layers.0.mlp.up.weight", 128, None)
    assert own == BlockFormat(4, 32, True, exact=False)


def test_the_head_keeps_eight_bits() -> None:
    assert format_of(INT4, "lm_head.weight", 128, None) == INT8_PER_CHANNEL
    assert format_of(INT4, "embedding.weight", 128, None) == INT8_PER_CHANNEL


def test_as_is_takes_what_is_stored() -> None:
    stored = BlockFormat(4, 32, False, "FLOAT16")
    assert format_of(AS_IS, "lm_head.weight", 64, stored) == stored
    assert format_of(AS_IS, "lm_head.weight", 64, None) is None


@pytest.fixture
def opened(tiny_checkpoint: Callable[[str], Path]) -> Callable[[str], tuple[Translation, Checkpoint]]:
    def make(variant: str) -> tuple[Translation, Checkpoint]:
        checkpoint = open_checkpoint(tiny_checkpoint(variant))
        return translate(checkpoint, 64), checkpoint

    return make


def graph_of(translation: Translation, checkpoint: Checkpoint, kv_dtype: str = "fp32") -> ir.Model:
    kv = translation.spec.kv_layout(kv_dtype, 8)
    return build_graph(translation.spec, lazy_weights(translation, checkpoint), kv)


@pytest.mark.parametrize("quant", [INT8, INT4, QuantSpec("own", "int8", 32, False)], ids=lambda q: q.name)
@pytest.mark.parametrize("variant", ["llama-bias", "llama-tied"])
def test_a_quantized_graph_computes_with_the_rounded_weights(
    variant: str, quant: QuantSpec, opened: Callable[[str], tuple[Translation, Checkpoint]], tmp_path: Path
) -> None:
    """The same logits as a plain graph whose weights were rounded beforehand."""
    translation, checkpoint = opened(variant)
    spec = translation.spec
    graph = graph_of(translation, checkpoint)
    quantized = run_passes(graph, quant)
    save_graph(quantized, tmp_path / "model.onnx")
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)

    rounded = dict(lazy_weights(translation, checkpoint))
    linears = {n.inputs[1].name or "" for n in graph.graph if n.op_type == "Gemm" and n.inputs[1]}
    for name in sorted(linears | {"embedding.weight"}):
        weight = rounded[name].numpy()
        fmt = format_of(quant, name, weight.shape[1], None)
        assert fmt
        rounded[name] = ir.tensor(round_to_blocks(weight, fmt).values(), name=name)
    kv = spec.kv_layout("fp32", 8)
    prompt = prompt_ids(20)
    found, expected, plain = (
        GraphRunner(g, spec, kv, max_seq_len=32).step({0: prompt})[0]
        for g in (tmp_path / "model.onnx", build_graph(spec, rounded, kv), graph)
    )
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(found - plain).max() > 1e-2, "nothing was rounded"


def test_the_plain_graph_is_left_as_it_is(opened: Callable[[str], tuple[Translation, Checkpoint]]) -> None:
    graph = graph_of(*opened("llama-tied"))
    before = [(n.name, [v.name for v in n.inputs if v]) for n in graph.graph]
    run_passes(graph, INT4)
    assert [(n.name, [v.name for v in n.inputs if v]) for n in graph.graph] == before
    assert all("scale" not in name for name in graph.graph.initializers)


def test_excluded_linears_stay_as_they_are(opened: Callable[[str], tuple[Translation, Checkpoint]]) -> None:
    quant = QuantSpec("own", "int8", 0, True, exclude=("lm_head", "layers.0.mlp.down"))
    initializers = run_passes(graph_of(*opened("llama")), quant).graph.initializers
    kept = {n for n, v in initializers.items() if n.endswith(".weight") and v.dtype == ir.DataType.FLOAT}
    assert {"lm_head.weight", "layers.0.mlp.down.weight", "embedding.weight"} == {
        n for n in kept if "norm" not in n
    }
    assert initializers["layers.1.mlp.down.weight.codes"].dtype == ir.DataType.INT8


def test_a_tied_embedding_is_stored_once(opened: Callable[[str], tuple[Translation, Checkpoint]]) -> None:
    graph = run_passes(graph_of(*opened("llama-tied")), INT4).graph
    codes = graph.initializers["embedding.weight.codes"]
    assert codes.dtype == ir.DataType.INT8
    assert {(use.node.name, use.node.op_type) for use in codes.uses()} == {
        ("embedding", "QuantEmbedding"),
        ("lm_head", "QuantLinear"),
    }
    assert "embedding.weight" not in graph.initializers


@pytest.mark.parametrize("variant", ["llama", "llama-bias", "phi3", "qwen2"])
def test_joined_projections_compute_the_same(
    variant: str, opened: Callable[[str], tuple[Translation, Checkpoint]]
) -> None:
    translation, checkpoint = opened(variant)
    plain = graph_of(translation, checkpoint)
    joined = fuse_projections(plain)
    verify(joined, after="pass fuse_projections")
    names = {n.name for n in joined.graph if n.op_type == "Gemm"}
    assert {"layers.0.attention.q+k+v", "layers.1.mlp.gate+up"} <= names
    assert len(names) == 4 * translation.spec.num_layers + 1
    prompt = prompt_ids(20)
    kv = translation.spec.kv_layout("fp32", 8)
    found, wanted = (
        GraphRunner(g, translation.spec, kv, max_seq_len=32).step({0: prompt})[0] for g in (joined, plain)
    )
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_only_linears_that_are_values_are_joined(
    opened: Callable[[str], tuple[Translation, Checkpoint]],
) -> None:
    quant = QuantSpec("own", "int8", 0, True, exclude=("layers.0.attention.q", "layers.0.attention.v"))
    names = {n.name for n in run_passes(graph_of(*opened("llama")), quant).graph}
    assert {"layers.0.attention.q+v", "layers.0.attention.k", "layers.0.mlp.gate", "layers.0.mlp.up"} <= names


# The verifier


def _node(model: ir.Model, name: str) -> ir.Node:
    return next(n for n in model.graph if n.name == name)


def _same_node_name(m: ir.Model) -> None:
    _node(m, "layers.0.mlp.up").name = "layers.0.mlp.gate"


def _same_value_name(m: ir.Model) -> None:
    _node(m, "layers.0.mlp.up").outputs[0].name = "layers.0.mlp.gate"


def _foreign_domain(m: ir.Model) -> None:
    _node(m, "layers.0.mlp.up").domain = "com.example"


def _unknown_op(m: ir.Model) -> None:
    _node(m, "layers.1.attention.paged_attention").op_type = "PagedAttentionV2"


def _unused_input(m: ir.Model) -> None:
    m.graph.inputs.append(ir.val("left_over", ir.DataType.INT32, ["T"]))


def _unused_initializer(m: ir.Model) -> None:
    value = ir.val("left_over", ir.DataType.FLOAT, [1], const_value=ir.tensor(np.zeros(1, np.float32)))
    m.graph.register_initializer(value)


def _dead_end(m: ir.Model) -> None:
    node = _node(m, "layers.0.mlp.residual")
    node.replace_input_with(1, node.inputs[0])


def _used_before_made(m: ir.Model) -> None:
    node = _node(m, "layers.0.attention.q")
    m.graph.remove(node)
    m.graph.insert_after(_node(m, "layers.0.attention.paged_attention"), node)


def _wrong_type(m: ir.Model) -> None:
    next(v for v in m.graph.inputs if v.name == "positions").dtype = ir.DataType.INT64


def _wrong_rank(m: ir.Model) -> None:
    next(v for v in m.graph.inputs if v.name == "block_tables.0").shape = ir.Shape(["B"])


def _wrong_size(m: ir.Model) -> None:
    _node(m, "layers.0.attention.q").outputs[0].shape = ir.Shape(["T", 63])


def _missing_attribute(m: ir.Model) -> None:
    del _node(m, "layers.0.attention.paged_attention").attributes["scale"]


def _too_few_inputs(m: ir.Model) -> None:
    node = _node(m, "layers.0.attention.paged_attention")
    node.resize_inputs(len(node.inputs) - 1)


def _no_body(m: ir.Model) -> None:
    m.functions.pop((DOMAIN, "KVCacheUpdate", ""))


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (_same_node_name, "two nodes are named 'layers.0.mlp.gate'"),
        (_same_value_name, "two values are named 'layers.0.mlp.gate'"),
        (_foreign_domain, "node 'layers.0.mlp.up': domain 'com.example'"),
        (_unknown_op, "node 'layers.1.attention.paged_attention': there is no op 'PagedAttentionV2'"),
        (_unused_input, "input 'left_over' is used by no node"),
        (_unused_initializer, "initializer 'left_over' is used by no node"),
        (_dead_end, "node 'layers.0.mlp.down': its output 'layers.0.mlp.down' is used by no node"),
        (_used_before_made, "node 'layers.0.attention.kv_cache_update': input 0 ('layers.0.attention.q')"),
        (
            _wrong_type,
            "node 'layers.0.attention.paged_attention': positions ('positions') is INT64, want INT32",
        ),
        (_wrong_rank, "node 'layers.0.attention.paged_attention': PagedAttention: block_tables has rank 1"),
        (_wrong_size, "node 'layers.0.attention.kv_cache_update': KVCacheUpdate: q has shape"),
        (_missing_attribute, "node 'layers.0.attention.paged_attention': PagedAttention: attribute 'scale'"),
        (_too_few_inputs, "node 'layers.0.attention.paged_attention': 5 inputs, want 6"),
        (_no_body, "node 'layers.0.attention.kv_cache_update': the model has no function body"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_a_broken_rule_is_named_with_its_node(
    spoil: Callable[[ir.Model], None],
    named: str,
    opened: Callable[[str], tuple[Translation, Checkpoint]],
) -> None:
    graph = graph_of(*opened("llama"))
    verify(graph, after="nothing")
    spoil(graph)
    with pytest.raises(GraphError) as error:
        verify(graph, after="pass spoil")
    assert str(error.value).startswith("graph is broken after pass spoil: ")
    assert named in str(error.value)
