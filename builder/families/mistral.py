"""Mistral: Llama with a sliding window in every layer, or, where the config says null, in none."""

from collections.abc import Mapping
from typing import Any

from trtforge.builder.checkpoint.base import TensorInfo
from trtforge.builder.families import Family
from trtforge.builder.families.common import LLAMA_MODULES, Fields, decoder
from trtforge.builder.spec import ModelSpec
from trtforge.plugins.errors import UnsupportedModel

#: What transformers takes for a field that a config leaves out.
DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}


def spec(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], max_seq_len: int) -> ModelSpec:
    fields = Fields(config, DEFAULTS)
    if fields.get("layer_types") is not None:
        raise UnsupportedModel(
            "config.json: layer_types is set; a window per layer is not supported for Mistral"
        )
    return decoder("mistral", fields, tensors, max_seq_len, windows=fields.window())


# llama.cpp stores Mistral as Llama, whose reader serves it.
FAMILY = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    spec=spec,
    modules=LLAMA_MODULES,
)
