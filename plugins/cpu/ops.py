"""The ops that only a graph lowered for the CPU target has; they have kernels and no function bodies."""

from dataclasses import replace

from trtforge.plugins.opdef import Attribute, OpDef, Port
from trtforge.plugins.paged_attention import PAGED_ATTENTION

PACKED_LINEAR = OpDef(
    name="PackedLinear",
    doc="QuantLinear on weights in the layout that the kernel reads (`plugins/cpu/packing.py`), FP32 activations.",
    inputs=(
        Port("x", "FLOAT", ("T", "in_features"), "activations"),
        Port("weights", "UINT8", ("row_blocks", "block_bytes"), "packed codes, scales and minimums"),
        Port("bias", "FLOAT", ("out_features",), "added to each row; a zero [1] for none", broadcast=True),
    ),
    outputs=(Port("y", "FLOAT", ("T", "out_features"), "as QuantLinear's"),),
    attributes=(
        Attribute("in_features", int, "K"),
        Attribute("out_features", int, "N"),
        Attribute("bits", int, "of a code", choices=(4, 8)),
        Attribute("zero_point", int, "the stored code of a weight 0 before its minimum", choices=(0, 8, 128)),
        Attribute("group_size", int, "as QuantLinear's"),
        Attribute("scale_bits", int, "of scales and minimums", choices=(16, 32)),
        Attribute("has_minimums", int, "1: there are minimums", choices=(0, 1)),
        Attribute("activation_bits", int, "as QuantLinear's", choices=(8, 32)),
    ),
    body=None,
)

PACKED_LINEAR_ADD = replace(
    PACKED_LINEAR,
    name="PackedLinearAdd",
    doc="PackedLinear with something added to its output: a residual stream.",
    inputs=(*PACKED_LINEAR.inputs, Port("added", "FLOAT", ("T", "out_features"), "added to the output")),
)

PACKED_EMBEDDING = OpDef(
    name="PackedEmbedding",
    doc="QuantEmbedding on weights in that layout, which a PackedLinear may share.",
    inputs=(
        Port("token_ids", "INT32", ("T",), "the rows that are wanted, each below out_features"),
        Port("weights", "UINT8", ("row_blocks", "block_bytes"), "packed codes, scales and minimums"),
    ),
    outputs=(Port("y", "FLOAT", ("T", "in_features"), "as QuantEmbedding's"),),
    attributes=tuple(a for a in PACKED_LINEAR.attributes if a.name != "activation_bits"),
    body=None,
)

_NORMALIZED = (
    Port("x", "FLOAT", ("T", "hidden_size"), "the residual stream"),
    Port("norm", "FLOAT", ("hidden_size",), "weight of the RMS norm that x goes through first"),
)
_EPSILON = Attribute("epsilon", float, "of the norm")
_ACTIVATION_BITS = Attribute("activation_bits", int, "as QuantLinear's, of every linear", choices=(8, 32))


def _weights(name: str) -> Port:
    return Port(name, "UINT8", (f"{name}_blocks", f"{name}_block_bytes"), "as PackedLinear's weights")


def _format(name: str) -> Attribute:
    return Attribute(
        f"{name}_format", str, "bits, zero_point, group_size, scale_bits and has_minimums, as PackedLinear's"
    )


PACKED_QKV = OpDef(
    name="PackedQkv",
    doc="The RMS norm before attention and the three linears of the normalized x.",
    inputs=(
        *_NORMALIZED,
        *(_weights(f"{name}_weights") for name in "qkv"),
        *(
            Port(f"{name}_bias", "FLOAT", (size,), "a zero [1] for none", broadcast=True)
            for name, size in (("q", "q_size"), ("k", "kv_size"), ("v", "kv_size"))
        ),
    ),
    outputs=(
        Port("q", "FLOAT", ("T", "q_size"), "queries"),
        Port("k", "FLOAT", ("T", "kv_size"), "keys"),
        Port("v", "FLOAT", ("T", "kv_size"), "values"),
    ),
    attributes=(
        Attribute("hidden_size", int, "elements of a row of x"),
        Attribute("q_size", int, "num_heads * head_size"),
        Attribute("kv_size", int, "num_kv_heads * head_size"),
        *map(_format, "qkv"),
        _EPSILON,
        _ACTIVATION_BITS,
    ),
    body=None,
)

