"""Llama and what has its shape (SmolLM2, TinyLlama, Yi, ...)."""

from collections.abc import Mapping
from typing import Any

from trtforge.builder.checkpoint.base import TensorInfo
from trtforge.builder.families import Family, GGUFNames
from trtforge.builder.families.common import LLAMA_MODULES, Fields, decoder
from trtforge.builder.spec import ModelSpec

#: What transformers takes for a field that a config leaves out.
DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}


def spec(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], max_seq_len: int) -> ModelSpec:
    return decoder("llama", Fields(config, DEFAULTS), tensors, max_seq_len)


FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    spec=spec,
    modules=LLAMA_MODULES,
    gguf=GGUFNames("llama", permuted_qk=True),
)
