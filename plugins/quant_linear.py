"""QuantLinear: a linear layer whose weights are integers in groups."""

from trtforge.plugins.kv_dtypes import KVDtype
from trtforge.plugins.opdef import ACTIVATION, Attribute, OpDef, Port

#: Activations are quantized in groups of this many elements of a row, and groups of weights are multiples of it.
ACTIVATION_GROUP = 32

#: Activations in groups of 32: code = round(x / unit), half to even, unit = absmax / 127; a group whose absmax is
#: below 1e-30 is zeros, so that no unit is subnormal.
_ACTIVATIONS = """\
minus_one = Constant <value_ints = [-1]> ()
one = Constant <value_ints = [1]> ()
group = Constant <value_ints = [32]> ()
x_float = Cast <to = 1> (x)
x_shape = Shape (x)
x_rows = Shape <start = 0, end = 1> (x)
x_columns = Shape <start = 1, end = 2> (x)
x_groups = Div (x_columns, group)
x_grouped_shape = Concat <axis = 0> (x_rows, x_groups, group)
x_grouped = Reshape (x_float, x_grouped_shape)
x_size = Abs (x_grouped)
x_largest = ReduceMax <keepdims = 1> (x_size, minus_one)
least = Constant <value_float = 1.0e-30> ()
is_some = GreaterOrEqual (x_largest, least)
most = Constant <value_float = 127.0> ()
x_unit_or_less = Div (x_largest, most)
one_float = Constant <value_float = 1.0> ()
x_unit = Where (is_some, x_unit_or_less, one_float)
x_ratio = Div (x_grouped, x_unit)
x_code = Round (x_ratio)
x_rounded_grouped = Mul (x_code, x_unit)
x_rounded = Reshape (x_rounded_grouped, x_shape)
activation_bits = Constant <value_int: int = @activation_bits> ()
eight = Constant <value_int = 8> ()
is_rounded = Equal (activation_bits, eight)
x_used = Where (is_rounded, x_rounded, x_float)
"""

#: weight = code * scale + minimum, in fp32.
_WEIGHTS = """\
group_size_0d = Constant <value_int: int = @group_size> ()
group_size = Reshape (group_size_0d, one)
codes_shape = Shape (codes)
num_outputs = Shape <start = 0, end = 1> (codes)
codes_grouped_shape = Concat <axis = 0> (num_outputs, minus_one, group_size)
codes_float = Cast <to = 1> (codes)
codes_grouped = Reshape (codes_float, codes_grouped_shape)
scales_float = Cast <to = 1> (scales)
scales_3d = Unsqueeze (scales_float, minus_one)
minimums_float = Cast <to = 1> (minimums)
minimums_3d = Unsqueeze (minimums_float, minus_one)
weight_scaled = Mul (codes_grouped, scales_3d)
weight_grouped = Add (weight_scaled, minimums_3d)
weight = Reshape (weight_grouped, codes_shape)
weight_transposed = Transpose <perm = [1, 0]> (weight)
product = MatMul (x_used, weight_transposed)
biased = Add (product, bias)
y = CastLike (biased, x)"""


def _body(_: KVDtype) -> str:
    return _ACTIVATIONS + _WEIGHTS


QUANT_LINEAR = OpDef(
    name="QuantLinear",
    doc="x times the transpose of codes * scales + minimums, plus a bias. With 8-bit activations each row of x is "
    "first rounded to int8 in groups of 32 elements: unit = absmax / 127, code = x / unit to nearest, ties to even. "
    "K and group_size are multiples of 32.",
    inputs=(
        Port("x", ACTIVATION, ("T", "K"), "activations"),
        Port("codes", "UINT4|INT4|UINT8|INT8", ("N", "K"), "integer weights"),
        Port("scales", "FLOAT16|FLOAT", ("N", "K / group_size"), "value of a code's unit, per group"),
        Port(
            "minimums",
            "FLOAT16|FLOAT",
            ("N", "K / group_size"),
            "value of code 0, per group, of scales' type; a zero [1, 1] for symmetric weights",
            broadcast=True,
        ),
        Port("bias", "FLOAT", ("N",), "added to each row; a zero [1] for none", broadcast=True),
    ),
    outputs=(Port("y", ACTIVATION, ("T", "N"), "x_used (codes * scales + minimums)^T + bias"),),
    attributes=(
        Attribute("group_size", int, "elements of a row of weights that share a scale; K: all of them"),
        Attribute("activation_bits", int, "8: int8 in groups of 32; 32: as they are", choices=(8, 32)),
    ),
    body=_body,
)
