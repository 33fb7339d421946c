"""Qwen3: norms on each head of Q and K before the rotation; windows as in Qwen2."""

from collections.abc import Mapping
from typing import Any

from trtforge.builder.checkpoint.base import TensorInfo
from trtforge.builder.families import Family, GGUFNames, qwen2
from trtforge.builder.families.common import LLAMA_MODULES, QK_NORM_MODULES, Fields, decoder
from trtforge.builder.spec import ModelSpec


def spec(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], max_seq_len: int) -> ModelSpec:
    fields = Fields(config, {**qwen2.DEFAULTS, "head_dim": 128})
    return decoder(
        "qwen3", fields, tensors, max_seq_len, windows=qwen2.windows(fields, tensors), qk_norm=True
    )


FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    spec=spec,
    modules={**LLAMA_MODULES, **QK_NORM_MODULES},
    gguf=GGUFNames("qwen3"),
)
