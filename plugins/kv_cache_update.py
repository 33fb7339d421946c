"""KVCacheUpdate: rotate Q and K, put K and V into the paged cache."""

from dataclasses import replace

from trtforge.plugins.kv_codec import encode
from trtforge.plugins.kv_dtypes import KVDtype
from trtforge.plugins.opdef import ACTIVATION, KV_POOL, Attribute, OpDef, Port


def _rotate(x: str, heads: str) -> str:
    """`{x}_rotated_3d` [T, heads, head_size]: the first R elements of each head of `x` [T, heads * head_size] rotated
    by pairs (i, i + R/2), the rest as it is (RoFormer, Su et al. 2021, in the half-split order of GPT-NeoX)."""
    return f"""\
{x}_float = Cast <to = 1> ({x})
{x}_shape = Concat <axis = 0> (minus_one, {heads}, head_size_1)
{x}_heads = Reshape ({x}_float, {x}_shape)
{x}_first = Slice ({x}_heads, zero, half, two)
{x}_second = Slice ({x}_heads, half, rotary, two)
{x}_rest = Slice ({x}_heads, rotary, head_size_1, two)
{x}_first_cos = Mul ({x}_first, cos)
{x}_second_sin = Mul ({x}_second, sin)
{x}_second_cos = Mul ({x}_second, cos)
{x}_first_sin = Mul ({x}_first, sin)
{x}_new_first = Sub ({x}_first_cos, {x}_second_sin)
{x}_new_second = Add ({x}_second_cos, {x}_first_sin)
{x}_rotated_3d = Concat <axis = 2> ({x}_new_first, {x}_new_second, {x}_rest)
"""


_CONSTANTS = """\
minus_one = Constant <value_ints = [-1]> ()
zero = Constant <value_ints = [0]> ()
one = Constant <value_ints = [1]> ()
two = Constant <value_ints = [2]> ()
heads = Constant <value_int: int = @num_heads> ()
heads_1 = Reshape (heads, one)
kv_heads = Constant <value_int: int = @num_kv_heads> ()
kv_heads_1 = Reshape (kv_heads, one)
head_size = Constant <value_int: int = @head_size> ()
head_size_1 = Reshape (head_size, one)
"""

#: Rows of cos_sin are [cos(p f_0) .. cos(p f_R/2), sin(p f_0) .. sin(p f_R/2)]; rotation is in fp32.
_ANGLES = """\
rotary = Shape <start = 1, end = 2> (cos_sin)
half = Div (rotary, two)
cos_2d = Slice (cos_sin, zero, half, one)
sin_2d = Slice (cos_sin, half, rotary, one)
cos = Unsqueeze (cos_2d, one)
sin = Unsqueeze (sin_2d, one)
"""

_QUERIES = """\
q_flat_size = Mul (heads_1, head_size_1)
q_flat_shape = Concat <axis = 0> (minus_one, q_flat_size)
q_flat = Reshape (q_rotated_3d, q_flat_shape)
q_rotated = CastLike (q_flat, q)
"""

#: K and V of each token and KV head as one tensor [T, 2, num_kv_heads, head_size].
_KEYS_AND_VALUES = """\
v_float = Cast <to = 1> (v)
v_heads = Reshape (v_float, k_shape)
k_part = Unsqueeze (k_rotated_3d, one)
v_part = Unsqueeze (v_heads, one)
encode_in = Concat <axis = 1> (k_part, v_part)
"""

#: Rows [T, 2, num_kv_heads, 1] of the pool seen as [num_blocks * .. * tokens_per_block, head_size].
_ROWS = """\
layers = Shape <start = 1, end = 2> (kv_pool)
tokens_per_block = Shape <start = 4, end = 5> (kv_pool)
layer = Constant <value_int: int = @layer> ()
block = Div (slot_mapping, tokens_per_block)
offset_1d = Mod (slot_mapping, tokens_per_block)
block_layers = Mul (block, layers)
block_layer = Add (block_layers, layer)
token_shape = Constant <value_ints = [-1, 1, 1]> ()
block_layer_3d = Reshape (block_layer, token_shape)
offset = Reshape (offset_1d, token_shape)
kv_index_1d = Constant <value_ints = [0, 1]> ()
kv_index_shape = Constant <value_ints = [1, 2, 1]> ()
kv_index = Reshape (kv_index_1d, kv_index_shape)
zero_0d = Constant <value_int = 0> ()
one_0d = Constant <value_int = 1> ()
head = Range (zero_0d, kv_heads, one_0d)
row_kv_base = Mul (block_layer_3d, two)
row_kv = Add (row_kv_base, kv_index)
row_head_base = Mul (row_kv, kv_heads)
row_head = Add (row_head_base, head)
row_base = Mul (row_head, tokens_per_block)
row_3d = Add (row_base, offset)
row = Unsqueeze (row_3d, minus_one)
"""


def _body(kv: KVDtype) -> str:
    turned = _rotate("q", "heads_1") + _rotate("k", "kv_heads_1")
    written = _scatter("kv_pool", "encode_out") + (_scatter("kv_scales", "encode_scale") if kv.scales else "")
    return _CONSTANTS + _ANGLES + turned + _QUERIES + _KEYS_AND_VALUES + encode(kv) + "\n" + _ROWS + written


def _scatter(pool: str, update: str) -> str:
    return f"""\
{pool}_row_size = Shape <start = 5> ({pool})
{pool}_rows_shape = Concat <axis = 0> (minus_one, {pool}_row_size)
{pool}_rows = Reshape ({pool}, {pool}_rows_shape)
{pool}_new_rows = ScatterND ({pool}_rows, row, {update})
{pool}_shape = Shape ({pool})
{pool}_out = Reshape ({pool}_new_rows, {pool}_shape)
"""


_ROW = ("num_blocks", "layers", 2, "num_kv_heads", "tokens_per_block")
POOL = Port("kv_pool", KV_POOL, (*_ROW, "head_size"), "the cache; index 0 of the third axis is K, 1 is V")
SCALES = Port(
    "kv_scales", "FLOAT", (*_ROW, 1), "value of a code's unit, per token and KV head", quantized=True
)

KV_CACHE_UPDATE = OpDef(
    name="KVCacheUpdate",
    doc="Rotates Q and K, encodes K and V in the cache's type, and writes them to their slots.",
    inputs=(
        Port("q", ACTIVATION, ("T", "num_heads * head_size"), "queries of this step's tokens"),
        Port("k", ACTIVATION, ("T", "num_kv_heads * head_size"), "keys"),
        Port("v", ACTIVATION, ("T", "num_kv_heads * head_size"), "values"),
        Port("cos_sin", "FLOAT", ("T", "R"), "cosines, then sines, of each token's angles; R <= head_size"),
        Port("slot_mapping", "INT64", ("T",), "where a token goes: block * tokens_per_block + offset"),
        POOL,
        SCALES,
    ),
    outputs=(
        Port("q_rotated", ACTIVATION, ("T", "num_heads * head_size"), "queries, rotated"),
        replace(POOL, name="kv_pool_out", doc="the cache with the tokens written; aliases kv_pool"),
        replace(SCALES, name="kv_scales_out", doc="aliases kv_scales"),
    ),
    attributes=(
        Attribute("layer", int, "index of the layer inside the pool"),
        Attribute("num_heads", int, "query heads"),
        Attribute("num_kv_heads", int, "KV heads; divides num_heads"),
        Attribute("head_size", int, "elements per head"),
        Attribute("kv_dtype", str, "type of the cache's elements"),
    ),
    body=_body,
)