PACKED_MLP = OpDef(
    name="PackedMlp",
    doc="x + down(activation(gate(n)) * up(n)), n the RMS norm of x; linears without biases.",
    inputs=(*_NORMALIZED, *(_weights(name) for name in ("gate", "up", "down"))),
    outputs=(Port("y", "FLOAT", ("T", "hidden_size"), "the residual stream after the MLP"),),
    attributes=(
        Attribute("hidden_size", int, "elements of a row of x"),
        Attribute("intermediate_size", int, "outputs of gate and up; a multiple of 32"),
        *map(_format, ("gate", "up", "down")),
        Attribute("activation", str, "of the gate", choices=("silu", "gelu_tanh")),
        _EPSILON,
        _ACTIVATION_BITS,
    ),
    body=None,
)

_ROW = ("num_blocks", "layers", 2, "num_kv_heads", "tokens_per_block")
_LINEARS = ("q", "k", "v", "o", "gate", "up", "down")

PACKED_LAYER = OpDef(
    name="PackedLayer",
    doc="A decoder layer: PackedQkv, KVCacheUpdate, PagedAttention, a linear with the residual, and PackedMlp.",
    inputs=(
        Port("x", "FLOAT", ("T", "hidden_size"), "the residual stream"),
        Port("attention_norm", "FLOAT", ("hidden_size",), "weight of the RMS norm before attention"),
        Port("mlp_norm", "FLOAT", ("hidden_size",), "weight of the RMS norm before the MLP"),
        *(_weights(f"{name}_weights") for name in _LINEARS),
        Port("q_bias", "FLOAT", ("num_heads * head_size",), "a zero [1] for none", broadcast=True),
        Port("k_bias", "FLOAT", ("num_kv_heads * head_size",), "a zero [1] for none", broadcast=True),
        Port("v_bias", "FLOAT", ("num_kv_heads * head_size",), "a zero [1] for none", broadcast=True),
        Port("o_bias", "FLOAT", ("hidden_size",), "a zero [1] for none", broadcast=True),
        Port("cos_sin", "FLOAT", ("T", "R"), "as KVCacheUpdate's"),
        Port("slot_mapping", "INT64", ("T",), "as KVCacheUpdate's"),
        Port("positions", "INT32", ("T",), "as PagedAttention's"),
        Port("query_start", "INT32", ("B+1",), "as PagedAttention's"),
        Port("kv_lengths", "INT32", ("B",), "as PagedAttention's"),
        Port("block_tables", "INT32", ("B", "max_blocks"), "as PagedAttention's"),
        Port("kv_pool", "UINT8", (*_ROW, "row_bytes"), "the cache, written in place"),
        Port("kv_scales", "FLOAT", (*_ROW, 1), "of a quantized cache, written in place", quantized=True),
    ),
    outputs=(Port("y", "FLOAT", ("T", "hidden_size"), "the residual stream after the layer"),),
    attributes=(
        *PAGED_ATTENTION.attributes,
        Attribute("hidden_size", int, "elements of a row of x"),
        Attribute("intermediate_size", int, "outputs of gate and up; a multiple of 32"),
        *map(_format, _LINEARS),
        Attribute("activation", str, "of the gate", choices=("silu", "gelu_tanh")),
        Attribute("epsilon", float, "of both norms"),
        _ACTIVATION_BITS,
    ),
    body=None,
)

CPU_OPS: dict[str, OpDef] = {
    op.name: op
    for op in (PACKED_EMBEDDING, PACKED_LINEAR, PACKED_LINEAR_ADD, PACKED_QKV, PACKED_MLP, PACKED_LAYER)
}
