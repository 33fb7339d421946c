"""RoPE scaling rules: a config's rope fields become `Rope(inv_freq, attention_factor)`.

Both spellings are read: `rope_theta` + `rope_scaling` (older) and `rope_parameters` (transformers 5). Rules
that depend on the sequence length (dynamic, longrope) are fixed once per engine from its `max_seq_len`.
Arithmetic is float32 in the order transformers does it, with correctly rounded powers, so that rotations
agree to the last bit but for a rare unit in the last place; every value is exactly a float32.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from trtforge.plugins.errors import CheckpointError, UnsupportedModel
from trtforge.runtime.manifest import Rope

Float32 = NDArray[np.float32]
Parameters = Mapping[str, Any]

#: Rules for which a config may give the context that the model was trained with.
_WITH_ORIGINAL_CONTEXT = ("llama3", "yarn", "longrope")


def rope_parameters(config: Parameters, *, theta: float = 10000.0) -> dict[str, Any]:
    """A config's rope fields, whichever the spelling, in that of `rope_parameters`.

    The result has rope_type, rope_theta, partial_rotary_factor and what its rule needs. theta: the family's
    base where the config is silent. Raises CheckpointError for a field of the wrong kind.
    """
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"config.json: rope_scaling is {found!r}, want an object")
    parameters = dict(found)
    kind = str(parameters.get("rope_type") or parameters.pop("type", None) or "default")
    parameters["rope_type"] = {"su": "longrope"}.get(kind, kind)  # its name in early checkpoints
    for key, default in (("rope_theta", theta), ("partial_rotary_factor", 1.0)):
        if parameters.get(key) is None:
            parameters[key] = config[key] if config.get(key) is not None else default
    if parameters["rope_type"] in _WITH_ORIGINAL_CONTEXT:
        key = "original_max_position_embeddings"
        # A field of the config itself goes before the rule's, as transformers has it.
        parameters[key] = config.get(key) or parameters.get(key) or config.get("max_position_embeddings")
    return parameters


def rope(parameters: Parameters, *, head_size: int, max_position_embeddings: int, max_seq_len: int) -> Rope:
    """The rotation that an engine of `max_seq_len` tokens uses.

    parameters: as `rope_parameters` gives them. Raises CheckpointError that names a bad field and its value,
    UnsupportedModel for an unknown rule.
    """
    kind = parameters["rope_type"]
    rule = _RULES.get(kind)
    if rule is None:
        raise UnsupportedModel(f"rope_type {kind!r} is not supported; one of: {', '.join(sorted(_RULES))}")
    share = _number(parameters, "partial_rotary_factor")
    rotary_dim = int(head_size * share)
    if share > 1 or rotary_dim < 2 or rotary_dim % 2:
        raise CheckpointError(
            f"config.json: head_dim {head_size} with partial_rotary_factor {share} rotates {rotary_dim} "
            "elements; want an even number within the head"
        )
    parameters = {**parameters, "max_position_embeddings": max_position_embeddings}
    try:
        with np.errstate(all="ignore"):
            inv_freq, attention_factor = rule(parameters, rotary_dim, max_seq_len)
    except ArithmeticError as e:
        raise CheckpointError(
            f"config.json: rope_type {kind!r} cannot be computed from its fields ({e})"
        ) from e
    if not (np.isfinite(inv_freq).all() and (inv_freq > 0).all() and math.isfinite(attention_factor)):
        raise CheckpointError(
            f"config.json: rope_type {kind!r} gives frequencies that are not positive numbers"
        )
    return Rope(tuple(float(f) for f in inv_freq), float(attention_factor))


def _default(p: Parameters, dim: int, max_seq_len: int) -> tuple[Float32, float]:
    return np.float32(1.0) / _powers(_number(p, "rope_theta"), dim), 1.0


def _linear(p: Parameters, dim: int, max_seq_len: int) -> tuple[Float32, float]:
    return _default(p, dim, max_seq_len)[0] / np.float32(_number(p, "factor")), 1.0


def _dynamic(p: Parameters, dim: int, max_seq_len: int) -> tuple[Float32, float]:
    """NTK-aware: the base grows with the length beyond the trained context."""
    trained = _number(p, "max_position_embeddings")
    factor = _number(p, "factor")
    grown = factor * max(max_seq_len, trained) / trained - (factor - 1.0)
    base = _number(p, "rope_theta") * grown ** (dim / (dim - 2))
    return np.float32(1.0) / _powers(base, dim), 1.0


def _llama3(p: Parameters, dim: int, max_seq_len: int) -> tuple[Float32, float]:
    """Long wavelengths are slowed by `factor`, short ones kept, those between are blended."""
    inv_freq = _default(p, dim, max_seq_len)[0]
    factor, low, high = (_number(p, k) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    context = _number(p, "original_max_position_embeddings")
    if low >= high:
        raise CheckpointError(f"config.json: low_freq_factor {low} must be below high_freq_factor {high}")
    wavelength = np.float32(2 * math.pi) / inv_freq
    slowed = inv_freq / np.float32(factor)
    smooth = (np.float32(context) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1.0) - smooth) * slowed + smooth * inv_freq
    between = (wavelength >= np.float32(context / high)) & (wavelength <= np.float32(context / low))
    far = np.where(wavelength > np.float32(context / low), slowed, inv_freq)
    return np.where(between, blended, far).astype(np.float32), 1.0


def _yarn(p: Parameters, dim: int, max_seq_len: int) -> tuple[Float32, float]:
    """YaRN (arXiv 2309.00071): a ramp over the dimensions between interpolated and original frequencies."""
    base = _number(p, "rope_theta")
    context = _number(p, "original_max_position_embeddings")
    factor = _optional(p, "factor") or _number(p, "max_position_embeddings") / context
    beta_fast, beta_slow = _optional(p, "beta_fast") or 32.0, _optional(p, "beta_slow") or 1.0

    def dimension_of(rotations: float) -> float:
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension_of(beta_fast), dimension_of(beta_slow)
    if p.get("truncate") is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    original: Float32 = 1 - np.clip(ramp, 0, 1).astype(np.float32)  # the share of the original frequency
    powers = _powers(base, dim)
    interpolated = np.float32(1.0) / (np.float32(factor) * powers)
    extrapolated = np.float32(1.0) / powers
    inv_freq: Float32 = interpolated * (1 - original) + extrapolated * original
    return inv_freq, _yarn_attention_factor(p, factor)


def _yarn_attention_factor(p: Parameters, factor: float) -> float:
    given = _optional(p, "attention_factor")
    if given is not None:
        return given

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    numerator, denominator = _optional(p, "mscale"), _optional(p, "mscale_all_dim")
    if numerator and denominator:
        return mscale(numerator) / mscale(denominator)
    return mscale(1.0)


def _longrope(p: Parameters, dim: int, max_seq_len: int) -> tuple[Float32, float]:
    """LongRoPE (arXiv 2402.13753): a factor per frequency, one list within the trained context, one
    beyond."""
    context = _number(p, "original_max_position_embeddings")
    key = "long_factor" if max_seq_len > context else "short_factor"
    factors = p.get(key)
    if not isinstance(factors, list | tuple) or not all(_is_number(f) and f > 0 for f in factors):
        raise CheckpointError(f"config.json: {key} is {factors!r}, want a list of positive numbers")
    if len(factors) != dim // 2:
        raise CheckpointError(
            f"config.json: {key} has {len(factors)} numbers, want {dim // 2}: one per frequency"
        )
    attention_factor = _optional(p, "attention_factor")
    if attention_factor is None:
        factor = _optional(p, "factor") or _number(p, "max_position_embeddings") / context
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(context))
    powers = np.asarray(factors, np.float32) * _powers(_number(p, "rope_theta"), dim)
    return np.float32(1.0) / powers, attention_factor


_RULES: dict[str, Callable[[Parameters, int, int], tuple[Float32, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def _powers(base: float, dim: int) -> Float32:
    """base ** (0/dim, 2/dim, ...): float32 operands, each power rounded once (as torch's is, nearly
    always)."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.power(np.float64(np.float32(base)), exponents.astype(np.float64)).astype(np.float32)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _number(p: Parameters, key: str) -> float:
    """A field that must be a positive finite number."""
    value = p.get(key)
    if not _is_number(value) or value <= 0:
        raise CheckpointError(
            f"config.json: {key} is {value!r}, but rope_type {p['rope_type']!r} wants a positive number"
        )
    return float(value)


def _optional(p: Parameters, key: str) -> float | None:
    return None if p.get(key) is None else _number(p, key)
