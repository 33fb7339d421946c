"""ModelSpec, QuantSpec and BuildConfig: what is to be built, translated once from the foreign format.

After this no code knows a Hugging Face or GGUF name.
"""

from dataclasses import dataclass, field

from trtforge.runtime.manifest import KVGroup, KVLayout, Limits, Rope


@dataclass(frozen=True)
class LayerSpec:
    """What may differ from layer to layer."""

    rope: int = 0  # index into ModelSpec.ropes
    window: int | None = None  # tokens that a query sees, itself included; None: all


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer. Biases and tying are decided from the tensors, not from the family's
    name."""

    family: str
    architecture: str
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
    name: str = ""  # of the checkpoint, for people
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
            KVGroup(tuple(layers), self.num_kv_heads, self.head_size, window)
            for window, layers in by_window.items()
        )

    def kv_layout(self, dtype: str, tokens_per_block: int) -> KVLayout:
        """The pools of an engine with this cache dtype (a name of `KV_DTYPES`) and block size."""
        return KVLayout(dtype, tokens_per_block, self.kv_groups)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight of the graph by its canonical name; linears are [out, in]."""
        shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (self.vocab_size, self.hidden_size)}
        for i in range(self.num_layers):
            shapes |= {f"layers.{i}.{name}": shape for name, shape in self._layer_shapes().items()}
        shapes["norm.weight"] = (self.hidden_size,)
        if not self.tied_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    def num_parameters(self) -> int:
        total = 0
        for shape in self.weight_shapes().values():
            total += shape[0] * (shape[1] if len(shape) > 1 else 1)
        return total

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        linears = {
            "attention.q": (q, hidden, self.qkv_bias),
            "attention.k": (kv, hidden, self.qkv_bias),
            "attention.v": (kv, hidden, self.qkv_bias),
            "attention.o": (hidden, q, self.output_bias),
            "mlp.gate": (inner, hidden, self.mlp_bias),
            "mlp.up": (inner, hidden, self.mlp_bias),
            "mlp.down": (hidden, inner, self.mlp_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "attention.norm.weight": (hidden,),
            "mlp.norm.weight": (hidden,),
        }
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)
        if self.qk_norm:
            shapes |= {f"attention.{n}_norm.weight": (self.head_size,) for n in "qk"}
        if self.sandwich_norms:
            shapes |= {f"{block}.post_norm.weight": (hidden,) for block in ("attention", "mlp")}
        return shapes


@dataclass(frozen=True)
class QuantSpec:
    """One recipe: `builder/recipes/NAME.toml`."""

    name: str
    weights: str = "none"  # none, as_is, int8, int4
    group_size: int = 0  # 0: per output channel
    symmetric: bool = False
    exclude: tuple[str, ...] = ()  # graph names of linears that stay as they are, e.g. "lm_head"


@dataclass(frozen=True)
class BuildConfig:
    """What `trtforge build` was asked; CLI defaults are read from here."""

    target: str = "cpu"
    recipe: str = "auto"  # as_is for a GGUF file, full_prec for others
    activations: str = "auto"  # of quantized linears: int8, fp32; auto: int8 for as_is on the CPU, else fp32
    kv_cache_dtype: str = "auto"
    tokens_per_block: int = 16
    limits: Limits = field(default_factory=lambda: Limits(max_seq_len=0))  # 0: the model's own, up to 8192
