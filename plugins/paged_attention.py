"""PagedAttention: attention of packed queries over a paged cache."""

from trtforge.plugins.kv_cache_update import POOL, SCALES
from trtforge.plugins.kv_codec import decode
from trtforge.plugins.kv_dtypes import KVDtype
from trtforge.plugins.opdef import ACTIVATION, Attribute, OpDef, Port


def _fetch(pool: str, out: str) -> str:
    """`out` [2, num_kv_heads, B * L, row]: this layer's rows of every sequence's blocks, L = max_blocks *
    tokens_per_block positions each."""
    return f"""\
{pool}_layer = Gather <axis = 1> ({pool}, layer)
{pool}_pages = Gather <axis = 0> ({pool}_layer, block_tables)
{pool}_by_head = Transpose <perm = [2, 3, 0, 1, 4, 5]> ({pool}_pages)
{pool}_row_size = Shape <start = 5> ({pool})
{pool}_flat = Concat <axis = 0> (two, kv_heads, minus_one, {pool}_row_size)
{out} = Reshape ({pool}_by_head, {pool}_flat)
"""


_CONSTANTS = """\
minus_one = Constant <value_ints = [-1]> ()
zero = Constant <value_ints = [0]> ()
one = Constant <value_ints = [1]> ()
two = Constant <value_ints = [2]> ()
zero_0d = Constant <value_int = 0> ()
one_0d = Constant <value_int = 1> ()
zero_float = Constant <value_float = 0.0> ()
one_float = Constant <value_float = 1.0> ()
layer = Constant <value_int: int = @layer> ()
kv_heads_0d = Constant <value_int: int = @num_kv_heads> ()
kv_heads = Reshape (kv_heads_0d, one)
heads_0d = Constant <value_int: int = @num_heads> ()
heads = Reshape (heads_0d, one)
head_size_0d = Constant <value_int: int = @head_size> ()
head_size = Reshape (head_size_0d, one)
"""

#: Every key position of every sequence, back to back: B * L of them. Positions that hold nothing yet, and the padding
#: of block tables, read as zeros whatever the slots hold.
_KEYS = """\
num_keys_1d = Shape <start = 2, end = 3> (decode_in)
num_keys = Squeeze (num_keys_1d, zero)
max_blocks = Shape <start = 1, end = 2> (block_tables)
tokens_per_block = Shape <start = 4, end = 5> (kv_pool)
max_length = Mul (max_blocks, tokens_per_block)
key = Range (zero_0d, num_keys, one_0d)
key_sequence = Div (key, max_length)
key_position = Mod (key, max_length)
lengths = Cast <to = 7> (kv_lengths)
key_length = Gather (lengths, key_sequence)
key_written = Less (key_position, key_length)
key_written_2d = Unsqueeze (key_written, one)
kv = Where (key_written_2d, decode_out, zero_float)
k = Gather <axis = 0> (kv, zero_0d)
v = Gather <axis = 0> (kv, one_0d)
"""

#: [num_kv_heads, T, group, B * L], group = num_heads / num_kv_heads; softcap * tanh(score / softcap) where it is > 0.
_SCORES = """\
q_float = Cast <to = 1> (q)
num_rows = Shape <start = 0, end = 1> (q)
group = Div (heads, kv_heads)
q_shape = Concat <axis = 0> (num_rows, kv_heads, group, head_size)
q_heads = Reshape (q_float, q_shape)
q_by_head = Transpose <perm = [1, 0, 2, 3]> (q_heads)
q_rows_shape = Concat <axis = 0> (kv_heads, minus_one, head_size)
q_rows = Reshape (q_by_head, q_rows_shape)
k_transposed = Transpose <perm = [0, 2, 1]> (k)
products = MatMul (q_rows, k_transposed)
scale = Constant <value_float: float = @scale> ()
scaled = Mul (products, scale)
cap = Constant <value_float: float = @softcap> ()
is_capped = Greater (cap, zero_float)
cap_divisor = Where (is_capped, cap, one_float)
cap_ratio = Div (scaled, cap_divisor)
cap_tanh = Tanh (cap_ratio)
cap_scores = Mul (cap_tanh, cap_divisor)
scores_3d = Where (is_capped, cap_scores, scaled)
scores_shape = Concat <axis = 0> (kv_heads, num_rows, group, num_keys_1d)
scores = Reshape (scores_3d, scores_shape)
"""

