"""Gemma 3, the text model: local layers between global ones, each kind with its own rotation and the norms of
both Q and K, four norms a layer that multiply by (1 + weight), scaled embeddings, GeGLU.

Of a checkpoint that sees images too, the language model is built; the vision tower's tensors are left over.
"""

from collections.abc import Mapping
from typing import Any

from trtforge.builder.checkpoint.base import TensorInfo
from trtforge.builder.families import Family, GGUFNames
from trtforge.builder.families.common import (
    LLAMA_MODULES,
    QK_NORM_MODULES,
    Fields,
    decoder,
    layer_types,
    num_layers,
)
from trtforge.builder.rope import rope_parameters
from trtforge.builder.spec import ModelSpec
from trtforge.plugins.errors import CheckpointError

#: What transformers takes for a field that a config leaves out; Gemma's own configs leave out most.
DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
}


def spec(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], max_seq_len: int) -> ModelSpec:
    text = config.get("text_config") or {}
    if not isinstance(text, Mapping):
        raise CheckpointError(f"config.json: text_config is {text!r}, want an object")
    fields = Fields({**config, **text, "architectures": config["architectures"]}, DEFAULTS)
    layers = num_layers(fields, tensors)
    pattern = fields.size("sliding_window_pattern")
    types = layer_types(fields, layers, lambda i: (i + 1) % pattern != 0)
    window = fields.window()
    return decoder(
        "gemma3",
        fields,
        tensors,
        max_seq_len,
        windows=[window if t == "sliding_attention" else None for t in types],
        ropes=_ropes(fields),
        rope_of=[1 if t == "sliding_attention" else 0 for t in types],
        activation="hidden_activation",
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        qk_norm=True,
        sandwich_norms=True,
        norm_offset=1.0,
        embedding_scale=fields.size("hidden_size") ** 0.5,
        logit_softcap=fields.number("final_logit_softcapping")
        if fields.get("final_logit_softcapping")
        else None,
    )


def _ropes(fields: Fields) -> list[dict[str, Any]]:
    """The rotations of global and of local layers; a scaling rule in the older spelling is the global one's."""
    given = fields.get("rope_parameters") or {}
    if not isinstance(given, Mapping) or not all(isinstance(v, Mapping | None) for v in given.values()):
        raise CheckpointError(
            f"config.json: rope_parameters is {given!r}, want an object for each kind of layer"
        )
    both = (
        ("full_attention", "rope_theta", fields.get("rope_scaling")),
        ("sliding_attention", "rope_local_base_freq", None),
    )
    return [
        rope_parameters(
            {
                "rope_theta": fields.get(base),
                "rope_parameters": {**(given.get(kind) or {}), **(scaling or {})},
                "max_position_embeddings": fields.get("max_position_embeddings"),
            }
        )
        for kind, base, scaling in both
    ]


def _gguf_config(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """What llama.cpp knows of Gemma 3 without storing it: the 27B model alone scales scores by its hidden size."""
    largest = metadata.get("gemma3.block_count") == 62
    if not largest:
        return {"query_pre_attn_scalar": metadata.get("gemma3.attention.key_length", 256)}
    return {
        "query_pre_attn_scalar": metadata["gemma3.embedding_length"]
        // metadata["gemma3.attention.head_count"]
    }


FAMILY = Family(
    name="gemma3",
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    spec=spec,
    modules={
        **LLAMA_MODULES,
        **QK_NORM_MODULES,
        "attention.post_norm": "post_attention_layernorm",
        "mlp.norm": "pre_feedforward_layernorm",
        "mlp.post_norm": "post_feedforward_layernorm",
    },
    prefixes=("model.", "model.language_model.", "language_model.model."),
    gguf=GGUFNames(
        "gemma3",
        norm_offset=1.0,
        names={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        config=_gguf_config,
    ),
)
