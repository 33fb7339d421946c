"""Qwen2 and Qwen2.5: biases on Q, K and V (found from the tensors), and windows in the upper layers if
switched on."""

from collections.abc import Mapping
from typing import Any

from trtforge.builder.checkpoint.base import TensorInfo
from trtforge.builder.families import Family, GGUFNames
from trtforge.builder.families.common import LLAMA_MODULES, Fields, decoder, layer_types, num_layers
from trtforge.builder.spec import ModelSpec

#: What transformers takes for a field that a config leaves out.
DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def windows(fields: Fields, tensors: Mapping[str, TensorInfo]) -> list[int | None]:
    """Each layer's window; none unless use_sliding_window. Qwen3 has the same rule."""
    layers = num_layers(fields, tensors)
    window = fields.window() if fields.flag("use_sliding_window") else None
    first = 0 if fields.get("max_window_layers") == 0 else fields.size("max_window_layers")
    types = layer_types(fields, layers, lambda i: window is not None and i >= first)
    return [window if t == "sliding_attention" else None for t in types]


def spec(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], max_seq_len: int) -> ModelSpec:
    fields = Fields(config, DEFAULTS)
    return decoder("qwen2", fields, tensors, max_seq_len, windows=windows(fields, tensors))


FAMILY = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    spec=spec,
    modules=LLAMA_MODULES,
    gguf=GGUFNames("qwen2"),
)
