"""Phi-3 and Phi-4: Q, K and V in one projection, gate and up in one, and a rotation of part of each head."""

from collections.abc import Mapping
from typing import Any

from trtforge.builder.checkpoint.base import TensorInfo
from trtforge.builder.families import Family, GGUFNames
from trtforge.builder.families.common import LLAMA_MODULES, Fields, decoder
from trtforge.builder.rope import rope_parameters
from trtforge.builder.spec import ModelSpec

#: What transformers takes for a field that a config leaves out.
DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
}


def spec(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], max_seq_len: int) -> ModelSpec:
    fields = Fields(config, DEFAULTS)
    parameters = rope_parameters({**DEFAULTS, **config})
    if parameters["rope_type"] == "yarn":  # early checkpoints called their LongRoPE so
        parameters["rope_type"] = "longrope"
    return decoder(
        "phi3",
        fields,
        tensors,
        max_seq_len,
        windows=fields.window(),
        ropes=[parameters],
        partial_rotary=True,
    )


FAMILY = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    spec=spec,
    modules=LLAMA_MODULES,
    fused={
        "self_attn.qkv_proj": ("attention.q", "attention.k", "attention.v"),
        "mlp.gate_up_proj": ("mlp.gate", "mlp.up"),
    },
    gguf=GGUFNames("phi3", names={"ffn_up": "mlp.gate_up_proj"}),
)
