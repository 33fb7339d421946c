"""QuantEmbedding: rows of a table of integers in groups, looked up."""

from trtforge.plugins.kv_dtypes import KVDtype
from trtforge.plugins.opdef import Attribute, OpDef, Port
from trtforge.plugins.quant_linear import QUANT_LINEAR


def _body(_: KVDtype) -> str:
    return """\
minus_one = Constant <value_ints = [-1]> ()
group_size_0d = Constant <value_int: int = @group_size> ()
group_size = Reshape (group_size_0d, minus_one)
codes_float = Cast <to = 1> (codes)
codes_shape = Shape (codes)
num_rows = Shape <start = 0, end = 1> (codes)
grouped_shape = Concat <axis = 0> (num_rows, minus_one, group_size)
grouped = Reshape (codes_float, grouped_shape)
scales_float = Cast <to = 1> (scales)
scales_3d = Unsqueeze (scales_float, minus_one)
minimums_float = Cast <to = 1> (minimums)
minimums_3d = Unsqueeze (minimums_float, minus_one)
scaled = Mul (grouped, scales_3d)
shifted = Add (scaled, minimums_3d)
table = Reshape (shifted, codes_shape)
y = Gather (table, token_ids)"""


QUANT_EMBEDDING = OpDef(
    name="QuantEmbedding",
    doc="Rows of codes * scales + minimums. The table may be a QuantLinear's too, that of a tied head.",
    inputs=(
        Port("token_ids", "INT32", ("T",), "the rows that are wanted"),
        *(port for port in QUANT_LINEAR.inputs if port.name in ("codes", "scales", "minimums")),
    ),
    outputs=(Port("y", "FLOAT", ("T", "K"), "row token_ids[t] of the table, for each t"),),
    attributes=(Attribute("group_size", int, "elements of a row that share a scale; K: all of them"),),
    body=_body,
)
