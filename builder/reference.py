"""A model as plain numpy computes it, layer by layer from the checkpoint: what `verify` compares with.

It shares ModelSpec and the checkpoint's reader with the build, and nothing else: no graph, no plugin op, no
paged cache, no OpenVINO. FP32 throughout. All sequences go through a layer before its successor is read, so
memory is one layer's weights, the hidden states, and the logits that are asked for.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from trtforge.builder.spec import LayerSpec, ModelSpec
from trtforge.runtime.manifest import Rope

Array = NDArray[np.float32]

#: Reads a weight by its name in ModelSpec.weight_shapes, FP32; linears are [out, in].
Read = Callable[[str], Array]


#: Gets a layer's number and its K (rotated) and V for one sequence, [T, kv_heads, head_size].
Observe = Callable[[int, Array, Array], None]


def hidden_states(
    spec: ModelSpec, read: Read, sequences: Sequence[Sequence[int]], observe: Observe | None = None
) -> list[Array]:
    """What the output head takes, after the last norm: FP32 [T, hidden] per sequence of T tokens.

    observe: called for each layer of the first sequence.
    """
    embedding = read("embedding.weight")
    states = [embedding[np.asarray(ids)] * np.float32(spec.embedding_scale) for ids in sequences]
    del embedding
    for index, layer in enumerate(spec.layers):
        weights = read_layer(spec, read, index)
        for number, x in enumerate(states):
            states[number], k, v = decoder_layer(spec, layer, weights, x)
            if observe is not None and number == 0:
                observe(index, k, v)
    norm = read("norm.weight")
    return [rms_norm(spec, x, norm) for x in states]


def output_head(spec: ModelSpec, read: Read) -> Callable[[Array], Array]:
    """The function from hidden states [T, hidden] to logits [T, vocab]; it holds the head's weight."""
    head = read("embedding.weight" if spec.tied_embeddings else "lm_head.weight")
    return lambda states: softcap(states @ head.T, spec.logit_softcap)


def read_layer(spec: ModelSpec, read: Read, index: int) -> dict[str, Array]:
    """All weights of a layer by their names within it (`attention.q.weight`)."""
    prefix = f"layers.{index}."
    return {name.removeprefix(prefix): read(name) for name in spec.weight_shapes() if name.startswith(prefix)}


def decoder_layer(
    spec: ModelSpec, layer: LayerSpec, weights: dict[str, Array], x: Array
) -> tuple[Array, Array, Array]:
    """[T, hidden] -> [T, hidden], and the layer's K and V."""
    normed = rms_norm(spec, x, weights["attention.norm.weight"])
    attended, k, v = attention(spec, layer, weights, normed)
    if spec.sandwich_norms:
        attended = rms_norm(spec, attended, weights["attention.post_norm.weight"])
    x = x + attended
    mixed = mlp(spec, weights, rms_norm(spec, x, weights["mlp.norm.weight"]))
    if spec.sandwich_norms:
        mixed = rms_norm(spec, mixed, weights["mlp.post_norm.weight"])
    return x + mixed, k, v


def attention(
    spec: ModelSpec, layer: LayerSpec, weights: dict[str, Array], x: Array
) -> tuple[Array, Array, Array]:
    """Causal attention of one sequence over itself. [T, hidden] -> [T, hidden], K, V [T, kv_heads, head_size]"""
    tokens, group = len(x), spec.num_heads // spec.num_kv_heads
    q = linear(weights, "attention.q", x).reshape(tokens, spec.num_heads, spec.head_size)
    k = linear(weights, "attention.k", x).reshape(tokens, spec.num_kv_heads, spec.head_size)
    v = linear(weights, "attention.v", x).reshape(tokens, spec.num_kv_heads, spec.head_size)
    if spec.qk_norm:
        q = rms_norm(spec, q, weights["attention.q_norm.weight"])
        k = rms_norm(spec, k, weights["attention.k_norm.weight"])
    q, k = (rotate(spec.ropes[layer.rope], heads) for heads in (q, k))
    position = np.arange(tokens)
    distance = position[:, None] - position  # [T queries, T keys]
    hidden = (distance < 0) | (distance >= (layer.window or tokens))
    output = np.empty_like(q)
    for head in range(spec.num_heads):
        scores = (q[:, head] @ k[:, head // group].T) * np.float32(spec.attention_scale)  # [T, T]
        scores = softcap(scores, spec.attention_softcap)
        scores[hidden] = -np.inf
        output[:, head] = softmax(scores) @ v[:, head // group]
    return linear(weights, "attention.o", output.reshape(tokens, -1)), k, v


def mlp(spec: ModelSpec, weights: dict[str, Array], x: Array) -> Array:
    """[T, hidden] -> [T, hidden]"""
    gate = activate(spec.activation, linear(weights, "mlp.gate", x))
    return linear(weights, "mlp.down", gate * linear(weights, "mlp.up", x))


def linear(weights: dict[str, Array], name: str, x: Array) -> Array:
    """[T, in] -> [T, out]"""
    y = x @ weights[f"{name}.weight"].T
    bias = weights.get(f"{name}.bias")
    return y if bias is None else y + bias


def rms_norm(spec: ModelSpec, x: Array, weight: Array) -> Array:
    """Over the last axis."""
    mean: Array = np.mean(np.square(x), axis=-1, keepdims=True)
    normed: Array = x / np.sqrt(mean + np.float32(spec.norm_epsilon))
    return normed * (weight + np.float32(spec.norm_offset))


def rotate(rope: Rope, heads: Array) -> Array:
    """Rotate element i of a head with element i + rotary_dim / 2; the rest stays. [T, H, D] -> [T, H, D]"""
    half = len(rope.inv_freq)
    positions = np.arange(len(heads), dtype=np.float32)
    angles = positions[:, None, None] * np.asarray(rope.inv_freq, np.float32)  # [T, 1, rotary_dim / 2]
    cos, sin = (f(angles) * np.float32(rope.attention_factor) for f in (np.cos, np.sin))
    a, b, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return np.concatenate((a * cos - b * sin, b * cos + a * sin, rest), axis=-1)


def activate(name: str, x: Array) -> Array:
    if name == "silu":
        inner = np.float32(0.5) * x  # x * sigmoid(x) = x / 2 * (1 + tanh(x / 2)), which does not overflow
    else:
        assert name == "gelu_tanh", name
        inner = np.float32((2 / np.pi) ** 0.5) * (x + np.float32(0.044715) * x * x * x)
    activated: Array = np.float32(0.5) * x * (np.float32(1) + np.tanh(inner))
    return activated


def softmax(scores: Array) -> Array:
    weights: Array = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def softcap(scores: Array, cap: float | None) -> Array:
    return scores if cap is None else np.float32(cap) * np.tanh(scores / np.float32(cap))
