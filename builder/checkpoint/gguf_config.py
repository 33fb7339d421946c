"""GGUF metadata translated into the config.json that it was made from.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What one architecture alone has (Gemma's layer
pattern, for one) comes from its family's `GGUFNames.config`.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtforge.plugins.errors import CheckpointError, UnsupportedModel

MAX_SIZE = 1 << 31

#: Hugging Face key -> (GGUF key without its architecture, whether it must be there)
_SIZES = {
    "hidden_size": ("embedding_length", True),
    "intermediate_size": ("feed_forward_length", True),
    "num_hidden_layers": ("block_count", True),
    "num_attention_heads": ("attention.head_count", True),
    "num_key_value_heads": ("attention.head_count_kv", False),
    "max_position_embeddings": ("context_length", True),
}
#: factor tables that llama.cpp keeps as tensors
FACTOR_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class Metadata:
    """Typed access to one file's metadata; every fault names the file and the key. `arch.` is put in front of
    keys that begin with a dot."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self._path, self._values = path, values
        self.architecture = self.text("general.architecture")

    def _key(self, key: str) -> str:
        return self.architecture + key if key.startswith(".") else key

    def get(self, key: str) -> Any:
        return self._values.get(self._key(key))

    def fault(self, key: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: metadata {self._key(key)!r} {what}; convert the model again")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.fault(key, "is missing" if value is None else "is not text")
        return value

    def size(self, key: str) -> int | None:
        """A positive size; None if it is absent or 0. One that is stored per layer must be the same in all."""
        value = self.get(key)
        if isinstance(value, np.ndarray) and value.size:
            if (value != value[0]).any():
                raise UnsupportedModel(
                    f"{self._path}: {self._key(key)} differs from layer to layer, which is not supported"
                )
            value = value[0].item()
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < MAX_SIZE:
            raise self.fault(key, f"is {str(value)[:40]}, not a size")
        return value or None

    def number(self, key: str) -> float | None:
        value = self.get(key)
        if value is None:
            return None
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.fault(key, f"is {str(value)[:40]}, not a finite number")
        return float(value)

    def token_id(self, name: str) -> int | None:
        """`tokenizer.ggml.{name}_token_id`; absent, or beyond the vocabulary (some converters' -1): None."""
        value = self.get(f"tokenizer.ggml.{name}_token_id")
        return (
            value if type(value) is int and 0 <= value < len(self.strings("tokenizer.ggml.tokens")) else None
        )

    def strings(self, key: str) -> list[str]:
        """An array of strings; empty if it is absent."""
        value = self.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.fault(key, "is not an array of strings")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        return default if value is None else bool(value)


def config_from_metadata(
    metadata: Metadata,
    architecture: str,
    vocab_size: int,
    tied: bool,
    factors: Mapping[str, NDArray[np.float32]],
) -> dict[str, Any]:
    """The config in Hugging Face's older, common spelling (`rope_theta` + `rope_scaling`).

    architecture: the Hugging Face class name. factors: those of FACTOR_TABLES that the file has.
    """
    if metadata.size(".expert_count"):
        raise UnsupportedModel(f"{architecture} in GGUF with a mixture of experts, which is not supported")
    config: dict[str, Any] = {
        "architectures": [architecture],
        "vocab_size": vocab_size,
        "tie_word_embeddings": tied,
    }
    for key, (source, needed) in _SIZES.items():
        value = metadata.size("." + source)
        if value is None and needed:
            raise metadata.fault("." + source, "is missing or 0")
        config[key] = value
    config["num_key_value_heads"] = config["num_key_value_heads"] or config["num_attention_heads"]
    epsilon = metadata.number(".attention.layer_norm_rms_epsilon")
    if epsilon is None:
        raise metadata.fault(".attention.layer_norm_rms_epsilon", "is missing")
    config["rms_norm_eps"] = _as_written(epsilon)
    config["hidden_act"] = "silu"
    config["head_dim"] = _head_size(metadata, config)
    config.update(_windows(metadata))
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if (cap := metadata.number("." + key)) is not None:
            config[key] = cap
    for name, source in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{name}_token_id"] = metadata.token_id(source)
    config.update(_rope(metadata, config, factors))
    return config


def _windows(metadata: Metadata) -> dict[str, Any]:
    """The sliding window, and the layers that have it: every nth has not, or they are listed one by one."""
    found: dict[str, Any] = {"sliding_window": metadata.size(".attention.sliding_window")}
    key = ".attention.sliding_window_pattern"
    pattern = metadata.get(key)
    if isinstance(pattern, np.ndarray):
        found["layer_types"] = ["sliding_attention" if p else "full_attention" for p in pattern.tolist()]
    elif pattern is not None:
        found["sliding_window_pattern"] = metadata.size(key)
    return found


def _head_size(metadata: Metadata, config: Mapping[str, Any]) -> int:
    key, value = metadata.size(".attention.key_length"), metadata.size(".attention.value_length")
    if key is not None and value is not None and key != value:
        raise UnsupportedModel(
            f"GGUF keys of size {key} and values of size {value}: only equal sizes are supported"
        )
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if key is None and hidden % heads:
        raise metadata.fault(".attention.head_count", f"is {heads}, which does not divide {hidden}")
    return key or hidden // heads


def _rope(
    metadata: Metadata, config: Mapping[str, Any], factors: Mapping[str, NDArray[np.float32]]
) -> dict[str, Any]:
    head_size = config["head_dim"]
    bases = (("rope_theta", ".rope.freq_base"), ("rope_local_base_freq", ".rope.freq_base_swa"))
    rope: dict[str, Any] = {
        key: base for key, source in bases if (base := metadata.number(source)) is not None
    }
    rotary_dim = metadata.size(".rope.dimension_count") or head_size
    if rotary_dim != head_size:
        share = rotary_dim / head_size
        # the share is multiplied back and cut to an integer; where that falls one short, the next float does not
        rope["partial_rotary_factor"] = (
            share if int(head_size * share) == rotary_dim else math.nextafter(share, 2.0)
        )
    context = metadata.size(".rope.scaling.original_context_length")
    if context is not None:
        rope["original_max_position_embeddings"] = context
    scaling = _scaling(metadata, config["max_position_embeddings"], context, factors)
    if scaling:
        rope["rope_scaling"] = scaling
    return rope


def _scaling(
    metadata: Metadata, trained: int, context: int | None, factors: Mapping[str, NDArray[np.float32]]
) -> dict[str, Any] | None:
    """`rope_scaling`, or None. context: the original one, if the file tells."""
    kind = metadata.text(".rope.scaling.type", "none")
    factor, attention = metadata.number(".rope.scaling.factor"), metadata.number(".rope.scaling.attn_factor")
    if "rope_freqs.weight" in factors:
        # Llama 3's rule is stored as its result, the divisor of each frequency: a LongRoPE of one list, unscaled
        table = factors["rope_freqs.weight"].tolist()
        return _longrope(table, table, trained, 1.0)
    if "rope_factors_long.weight" in factors and "rope_factors_short.weight" in factors:
        short, long = (factors[f"rope_factors_{which}.weight"].tolist() for which in ("short", "long"))
        return _longrope(short, long, context or trained, attention)
    old_linear = metadata.number(".rope.scale_linear")
    if kind == "linear" or (kind == "none" and old_linear):
        return {"rope_type": "linear", "factor": factor or old_linear}
    if kind == "yarn":
        return _yarn(metadata, trained, context, factor, attention)
    if kind == "none":
        return None
    raise UnsupportedModel(f"GGUF {metadata.architecture}.rope.scaling.type {kind[:40]!r} is not supported")


def _longrope(short: list[float], long: list[float], context: int, attention: float | None) -> dict[str, Any]:
    scaling = {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": context,
    }
    return scaling if attention is None else scaling | {"attention_factor": attention}


def _yarn(
    metadata: Metadata, trained: int, context: int | None, factor: float | None, attention: float | None
) -> dict[str, Any]:
    factor = factor or (trained / context if context else None)
    if not factor or factor <= 0:
        raise metadata.fault(".rope.scaling.factor", "is missing, which YaRN needs")
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": context or max(1, round(trained / factor)),
    }
    for key, source in (
        ("beta_fast", ".rope.scaling.yarn_beta_fast"),
        ("beta_slow", ".rope.scaling.yarn_beta_slow"),
    ):
        beta = metadata.number(source)
        if beta is not None:
            scaling[key] = beta
    if attention is not None:
        # llama.cpp multiplies its attn_factor with YaRN's own factor; Hugging Face's attention_factor replaces it
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return scaling


def _as_written(value: float) -> float:
    """A float32 as the shortest decimal that gives it back: 1e-05, as config.json had it, not 9.999999747e-06."""
    return float(np.format_float_scientific(np.float32(value)))
