"""ModelSpec, QuantSpec and BuildConfig: what is to be built, translated once from the foreign format.

After this no code knows a Hugging Face or GGUF name.
"""

from dataclasses import dataclass, field
from pathlib import Path

from trtforge.runtime.manifest import KVGroup, Limits, Rope


@dataclass(frozen=True)
class LayerSpec:
    """What may differ from layer to layer."""

    rope: int = 0  # index into ModelSpec.ropes
    window: int | None = None  # tokens that a query sees, itself included; None: all


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer. Biases and tying are decided from the tensors, not from the family's name."""

    family: str
    architecture: str
    name: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[Rope, ...]
    norm_epsilon: float
    activation: str  # silu, gelu_tanh
    attention_scale: float
    max_position_embeddings: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False  # norms after attention and MLP too, before the residual (Gemma 3)
    norm_offset: float = 0.0  # the norm multiplies by (offset + weight)
    embedding_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Layers by window, in order of first appearance."""
        by_window: dict[int | None, list[int]] = {}
        for i, layer in enumerate(self.layers):
            by_window.setdefault(layer.window, []).append(i)
        return tuple(
            KVGroup(tuple(layers), self.num_kv_heads, self.head_size, window) for window, layers in by_window.items()
        )


@dataclass(frozen=True)
class QuantSpec:
    """One recipe: `builder/recipes/NAME.toml`."""

    name: str
    weights: str = "none"  # none, int8, int4
    group_size: int = 0  # 0: per output channel
    symmetric: bool = False
    exclude: tuple[str, ...] = ()  # graph names of linears that stay as they are, e.g. "lm_head"


@dataclass(frozen=True)
class BuildConfig:
    """What `trtforge build` was asked; CLI defaults are read from here."""

    target: str = "cpu"
    recipe: str = "full_prec"
    kv_cache_dtype: str = "auto"
    tokens_per_block: int = 16
    limits: Limits = field(default_factory=Limits)
    source: Path | None = None
