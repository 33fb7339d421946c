"""program.json: what is written is read back, and no damaged or hostile one gets past the reader."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtforge.plugins.cpu.packing import PackedLayout
from trtforge.plugins.cpu.program import Constant, Program, layouts
from trtforge.plugins.errors import EngineFormatError

Raw = dict[str, Any]
WHERE = Path("engine/program.json")


@pytest.fixture
def engine(tiny_engine: Callable[..., Path]) -> Path:
    """Two KV groups and rotations, every kind of norm, a tied table; in each group two layers."""
    return tiny_engine("gemma3", recipe="int4_wo", kv_cache_dtype="int8", tokens_per_block=8)


@pytest.fixture
def raw(engine: Path) -> Raw:
    content: Raw = json.loads((engine / "program.json").read_text())
    return content


@pytest.fixture
def size(engine: Path) -> int:
    return (engine / "weights.bin").stat().st_size


def read(raw: object, size: int) -> Program:
    return Program.from_json(raw if isinstance(raw, str) else json.dumps(raw), WHERE, size)


def test_round_trip(engine: Path, size: int) -> None:
    text = (engine / "program.json").read_text()
    program = read(text, size)
    assert program.to_json() == text
    assert [n.name for n in program.nodes] == ["embedding", *(f"layers.{i}" for i in range(4)), "lm_head"]
    assert program.embedding.attributes["scale"] == 8.0
    assert program.embedding.inputs["weights"] == program.head.inputs["weights"]
    assert program.input_sizes() == {
        "cos_sin.0": (24,),
        "cos_sin.1": (24,),
        **{f"kv_pool.{g}": (2, 2, 2, 8, 24) for g in range(2)},
        **{f"kv_scales.{g}": (2, 2, 2, 8, 1) for g in range(2)},
        "logits": (288,),
    }
    layer = program.layers[0]
    assert "q_norm" in layer.inputs and "mlp_post_norm" in layer.inputs
    assert not {name for name in layer.inputs if name.endswith("_bias")}, "what is not there is left out"
    assert layouts(layer)["down_weights"] == PackedLayout(96, 64, 4, 0, 32, 32, True)


def test_constants_lie_where_it_says(engine: Path, size: int, tiny_checkpoint: Callable[..., Path]) -> None:
    from safetensors.numpy import load_file

    program, memory = (
        read((engine / "program.json").read_text(), size),
        np.fromfile(engine / "weights.bin", np.uint8),
    )
    found = {}
    for node in program.nodes:
        for port, value in node.inputs.items():
            if isinstance(value, Constant):
                assert value.offset % 64 == 0
                found[node.name, port] = memory[value.offset :][: value.bytes]
    weights = load_file(tiny_checkpoint("gemma3") / "model.safetensors")
    norm = weights["model.layers.2.post_feedforward_layernorm.weight"] + np.float32(1)
    np.testing.assert_array_equal(found["layers.2", "mlp_post_norm"].view(np.float32), norm)
    used = {value for node in program.nodes for value in node.inputs.values() if isinstance(value, Constant)}
    assert size - sum(c.bytes for c in used) < 64 * len(used), "nothing else is in the file"


def set_at(*path: Any) -> Callable[[Raw], None]:
    """Sets the value at a path of keys; the last of `path` is the value."""

    def change(raw: Any) -> None:
        *keys, last, value = path
        for key in keys:
            raw = raw[key]
        raw[last] = value

    return change


def drop(*path: Any) -> Callable[[Raw], None]:
    def change(raw: Any) -> None:
        *keys, last = path
        for key in keys:
            raw = raw[key]
        del raw[last]

    return change


def swap_layers(raw: Raw) -> None:
    raw["nodes"][1], raw["nodes"][2] = raw["nodes"][2], raw["nodes"][1]


def overlap(raw: Raw) -> None:
    inputs = raw["nodes"][1]["inputs"]
    inputs["k_weights"]["offset"] = inputs["q_weights"]["offset"] + 64


def same_place(raw: Raw) -> None:
    inputs = raw["nodes"][1]["inputs"]
    inputs["k_weights"]["offset"] = inputs["q_weights"]["offset"]


N, I, A = "nodes", "inputs", "attributes"  # noqa: E741
HOSTILE: list[tuple[Callable[[Raw], None], str]] = [
    (set_at(N, {}), "nodes is {}, want list"),
    (set_at(N, []), "its 0 nodes are not PackedEmbedding"),
    (set_at("more", 1), "has the fields"),
    (drop(I), "has the fields"),
    (set_at(N, 1, 7), r"nodes\[1\] is 7, want an object"),
    (
        set_at(N, 1, "op", "Exec"),
        r"nodes\[1\]: op 'Exec' is none of PackedEmbedding, PackedLayer, PackedHead",
    ),
    (set_at(N, 1, "op", []), r"nodes\[1\]: op is \[\], want str"),
    (drop(N, 1, A), r"nodes\[1\] has the fields"),
    (set_at(N, 1, "outputs", []), r"nodes\[1\]: outputs are \[\], want one name"),
    (set_at(N, 1, "outputs", [3]), r"nodes\[1\]: outputs are \[3\], want one name"),
    # the chain
    (drop(N, 0), "its 5 nodes are not PackedEmbedding, layers"),
    (drop(N, -1), "its 5 nodes are not PackedEmbedding, layers"),
    (swap_layers, "'layers.1' reads .*, not 'embedding.scaled' of the node before"),
    (set_at(N, 1, I, "x", "layers.3.mlp.residual"), "'layers.0' reads 'layers.3.mlp.residual', not"),
    (set_at(N, 1, I, "x", "layers.0.mlp.residual"), "'layers.0' reads 'layers.0.mlp.residual', not"),
    (drop(N, 1, I, "x"), "'layers.0' reads None, not"),
    (set_at(N, 2, "name", "layers.0"), "2 nodes have the name 'layers.0'"),
    (set_at(N, 2, "outputs", ["layers.0.mlp.residual"]), "2 nodes give 'layers.0.mlp.residual'"),
    (set_at(N, -1, "outputs", ["lojits"]), "'lm_head' gives 'lojits', want 'logits'"),
    # attributes
    (drop(N, 1, A, "epsilon"), r"nodes\[1\]: PackedLayer: attribute 'epsilon' is missing"),
    (set_at(N, 1, A, "speed", 1), "no attribute 'speed'"),
    (set_at(N, 1, A, "layer", True), "layer=True must be int"),
    (set_at(N, 1, A, "layer", -1), "attribute 'layer' is -1, want 0 to"),
    (set_at(N, 1, A, "window", 2**31), "attribute 'window' is 2147483648, want 0 to"),
    (set_at(N, 1, A, "epsilon", 10**400), "attribute 'epsilon' is 1000.*, want 0 to"),
    (set_at(N, 1, A, "epsilon", float("nan")), "attribute 'epsilon' is nan, want"),
    (set_at(N, 1, A, "scale", float("inf")), "attribute 'scale' is inf, want"),
    (set_at(N, 1, A, "scale", "1"), "scale='1' must be float"),
    (set_at(N, 1, A, "activation", "relu"), "activation='relu' must be"),
    (set_at(N, 1, A, "kv_dtype", "int3"), "unknown KV cache dtype 'int3'"),
    (set_at(N, 1, A, "num_heads", 0), r"'layers.0': weights of \[0, 64\]"),
    (set_at(N, 1, A, "q_format", "4 0 32 16"), "q_format '4 0 32 16' is no format"),
    (set_at(N, 1, A, "q_format", "4 0 32 16 ²"), "q_format .* is no format"),
    (set_at(N, 1, A, "q_format", "3 0 32 16 1"), "in the format '3 0 32 16 1' cannot be"),
    (set_at(N, 1, A, "q_format", "4 0 0 16 1"), "cannot be"),
    (set_at(N, 1, A, "q_format", "4 0 48 16 1"), "cannot be"),
    (set_at(N, 0, A, "group_size", 128), "cannot be"),
    (set_at(N, 0, A, "scale_bits", 24), "scale_bits=24 must be"),
    # inputs of nodes
    (set_at(N, 1, I, "z", "x"), "PackedLayer takes no 'z'"),
    (drop(N, 1, I, "kv_scales"), "'layers.0': kv_scales is missing"),
    (drop(N, 1, I, "down_weights"), "'layers.0': down_weights is missing"),
    (set_at(N, 1, I, "down_weights", "token_ids"), "down_weights is 'token_ids', want a constant of uint8"),
    (set_at(N, 1, I, "positions", "token_ids"), "positions is 'token_ids', want the input of that name"),
    (set_at(N, 1, I, "kv_pool", "kv_scales.0"), "kv_pool is 'kv_scales.0', want an input like 'kv_pool.0'"),
    (set_at(N, 1, I, "kv_pool", "kv_pool.-1"), "kv_pool is 'kv_pool.-1', want an input like"),
    (set_at(N, 1, I, "kv_pool", "kv_pool.00"), "kv_pool is 'kv_pool.00', want an input like"),
    (set_at(N, 1, I, "kv_pool", "kv_pool.1"), "'layers.0' takes inputs of several KV groups"),
    (set_at(N, 1, I, "kv_pool", {"offset": 0, "shape": [64], "dtype": "uint8"}), "want an input like"),
    (set_at(N, 1, A, "layer", 1), "the 2 layers of KV group 0 do not have places 0 to 1"),
    (set_at(N, 2, A, "num_heads", 4 * 4), "'layers.1': .* has shape"),
    (set_at(N, 2, A, "head_size", 48), "'layers.1': .* has shape"),
    (set_at(N, 2, A, "activation_bits", 8), "activation_bits is 8, 32 in the first layer"),
    # constants
    (set_at(N, 1, I, "q_norm", 5), r"nodes\[1\]: q_norm is 5, want an object"),
    (set_at(N, 1, I, "q_norm", {"offset": 0}), "q_norm has the fields"),
    (set_at(N, 1, I, "q_norm", "offset", 96.0), "q_norm: offset is 96.0, want int"),
    (set_at(N, 1, I, "q_norm", "offset", 96), "q_norm: offset 96 is no multiple of 64"),
    (set_at(N, 1, I, "q_norm", "offset", -64), "q_norm: offset -64 is no multiple of 64"),
    (set_at(N, 1, I, "q_norm", "offset", 2**40), r"q_norm ends at byte \d+, weights.bin has"),
    (set_at(N, 1, I, "q_norm", "shape", 24), "q_norm: shape is 24, want list"),
    (set_at(N, 1, I, "q_norm", "shape", []), r"q_norm: shape \[\] cannot be"),
    (set_at(N, 1, I, "q_norm", "shape", [-24]), r"q_norm: shape \[-24\] cannot be"),
    (set_at(N, 1, I, "q_norm", "shape", [24.0]), r"q_norm: shape \[24.0\] cannot be"),
    (
        set_at(N, 1, I, "q_norm", "shape", [23]),
        r"q_norm has shape \[23\], want \[head_size\] with head_size = 24",
    ),
    (set_at(N, 1, I, "q_norm", "shape", [1]), r"q_norm has shape \[1\]; what .* is left out"),
    (set_at(N, 1, I, "q_norm", "shape", [24, 1]), "q_norm has rank 2"),
    (set_at(N, 1, I, "q_norm", "dtype", "float16"), "q_norm: dtype 'float16' is neither uint8 nor float32"),
    (set_at(N, 1, I, "q_norm", "dtype", "uint8"), "q_norm is .*, want a constant of float32"),
    (set_at(N, 1, I, "q_weights", "shape", [1, 1]), r"q_weights has shape \[1, 1\], want \[6, "),
    (set_at(N, -1, I, "norm", "shape", [32]), r"norm has shape \[32\], want \[in_features\]"),
    (overlap, r"the constants at bytes \d+ and \d+ overlap"),
    (same_place, r"'layers.0': k_weights overlaps another constant at byte \d+"),
    # inputs of the graph
    (set_at(I, "kv_pool.0", 5), "inputs: 'kv_pool.0': shape 5 cannot be"),
    (
        set_at(I, "kv_pool.0", [2, 2, 2, 8]),
        r"input 'kv_pool.0' has sizes \[2, 2, 2, 8\], want \[2, 2, 2, 8, 24\]",
    ),
    (set_at(I, "kv_pool.0", [3, 2, 2, 8, 24]), r"input 'kv_pool.0' has sizes"),
    (set_at(I, "kv_pool.0", [2, 2, 2, 8, 48]), r"input 'kv_pool.0' has sizes"),
    (set_at(I, "kv_scales.1", [2, 2, 2, 16, 1]), "input 'kv_scales.1' has sizes"),
    (set_at(I, "kv_pool.1", [2, 2, 2, 16, 24]), "input 'kv_pool.1' has sizes"),
    (set_at(I, "cos_sin.0", [26]), "input 'cos_sin.0' has sizes .* an even number up to 24"),
    (set_at(I, "cos_sin.0", [23]), "input 'cos_sin.0' has sizes"),
    (set_at(I, "cos_sin.2", [24]), "input 'cos_sin.2' is taken by no layer"),
    (drop(I, "kv_pool.1"), "input 'kv_pool.1' is taken by no layer, or has no size"),
]


@pytest.mark.parametrize(("change", "message"), HOSTILE, ids=[message[:40] for _, message in HOSTILE])
def test_a_damaged_program_is_refused_in_one_line(
    change: Callable[[Raw], None], message: str, raw: Raw, size: int
) -> None:
    change(raw)
    with pytest.raises(EngineFormatError, match=message) as refused:
        read(raw, size)
    text = str(refused.value)
    assert text.startswith("engine/program.json: ") and text.endswith("; build the engine again")
    assert "\n" not in text and len(text) < 400


def test_numbers_skip_none(raw: Raw, size: int) -> None:
    text = json.dumps(raw)
    with pytest.raises(EngineFormatError, match=r"input 'kv_pool\.7' has none before it"):
        read(re.sub(r"(kv_pool|kv_scales|slot_mapping|block_tables)\.1", r"\1.7", text), size)


def test_text_that_is_no_program(engine: Path, size: int) -> None:
    text = (engine / "program.json").read_text()
    for damaged in ("", text[: len(text) // 2], "[" * 100_000, "5", "null", "9" * 5000, text + text):
        with pytest.raises(EngineFormatError, match=r"^engine/program.json: .*; build the engine again$"):
            read(damaged, size)


def test_a_file_of_weights_that_ends_early(engine: Path, size: int) -> None:
    text = (engine / "program.json").read_text()
    read(text, size)
    with pytest.raises(EngineFormatError, match=rf"ends at byte {size}, weights.bin has {size - 1}"):
        read(text, size - 1)
    with pytest.raises(EngineFormatError, match=r"weights.bin has 0"):
        read(text, 0)


def test_any_value_may_be_replaced_by_any_other(raw: Raw, size: int, rng: np.random.Generator) -> None:
    """Read, or refused by EngineFormatError: nothing else is ever raised."""
    text, refused = json.dumps(raw), 0
    junk = [None, True, -1, 0, 3, 2**63, 0.5, "", "x", "kv_pool.0", "4 0 32 32 1", [], [1], {}, {"offset": 0}]
    for _ in range(500):
        changed = json.loads(text)
        for _ in range(rng.integers(1, 3)):
            at: Any = changed
            while True:
                keys = list(at) if isinstance(at, dict) else range(len(at))
                key = keys[rng.integers(len(keys))]
                if not isinstance(at[key], dict | list) or not at[key] or rng.random() < 0.1:
                    break
                at = at[key]
            at[key] = junk[rng.integers(len(junk))]
        try:
            read(changed, size)
        except EngineFormatError as e:
            refused += 1
            assert "\n" not in str(e)
    assert refused > 400
