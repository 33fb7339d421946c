"""The plain graph: one step of the model in ONNX, standard ops and ours, with all requests' tokens back to
back.

| input | type, shape | meaning |
|---|---|---|
| token_ids | INT32 [T] | this step's tokens of all requests |
| positions | INT32 [T] | each token's position in its own sequence |
| cos_sin.{r} | FP32 [T, rotary_dim] | rotation rows of RoPE r: cosines, then sines |
| query_start | INT32 [B+1] | cumulative counts of each request's tokens in this step |
| kv_lengths | INT32 [B] | each request's tokens in the cache after this step |
| slot_mapping.{g} | INT64 [T] | where each token's K and V go: block * tokens_per_block + offset |
| block_tables.{g} | INT32 [B, max_blocks] | physical block of each logical block |
| logit_rows | INT32 [R] | the rows of T whose logits are wanted |
| kv_pool.{g} | cache type [num_blocks, layers, 2, kv_heads, tokens_per_block, head_size] | the pool |
| kv_scales.{g} | FP32 [num_blocks, layers, 2, kv_heads, tokens_per_block, 1] | quantized caches only |

Outputs: `logits` FP32 [R, vocab_size], and for each group `kv_pool_out.{g}` (and `kv_scales_out.{g}`), the
pool after this step's writes. r counts `ModelSpec.ropes`, g counts `ModelSpec.kv_groups`.

Linears are `Gemm(x, weight, bias, transB=1)` with weights [out, in] as checkpoints have them, so that no
target needs a transposed copy. The norm is written as x / rms(x) * weight in primitive ops, which OpenVINO
and TensorRT fuse. Weights are read from the checkpoint when the graph is saved, one at a time. Every weight,
node and value is named by where it is: `layers.3.attention.q.weight`, `layers.3.attention.q`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from trtforge.builder.blocks import BlockFormat, Blocks
from trtforge.builder.checkpoint.base import Checkpoint
from trtforge.builder.spec import LayerSpec, ModelSpec
from trtforge.builder.translate import Source, Translation
from trtforge.plugins import DOMAIN, DOMAIN_VERSION, OPS, OPSET
from trtforge.plugins.kv_dtypes import KV_DTYPES
from trtforge.runtime.manifest import KVLayout

IR_VERSION = 10  # the first with opset 21's types; ONNX Runtime and TensorRT read it

#: Reads of weights by canonical name, shapes and types known before.
Weights = Mapping[str, ir.TensorProtocol]


def build_graph(spec: ModelSpec, weights: Weights, kv: KVLayout) -> ir.Model:
    """The plain graph of a model, with function bodies for our ops.

    weights: one per name of `spec.weight_shapes()`, usually lazy (`lazy_weights`). kv: `spec.kv_layout(...)`.
    """
    step = _Step(_Writer(weights), spec, kv)
    logits = step.logits(step.decoder())
    outputs = [logits] + [value for group in step.groups for value in group.outputs()]
    graph = ir.Graph(
        step.inputs(),
        outputs,
        nodes=step.writer.nodes,
        initializers=tuple(step.writer.initializers.values()),
        opset_imports={"": OPSET, DOMAIN: DOMAIN_VERSION},
        name=spec.name or spec.family,
    )
    functions = [ir.serde.deserialize_function(op.function(kv.dtype)) for op in OPS.values()]
    return ir.Model(graph, ir_version=IR_VERSION, producer_name="trtforge", functions=functions)


class StoredTensor(ir.LazyTensor):
    """A weight of a checkpoint, read each time it is used.

    format, stored_type: how the checkpoint has it if it is quantized there (then `read_blocks` gives it so), and
    what the checkpoint calls that.
    """

    def __init__(self, translation: Translation, checkpoint: Checkpoint, name: str, shape: tuple[int, ...]):
        source = translation.sources[name]
        offset = translation.spec.norm_offset if _is_norm(name) else 0.0
        read = partial(_read, source, checkpoint, offset)
        super().__init__(read, ir.DataType.FLOAT, ir.Shape(shape), name=name)
        self.format: BlockFormat | None = translation.formats.get(name)
        self.stored_type = translation.stored_types[name]
        self.read_blocks: Callable[[], Blocks] = partial(source.read_blocks, checkpoint)


def lazy_weights(translation: Translation, checkpoint: Checkpoint) -> dict[str, ir.TensorProtocol]:
    """All weights of a model as tensors that read the checkpoint, which must stay open, each time they are
    used."""
    shapes = translation.spec.weight_shapes()
    return {name: StoredTensor(translation, checkpoint, name, shape) for name, shape in shapes.items()}


def save_graph(graph: ir.Model, file: Path, progress: Callable[[str, int, int], None] | None = None) -> None:
    """Write `file` and, beside it, its weights as `{file}.data`: tensor by tensor, so that memory holds one
    at a time.

    progress: called with ("weights", tensors written, tensors in all).
    """

    def advance(_: object, info: Any) -> None:
        if progress:
            progress("weights", info.index, info.total)

    ir.save(graph, file, external_data=file.name + ".data", callback=advance)


def _read(source: Source, checkpoint: Checkpoint, offset: float) -> ir.TensorProtocol:
    array = source.read(checkpoint)
    return ir.tensor(array + np.float32(offset) if offset else array)


def _is_norm(name: str) -> bool:
    return name.removesuffix(".weight").endswith("norm")


class _Writer:
    """Nodes and initializers of a graph in the making; a node's name is also its output's."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.nodes: list[ir.Node] = []
        self.initializers: dict[str, ir.Value] = {}

    def weight(self, name: str) -> ir.Value:
        """The named weight as an initializer; asked for twice (a tied embedding), it is the same one."""
        return self._initializer(name, lambda: self.weights[name])

    def constant(self, name: str, array: np.ndarray[Any, Any]) -> ir.Value:
        """A small constant, shared by all who name it."""
        return self._initializer(name, lambda: ir.tensor(array, name=name))

    def op(
        self,
        op_type: str,
        name: str,
        *inputs: ir.Value,
        shape: Sequence[int | str] | None = None,
        **attributes: Any,
    ) -> ir.Value:
        """A standard op with one FP32 output of the same name. shape: the output's; by default the first
        input's."""
        known = _dims(inputs[0]) if shape is None else shape
        output = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(known))
        node_attributes = [ir.convenience.convert_attribute(k, v) for k, v in attributes.items()]
        self.nodes.append(ir.Node("", op_type, inputs, node_attributes, outputs=[output], name=name))
        return output

    def plugin(
        self, op_type: str, name: str, outputs: list[str], inputs: Mapping[str, ir.Value], **attributes: Any
    ) -> list[ir.Value]:
        """One of our ops, checked against its declaration."""
        node = OPS[op_type].node(inputs, attributes, outputs, name)
        self.nodes.append(node)
        return list(node.outputs)

    def _initializer(self, name: str, make: Callable[[], ir.TensorProtocol]) -> ir.Value:
        if name not in self.initializers:
            tensor = make()
            shape = ir.Shape([int(d) for d in tensor.shape])  # type: ignore[arg-type]
            self.initializers[name] = ir.Value(
                name=name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor
            )
        return self.initializers[name]


