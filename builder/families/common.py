"""What the families share: reading a config's fields with care, and the ModelSpec of a Llama-like decoder."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trtforge.builder.checkpoint.base import TensorInfo
from trtforge.builder.rope import rope, rope_parameters
from trtforge.builder.spec import LayerSpec, ModelSpec
from trtforge.plugins.errors import CheckpointError, UnsupportedModel

#: The modules of a layer as Llama, Mistral and Qwen name them.
LLAMA_MODULES = {
    "attention.norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "mlp.norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
QK_NORM_MODULES = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}

#: Features of a config that no family here does: field -> what it is called in the refusal.
_REFUSED = {
    "quantization_config": "a checkpoint that is quantized already",
    "num_local_experts": "mixture of experts",
    "num_experts": "mixture of experts",
    "n_routed_experts": "mixture of experts",
    "use_bidirectional_attention": "attention that is not causal",
    "attn_logit_softcapping": "capped attention scores",
}


class Fields:
    """A config read field by field, with a family's defaults; every error names the field and its value."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.values: Mapping[str, Any] = {**defaults, **config}

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def size(self, key: str) -> int:
        """A positive integer."""
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise CheckpointError(f"config.json: {key} is {value!r}, want a positive integer")
        return value

    def size_or(self, key: str, default: int) -> int:
        return default if self.get(key) is None else self.size(key)

    def number(self, key: str) -> float:
        """A positive finite number."""
        value = self.get(key)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not math.isfinite(value) or value <= 0:
            raise CheckpointError(f"config.json: {key} is {value!r}, want a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool | None):
            raise CheckpointError(f"config.json: {key} is {value!r}, want true or false")
        return bool(value)

    def window(self, key: str = "sliding_window") -> int | None:
        """Tokens that a query sees, or None for all."""
        return None if self.get(key) is None else self.size(key)


def decoder(
    family: str,
    fields: Fields,
    tensors: Mapping[str, TensorInfo],
    max_seq_len: int,
    *,
    windows: Sequence[int | None] | int | None = None,
    ropes: Sequence[Mapping[str, Any]] | None = None,
    rope_of: Sequence[int] | None = None,
    partial_rotary: bool = False,
    activation: str = "hidden_act",
    **features: Any,
) -> ModelSpec:
    """The ModelSpec of a Llama-like decoder.

    windows: one for all layers, or one per layer. ropes: rotations as `rope_parameters` gives them (by
    default the config's own one), rope_of: each layer's index among them. activation: the config's field for
    it. features: further ModelSpec fields. Raises CheckpointError for values that make no sense,
    UnsupportedModel for features that are not done; both name the field.
    """
    _refuse_unsupported(fields)
    layers = num_layers(fields, tensors)
    heads, kv_heads, head_size = _heads(fields, tensors)
    parameters = [rope_parameters(fields.values)] if ropes is None else list(ropes)
    if not partial_rotary and any(p["partial_rotary_factor"] != 1 for p in parameters):
        raise UnsupportedModel(f"config.json: partial_rotary_factor is not supported for the family {family}")
    positions = fields.size("max_position_embeddings")
    rotations = [
        rope(p, head_size=head_size, max_position_embeddings=positions, max_seq_len=max_seq_len)
        for p in parameters
    ]
    rotation_of = [rotations[i] for i in rope_of or [0] * layers]
    used = tuple(dict.fromkeys(rotation_of))
    window_of = windows if isinstance(windows, Sequence) else [windows] * layers
    # A window that holds a whole sequence is none: fewer groups of layers, fewer pools.
    window_of = [w if w is not None and w < max_seq_len else None for w in window_of]
    return ModelSpec(
        family=family,
        architecture=str(fields.get("architectures")[0]),
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        intermediate_size=_bounded(fields.size("intermediate_size"), "intermediate_size", tensors),
        layers=tuple(LayerSpec(used.index(r), w) for r, w in zip(rotation_of, window_of, strict=True)),
        ropes=used,
        norm_epsilon=fields.number("rms_norm_eps"),
        activation=_activation(fields, activation),
        max_position_embeddings=positions,
        tied_embeddings=fields.flag("tie_word_embeddings"),
        **{"attention_scale": head_size**-0.5, **features},
    )


def _heads(fields: Fields, tensors: Mapping[str, TensorInfo]) -> tuple[int, int, int]:
    """(query heads, KV heads, head size)"""
    hidden = _bounded(fields.size("hidden_size"), "hidden_size", tensors)
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size_or("num_key_value_heads", heads)
    head_size = fields.size_or("head_dim", hidden // heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    _bounded(heads * head_size, "num_attention_heads * head_dim", tensors)
    return heads, kv_heads, head_size


def layer_types(fields: Fields, layers: int, default: Callable[[int], bool]) -> tuple[str, ...]:
    """Each layer's attention, `full_attention` or `sliding_attention`: as the config lists them, else as
    default(layer) says which slide."""
    types = fields.get("layer_types")
    if types is None:
        return tuple("sliding_attention" if default(i) else "full_attention" for i in range(layers))
    if not isinstance(types, list | tuple) or len(types) != layers:
        raise CheckpointError(f"config.json: layer_types is {types!r}, want a list of {layers} names")
    unknown = [t for t in types if t not in ("full_attention", "sliding_attention")]
    if unknown:
        raise UnsupportedModel(
            f"config.json: layer_types has {unknown[0]!r}; supported: full_attention, sliding_attention"
        )
    return tuple(types)


def num_layers(fields: Fields, tensors: Mapping[str, TensorInfo]) -> int:
    """The number of layers, which cannot exceed that of tensors: checked before anything per layer is
    made."""
    layers = fields.size("num_hidden_layers")
    if layers > len(tensors):
        raise CheckpointError(
            f"config.json: num_hidden_layers is {layers}, but the checkpoint has only {len(tensors)} tensors"
        )
    return layers


def _activation(fields: Fields, key: str) -> str:
    name = str(fields.get(key))
    if name not in _ACTIVATIONS:
        known = ", ".join(sorted(_ACTIVATIONS))
        raise UnsupportedModel(f"config.json: {key} is {name!r}, which is not supported; one of: {known}")
    return _ACTIVATIONS[name]


def _refuse_unsupported(fields: Fields) -> None:
    for key, what in _REFUSED.items():
        if fields.get(key):
            raise UnsupportedModel(f"config.json: {key} is set; {what} is not supported")


def _bounded(size: int, name: str, tensors: Mapping[str, TensorInfo]) -> int:
    """The size, if it is no larger than the largest dimension of any tensor; anything made of it is then small."""
    largest = max((d for t in tensors.values() for d in t.shape), default=0)
    if size > largest:
        raise CheckpointError(
            f"config.json: {name} is {size}, but no tensor has a dimension above {largest}; "
            "config and weights do not belong together"
        )
    return size