#: A query at position p of sequence s sees the keys of s at p - window + 1 .. p.
_MASK = """\
starts = Cast <to = 7> (query_start)
last = Constant <value_ints = [9223372036854775807]> ()
ends = Slice (starts, one, last, zero)
num_rows_0d = Squeeze (num_rows, zero)
row = Range (zero_0d, num_rows_0d, one_0d)
row_2d = Unsqueeze (row, one)
is_past = GreaterOrEqual (row_2d, ends)
is_past_int = Cast <to = 7> (is_past)
row_sequence = ReduceSum <keepdims = 1> (is_past_int, one)
positions_int = Cast <to = 7> (positions)
row_position = Unsqueeze (positions_int, one)
window = Constant <value_int: int = @window> ()
is_windowed = Greater (window, zero_0d)
unlimited = Constant <value_int = 4611686018427387904> ()
reach = Where (is_windowed, window, unlimited)
row_before = Sub (row_position, reach)
is_same = Equal (row_sequence, key_sequence)
is_causal = LessOrEqual (key_position, row_position)
is_near = Greater (key_position, row_before)
is_same_causal = And (is_same, is_causal)
is_seen = And (is_same_causal, is_near)
is_seen_3d = Unsqueeze (is_seen, one)
masked = Constant <value_float = -3.0e38> ()
masked_scores = Where (is_seen_3d, scores, masked)
"""

#: Back to [T, num_heads * head_size].
_ATTENTION = """\
weights_4d = Softmax <axis = -1> (masked_scores)
weights_shape = Concat <axis = 0> (kv_heads, minus_one, num_keys_1d)
weights = Reshape (weights_4d, weights_shape)
mixed = MatMul (weights, v)
mixed_shape = Concat <axis = 0> (kv_heads, num_rows, group, head_size)
mixed_by_head = Reshape (mixed, mixed_shape)
mixed_heads = Transpose <perm = [1, 0, 2, 3]> (mixed_by_head)
flat_size = Mul (heads, head_size)
flat_shape = Concat <axis = 0> (num_rows, flat_size)
flat = Reshape (mixed_heads, flat_shape)
attention = CastLike (flat, q)"""


def _body(kv: KVDtype) -> str:
    rows = _fetch("kv_pool", "decode_in") + (_fetch("kv_scales", "decode_scale") if kv.scales else "")
    return _CONSTANTS + rows + decode(kv) + "\n" + _KEYS + _SCORES + _MASK + _ATTENTION


PAGED_ATTENTION = OpDef(
    name="PagedAttention",
    doc="Causal attention of this step's queries over the cache, which already holds their own K and V; fp32 inside.",
    inputs=(
        Port("q", ACTIVATION, ("T", "num_heads * head_size"), "rotated queries of this step's tokens"),
        POOL,
        SCALES,
        Port("positions", "INT32", ("T",), "position of each token in its sequence"),
        Port(
            "query_start",
            "INT32",
            ("B + 1",),
            "cumulative query lengths: sequence b has rows query_start[b] to query_start[b + 1]",
        ),
        Port("kv_lengths", "INT32", ("B",), "tokens of each sequence in the cache, this step's included"),
        Port(
            "block_tables",
            "INT32",
            ("B", "max_blocks"),
            "block of each tokens_per_block positions; unused entries are 0",
        ),
    ),
    outputs=(
        Port("attention", ACTIVATION, ("T", "num_heads * head_size"), "softmax(scale * q k) v of each head"),
    ),
    attributes=(
        Attribute("layer", int, "index of the layer inside the pool"),
        Attribute("num_heads", int, "query heads"),
        Attribute("num_kv_heads", int, "KV heads; divides num_heads"),
        Attribute("head_size", int, "elements per head"),
        Attribute("scale", float, "factor of the scores"),
        Attribute("window", int, "keys that a query sees, its own included; 0: all before it", default=0),
        Attribute(
            "softcap", float, "scores become softcap * tanh(score / softcap); 0: as they are", default=0.0
        ),
        Attribute("kv_dtype", str, "type of the cache's elements"),
    ),
    body=_body,
)
