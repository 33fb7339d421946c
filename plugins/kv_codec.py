"""How K and V become the elements of a pool and fp32 again: ONNX statements that the op bodies include.

The C++ kernels do the same arithmetic in the same order (plugins/cpu/kv_codec.hpp). Statements are in ONNX's text
syntax; names that they define begin with `encode_` or `decode_`, so that they meet no name of a body.
"""

import math

from trtforge.plugins.kv_dtypes import KVDtype

_FP16_MAX = 65504.0
_E4M3_MIN_EXPONENT = -6  # of normal numbers; three mantissa bits
_E4M3_EXPONENTS = range(_E4M3_MIN_EXPONENT, 9)


def e4m3_value(code: int) -> float:
    """The value of an e4m3fn code 0..255: 1 sign, 4 exponent (bias 7), 3 mantissa bits; S.1111.111 is NaN, no
    infinities (OCP 8-bit floating point specification, "FP8 formats")."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** (_E4M3_MIN_EXPONENT - 3)
    return sign * (8 + mantissa) * 2.0 ** (exponent - 7 - 3)


def encode(kv: KVDtype) -> str:
    """Statements from `encode_in` (FLOAT [..., head_size]) to `encode_out`, in the pool's type, and, for a
    quantized dtype, `encode_scale` (FLOAT [..., 1])."""
    if kv.name == "fp32":
        return "encode_out = Identity (encode_in)"
    if kv.name == "bf16":
        return "encode_out = Cast <to = 16> (encode_in)"
    if kv.name == "fp16":  # saturates: an infinity in the cache would poison every later token
        return f"""\
encode_max = Constant <value_float = {_FP16_MAX}> ()
encode_min = Neg (encode_max)
encode_clip = Clip (encode_in, encode_min, encode_max)
encode_out = Cast <to = 10> (encode_clip)"""
    return _encode_scale(kv) + {"int8": _ENCODE_INT8, "fp8": _encode_fp8()}[kv.name]


def decode(kv: KVDtype) -> str:
    """Statements from `decode_in` (the pool's type, [..., head_size]) and, for a quantized dtype, `decode_scale`
    (FLOAT [..., 1]) to `decode_out` (FLOAT)."""
    if not kv.scales:
        return "decode_out = Cast <to = 1> (decode_in)"
    return {"int8": _DECODE_INT8, "fp8": _decode_fp8()}[kv.name]


def _encode_scale(kv: KVDtype) -> str:
    """Dynamic symmetric scale per token and KV head. A row of zeros has scale 0 and codes 0."""
    return f"""\
encode_abs = Abs (encode_in)
encode_last = Constant <value_ints = [-1]> ()
encode_absmax = ReduceMax <keepdims = 1> (encode_abs, encode_last)
encode_max = Constant <value_float = {kv.max}> ()
encode_scale = Div (encode_absmax, encode_max)
encode_zero = Constant <value_float = 0.0> ()
encode_one = Constant <value_float = 1.0> ()
encode_positive = Greater (encode_scale, encode_zero)
encode_divisor = Where (encode_positive, encode_scale, encode_one)
encode_scaled = Div (encode_in, encode_divisor)
encode_min = Neg (encode_max)
encode_clip = Clip (encode_scaled, encode_min, encode_max)
"""


_ENCODE_INT8 = """\
encode_round = Round (encode_clip)
encode_out = Cast <to = 3> (encode_round)"""

_DECODE_INT8 = """\
decode_float = Cast <to = 1> (decode_in)
decode_out = Mul (decode_float, decode_scale)"""


def _encode_fp8() -> str:
    """|x| lies in binade e (found by comparisons; subnormals count as the lowest); there the codes are
    (e + 6) * 8 + |x| / 2^(e-3), so rounding that quotient to even rounds the code to even, and a quotient that
    rounds up to 16 is the next binade's first code. Bit 7, the sign, is -128 in two's complement."""
    lows = [2.0**e for e in _E4M3_EXPONENTS][1:]
    steps = [2.0 ** (e - 3) for e in _E4M3_EXPONENTS]
    return f"""\
encode_magnitude = Abs (encode_clip)
encode_column = Unsqueeze (encode_magnitude, encode_last)
encode_lows = Constant <value_floats = {lows}> ()
encode_above = GreaterOrEqual (encode_column, encode_lows)
encode_above_int = Cast <to = 7> (encode_above)
encode_binade = ReduceSum <keepdims = 0> (encode_above_int, encode_last)
encode_steps = Constant <value_floats = {steps}> ()
encode_step = Gather (encode_steps, encode_binade)
encode_quotient = Div (encode_magnitude, encode_step)
encode_round = Round (encode_quotient)
encode_mantissa = Cast <to = 7> (encode_round)
encode_eight = Constant <value_int = 8> ()
encode_base = Mul (encode_binade, encode_eight)
encode_code = Add (encode_base, encode_mantissa)
encode_negative = Less (encode_clip, encode_zero)
encode_sign = Constant <value_int = 128> ()
encode_signed = Sub (encode_code, encode_sign)
encode_bits = Where (encode_negative, encode_signed, encode_code)
encode_out = Cast <to = 3> (encode_bits)"""


def _decode_fp8() -> str:
    """A table of 256 values, indexed by the code as a signed byte (ONNX's Gather counts negative indices from the
    end). The two NaN codes are never written; they read as 0, as a never-written slot may hold anything."""
    table = [0.0 if math.isnan(v) else v for v in map(e4m3_value, range(256))]
    return f"""\
decode_table = Constant <value_floats = {table}> ()
decode_index = Cast <to = 7> (decode_in)
decode_float = Gather (decode_table, decode_index)
decode_out = Mul (decode_float, decode_scale)"""
