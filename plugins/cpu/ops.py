"""The ops that only a graph lowered for the CPU target has; they have kernels and no function bodies."""

from trtforge.plugins.opdef import Attribute, OpDef, Port

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
    doc="QuantEmbedding on weights in that layout, which a PackedLinear may share.",
    inputs=(
        Port("token_ids", "INT32", ("T",), "the rows that are wanted, each below out_features"),
        Port("weights", "UINT8", ("row_blocks", "block_bytes"), "packed codes, scales and minimums"),
    ),
    outputs=(Port("y", "FLOAT", ("T", "in_features"), "as QuantEmbedding's"),),
    attributes=tuple(a for a in PACKED_LINEAR.attributes if a.name != "activation_bits"),
    body=None,
)

CPU_OPS: dict[str, OpDef] = {op.name: op for op in (PACKED_EMBEDDING, PACKED_LINEAR)}