@dataclass
class _Group:
    """The inputs of one group of layers, and its pool as the layers so far left it."""

    index: int
    slot_mapping: ir.Value
    block_tables: ir.Value
    pools: dict[str, ir.Value]  # by port name: the inputs
    state: dict[str, ir.Value] = field(default_factory=dict)  # the same after the last layer's write

    def outputs(self) -> list[ir.Value]:
        for port, value in self.state.items():
            value.name = f"{port}_out.{self.index}"
        return list(self.state.values())


class _Step:
    """Writes the model's one step."""

    def __init__(self, writer: _Writer, spec: ModelSpec, kv: KVLayout) -> None:
        self.writer, self.spec, self.kv = writer, spec, kv
        self.token_ids = _input("token_ids", ir.DataType.INT32, "T")
        self.positions = _input("positions", ir.DataType.INT32, "T")
        self.cos_sin = [
            _input(f"cos_sin.{r}", ir.DataType.FLOAT, "T", rope.rotary_dim)
            for r, rope in enumerate(spec.ropes)
        ]
        self.query_start = _input("query_start", ir.DataType.INT32, "B+1")
        self.kv_lengths = _input("kv_lengths", ir.DataType.INT32, "B")
        self.logit_rows = _input("logit_rows", ir.DataType.INT32, "R")
        self.groups = [self._group(g) for g in range(len(kv.groups))]

    def inputs(self) -> list[ir.Value]:
        """All inputs, in the order of the module's table."""
        per_group = [[g.slot_mapping for g in self.groups], [g.block_tables for g in self.groups]]
        pools = [g.pools[port] for port in self.groups[0].pools for g in self.groups]
        return [
            self.token_ids,
            self.positions,
            *self.cos_sin,
            self.query_start,
            self.kv_lengths,
            *per_group[0],
            *per_group[1],
            self.logit_rows,
            *pools,
        ]

    def decoder(self) -> ir.Value:
        """Embedding and all layers: [T, hidden_size]."""
        w, spec = self.writer, self.spec
        embedding = w.weight("embedding.weight")
        x = w.op("Gather", "embedding", embedding, self.token_ids, shape=("T", spec.hidden_size))
        if spec.embedding_scale != 1.0:
            scale = w.constant("embedding.scale", np.array(spec.embedding_scale, np.float32))
            x = w.op("Mul", "embedding.scaled", x, scale)
        for i, layer in enumerate(spec.layers):
            x = self._residual(f"layers.{i}.attention", x, partial(self._attention, i, layer))
            x = self._residual(f"layers.{i}.mlp", x, self._mlp)
        return x

    def logits(self, x: ir.Value) -> ir.Value:
        """Final norm and head, of the rows whose logits are wanted: [R, vocab_size]."""
        w, spec = self.writer, self.spec
        rows = w.op("Gather", "logit_rows.hidden", x, self.logit_rows, shape=("R", spec.hidden_size))
        head = w.weight("embedding.weight" if spec.tied_embeddings else "lm_head.weight")
        x = w.op("Gemm", "lm_head", self._norm("norm", rows), head, shape=("R", spec.vocab_size), transB=1)
        if spec.logit_softcap is not None:
            cap = w.constant("lm_head.cap", np.array(spec.logit_softcap, np.float32))
            x = w.op("Tanh", "lm_head.tanh", w.op("Div", "lm_head.uncapped", x, cap))
            x = w.op("Mul", "lm_head.capped", x, cap)
        x.name = "logits"
        return x

    def _residual(self, at: str, x: ir.Value, block: Callable[[str, ir.Value], ir.Value]) -> ir.Value:
        """x + block(norm(x)), with a norm after the block too where the model has it."""
        y = block(at, self._norm(f"{at}.norm", x))
        if self.spec.sandwich_norms:
            y = self._norm(f"{at}.post_norm", y)
        return self.writer.op("Add", f"{at}.residual", x, y)

    def _attention(self, index: int, layer: LayerSpec, at: str, x: ir.Value) -> ir.Value:
        spec, kv = self.spec, self.kv
        q, k, v = (self._linear(f"{at}.{name}", x, spec.qkv_bias) for name in "qkv")
        if spec.qk_norm:
            q = self._head_norm(f"{at}.q_norm", q, spec.num_heads)
            k = self._head_norm(f"{at}.k_norm", k, spec.num_kv_heads)
        g = next(i for i, group in enumerate(kv.groups) if index in group.layers)
        group = self.groups[g]
        shared: dict[str, Any] = {
            "layer": kv.groups[g].layers.index(index),
            "num_heads": spec.num_heads,
            "num_kv_heads": spec.num_kv_heads,
            "head_size": spec.head_size,
            "kv_dtype": kv.dtype,
        }
        name = f"{at}.kv_cache_update"
        q, *pools = self.writer.plugin(
            "KVCacheUpdate",
            name,
            [f"{name}.q"] + [f"{name}.{port}" for port in group.pools],
            {
                "q": q,
                "k": k,
                "v": v,
                "cos_sin": self.cos_sin[layer.rope],
                "slot_mapping": group.slot_mapping,
                **group.state,
            },
            **shared,
        )
        group.state = dict(zip(group.pools, pools, strict=True))
        name = f"{at}.paged_attention"
        (y,) = self.writer.plugin(
            "PagedAttention",
            name,
            [name],
            {
                "q": q,
                **group.state,
                "positions": self.positions,
                "query_start": self.query_start,
                "kv_lengths": self.kv_lengths,
                "block_tables": group.block_tables,
            },
            **shared,
            scale=spec.attention_scale,
            window=layer.window or 0,
            softcap=spec.attention_softcap or 0.0,
        )
        return self._linear(f"{at}.o", y, spec.output_bias)

    def _mlp(self, at: str, x: ir.Value) -> ir.Value:
        """down(activation(gate(x)) * up(x))"""
        w, bias = self.writer, self.spec.mlp_bias
        gate = self._linear(f"{at}.gate", x, bias)
        if self.spec.activation == "silu":
            gate = w.op("Mul", f"{at}.silu", gate, w.op("Sigmoid", f"{at}.sigmoid", gate))
        else:
            assert self.spec.activation == "gelu_tanh", self.spec.activation
            gate = w.op("Gelu", f"{at}.gelu", gate, approximate="tanh")
        x = w.op("Mul", f"{at}.gated", gate, self._linear(f"{at}.up", x, bias))
        return self._linear(f"{at}.down", x, bias)

    def _linear(self, name: str, x: ir.Value, bias: bool) -> ir.Value:
        """x [T, in] -> [T, out]"""
        w = self.writer
        weight = w.weight(f"{name}.weight")
        biases = [w.weight(f"{name}.bias")] if bias else []
        return w.op("Gemm", name, x, weight, *biases, shape=("T", _dims(weight)[0]), transB=1)

    def _norm(self, name: str, x: ir.Value) -> ir.Value:
        """RMSNorm over the last dimension: x / sqrt(mean(x^2) + epsilon) * weight"""
        w = self.writer
        epsilon = w.constant("norm.epsilon", np.array(self.spec.norm_epsilon, np.float32))
        last = w.constant("norm.axis", np.array([-1], np.int64))
        square = w.op("Pow", f"{name}.square", x, w.constant("norm.exponent", np.array(2.0, np.float32)))
        mean = w.op("ReduceMean", f"{name}.mean", square, last, shape=(*_dims(x)[:-1], 1), keepdims=1)
        root = w.op("Sqrt", f"{name}.root", w.op("Add", f"{name}.add", mean, epsilon))
        scaled = w.op("Mul", f"{name}.scaled", x, w.op("Reciprocal", f"{name}.reciprocal", root))
        return w.op("Mul", name, scaled, w.weight(f"{name}.weight"))

    def _head_norm(self, name: str, x: ir.Value, heads: int) -> ir.Value:
        """The norm of each head by itself: [T, heads * head_size] -> the same."""
        w, size = self.writer, self.spec.head_size
        split = w.constant(f"heads.{heads}", np.array([-1, heads, size], np.int64))
        joined = w.constant(f"heads.{heads}.joined", np.array([-1, heads * size], np.int64))
        x = w.op("Reshape", f"{name}.split", x, split, shape=("T", heads, size))
        return w.op("Reshape", f"{name}.joined", self._norm(name, x), joined, shape=("T", heads * size))

    def _group(self, g: int) -> _Group:
        group, dtype = self.kv.groups[g], KV_DTYPES[self.kv.dtype]
        shape = ("num_blocks." + str(g), len(group.layers), 2, group.kv_heads, self.kv.tokens_per_block)
        pools = {"kv_pool": _input(f"kv_pool.{g}", ir.DataType[dtype.onnx], *shape, group.head_size)}
        if dtype.scales:
            pools["kv_scales"] = _input(f"kv_scales.{g}", ir.DataType.FLOAT, *shape, dtype.scales)
        return _Group(
            g,
            _input(f"slot_mapping.{g}", ir.DataType.INT64, "T"),
            _input(f"block_tables.{g}", ir.DataType.INT32, "B", f"max_blocks.{g}"),
            pools,
            dict(pools),
        )


def _dims(value: ir.Value) -> tuple[int | str, ...]:
    assert value.shape is not None, value.name
    return tuple(d if isinstance(d, int) else str(d) for d in value.shape)


def _input(name: str, dtype: ir.DataType, *shape: str | int) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
