"""The ops that only a graph lowered for the CPU target has; they have kernels and no function bodies."""

from trtforge.plugins.opdef import Attribute, OpDef, Port
from trtforge.plugins.paged_attention import PAGED_ATTENTION

#: Goes up with every change of a declaration below: engines hold nodes of them.
CPU_OPS_VERSION = 2

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

PACKED_EMBEDDING = OpDef(
    name="PackedEmbedding",
    doc="QuantEmbedding on weights in that layout, which a PackedLinear or a PackedHead may share.",
    inputs=(
        Port("token_ids", "INT32", ("T",), "the rows that are wanted, each below out_features"),
        Port("weights", "UINT8", ("row_blocks", "block_bytes"), "packed codes, scales and minimums"),
    ),
    outputs=(Port("y", "FLOAT", ("T", "in_features"), "as QuantEmbedding's, times scale"),),
    attributes=(
        *(a for a in PACKED_LINEAR.attributes if a.name != "activation_bits"),
        Attribute("scale", float, "rows are multiplied by it", default=1.0),
    ),
    body=None,
)

_ROW = ("num_blocks", "layers", 2, "num_kv_heads", "tokens_per_block")
#: The linears of a PackedLayer, and the outputs of each.
LAYER_LINEARS = {
    "q": "num_heads * head_size",
    "k": "num_kv_heads * head_size",
    "v": "num_kv_heads * head_size",
    "o": "hidden_size",
    "gate": "intermediate_size",
    "up": "intermediate_size",
    "down": "hidden_size",
}

PACKED_LAYER = OpDef(
    name="PackedLayer",
    doc="A decoder layer: norm, the linears of q, k and v, KVCacheUpdate, PagedAttention, a linear and the residual; "
    "norm, down(activation(gate) * up) and the residual. What a model has none of is a zero [1].",
    inputs=(
        Port("x", "FLOAT", ("T", "hidden_size"), "the residual stream"),
        Port("attention_norm", "FLOAT", ("hidden_size",), "weight of the RMS norm before attention"),
        Port("mlp_norm", "FLOAT", ("hidden_size",), "weight of the RMS norm before the MLP"),
        *(
            Port(
                f"{n}_norm", "FLOAT", ("head_size",), f"of each head of {n}, before rotation", broadcast=True
            )
            for n in "qk"
        ),
        *(
            Port(
                f"{block}_post_norm",
                "FLOAT",
                ("hidden_size",),
                f"of the {what}'s output, before the residual is added",
                broadcast=True,
            )
            for block, what in (("attention", "attention"), ("mlp", "MLP"))
        ),
        *(
            Port(f"{n}_weights", "UINT8", (f"{n}_blocks", f"{n}_block_bytes"), "as PackedLinear's weights")
            for n in LAYER_LINEARS
        ),
        *(
            Port(f"{n}_bias", "FLOAT", (size,), "a zero [1] for none", broadcast=True)
            for n, size in LAYER_LINEARS.items()
        ),
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
        *(
            Attribute(
                f"{n}_format",
                str,
                "bits, zero_point, group_size, scale_bits and has_minimums, as PackedLinear's",
            )
            for n in LAYER_LINEARS
        ),
        Attribute("activation", str, "of the gate", choices=("silu", "gelu_tanh")),
        Attribute("epsilon", float, "of all norms"),
        Attribute("activation_bits", int, "as QuantLinear's, of every linear", choices=(8, 32)),
    ),
    body=None,
)

PACKED_HEAD = OpDef(
    name="PackedHead",
    doc="Logits of some rows: RMS norm, PackedLinear, softcap * tanh(y / softcap).",
    inputs=(
        Port("x", "FLOAT", ("T", "in_features"), "the residual stream after the last layer"),
        Port("logit_rows", "INT32", ("R",), "the rows of x that are wanted"),
        Port("norm", "FLOAT", ("in_features",), "weight of the last RMS norm"),
        Port("weights", "UINT8", ("row_blocks", "block_bytes"), "packed codes, scales and minimums"),
    ),
    outputs=(Port("logits", "FLOAT", ("R", "out_features"), "of row logit_rows[r], for each r"),),
    attributes=(
        *PACKED_LINEAR.attributes,
        Attribute("epsilon", float, "of the norm"),
        Attribute("softcap", float, "0: none", default=0.0),
    ),
    body=None,
)

#: The nodes of a graph that the native host runs, from tokens to logits.
NATIVE_OPS: dict[str, OpDef] = {op.name: op for op in (PACKED_EMBEDDING, PACKED_LAYER, PACKED_HEAD)}

CPU_OPS: dict[str, OpDef] = {PACKED_LINEAR.name: PACKED_LINEAR, **NATIVE_OPS}
