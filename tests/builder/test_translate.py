"""From config and headers to ModelSpec: what is decided from the tensors, and what is refused with which words.

Headers alone are needed, so that each case is a dictionary away from a good checkpoint.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from trtforge.builder.checkpoint import open_checkpoint
from trtforge.builder.checkpoint.base import TensorInfo, TokenizerFiles
from trtforge.builder.families import families, family_of
from trtforge.builder.translate import Source, Translation, translate
from trtforge.plugins.errors import CheckpointError, ForgeError, UnsupportedModel


@dataclass
class Headers:
    """A checkpoint without weights."""

    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    path: Path = Path("tiny")
    kind: str = "safetensors"
    generation_config: Mapping[str, Any] = field(default_factory=dict)

    def read(self, name: str) -> Any:
        raise AssertionError(f"{name} was read: headers must do")

    def block_format(self, name: str) -> None:
        return None

    def read_blocks(self, name: str) -> Any:
        return self.read(name)

    def tokenizer(self) -> TokenizerFiles:
        raise AssertionError

    def close(self) -> None:
        pass

    def resize(self, name: str, *shape: int) -> None:
        self.tensors[name] = TensorInfo(name, shape, "F32")


@pytest.fixture
def headers(tiny_checkpoint: Callable[[str], Path]) -> Callable[[str], Headers]:
    def make(variant: str = "llama") -> Headers:
        checkpoint = open_checkpoint(tiny_checkpoint(variant))
        found = Headers(json.loads(json.dumps(dict(checkpoint.config))), dict(checkpoint.tensors))
        checkpoint.close()
        return found

    return make


def refusal(checkpoint: Headers, kind: type[ForgeError] = CheckpointError, max_seq_len: int = 64) -> str:
    with pytest.raises(kind) as error:
        translate(checkpoint, max_seq_len)
    message = str(error.value)
    assert "\n" not in message
    return message


# What is decided from the tensors


def test_biases_are_those_that_the_checkpoint_has(headers: Callable[[str], Headers]) -> None:
    found = [translate(headers(v), 64).spec for v in ("llama", "llama-bias", "qwen2", "qwen3-bias")]
    assert [(s.qkv_bias, s.output_bias, s.mlp_bias) for s in found] == [
        (False, False, False),
        (True, True, True),
        (True, False, False),
        (True, True, False),
    ]


def test_a_bias_on_some_of_the_projections_only_is_an_error(headers: Callable[[str], Headers]) -> None:
    checkpoint = headers("llama")
    checkpoint.resize("model.layers.1.self_attn.q_proj.bias", 64)
    assert "model.layers.0.self_attn.q_proj.bias" in refusal(checkpoint)


def test_tied_is_what_has_no_head(headers: Callable[[str], Headers]) -> None:
    assert translate(headers("llama-tied"), 64).spec.tied_embeddings
    says_tied = headers("llama")
    says_tied.config["tie_word_embeddings"] = True
    assert not translate(says_tied, 64).spec.tied_embeddings
    without = headers("llama-tied")
    without.config["tie_word_embeddings"] = False
    assert "'lm_head.weight' is missing" in refusal(without)


def test_the_vocabulary_is_the_embeddings(headers: Callable[[str], Headers]) -> None:
    checkpoint = headers("llama-tied")
    checkpoint.resize("model.embed_tokens.weight", 301, 64)
    found = translate(checkpoint, 64)
    assert found.spec.vocab_size == 301
    assert len(found.warnings) == 1 and "288" in found.warnings[0] and "301" in found.warnings[0]


def test_tensors_that_nothing_needs_are_reported(headers: Callable[[str], Headers]) -> None:
    checkpoint = headers("llama")
    checkpoint.resize("model.layers.2.input_layernorm.weight", 64)
    checkpoint.resize("vision.patch.weight", 3, 3)
    assert translate(checkpoint, 64).coverage.unused == (
        "model.layers.2.input_layernorm.weight",
        "vision.patch.weight",
    )


@pytest.mark.parametrize("leaf", ["weight_scale", "g_idx", "output_scale"])
def test_a_tensor_within_a_module_in_use_is_not_left_out(
    leaf: str, headers: Callable[[str], Headers]
) -> None:
    checkpoint = headers("llama")
    checkpoint.resize(f"model.layers.0.self_attn.k_proj.{leaf}", 32)
    assert f"self_attn.k_proj.{leaf}' is not understood" in refusal(checkpoint, UnsupportedModel)


def test_fused_projections_are_rows_of_one_tensor(headers: Callable[[str], Headers]) -> None:
    sources = translate(headers("phi3"), 64).sources
    fused = "model.layers.1.self_attn.qkv_proj.weight"
    assert [sources[f"layers.1.attention.{n}.weight"] for n in "qkv"] == [
        Source(fused, (0, 64)),
        Source(fused, (64, 96)),
        Source(fused, (96, 128)),
    ]


def test_a_window_that_holds_a_whole_sequence_is_none(headers: Callable[[str], Headers]) -> None:
    windows = [g.window for g in translate(headers("qwen2-window"), 9).spec.kv_groups]
    assert windows == [None, 8]
    assert [g.window for g in translate(headers("qwen2-window"), 8).spec.kv_groups] == [None]


def test_older_spellings_give_the_same_model(headers: Callable[[str], Headers]) -> None:
    new = headers("gemma3-untied")
    old = headers("gemma3-untied")
    del old.config["rope_parameters"], old.config["layer_types"]
    old.config |= {"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 2}
    old.config["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert translate(old, 64).spec.ropes[::-1] == translate(new, 64).spec.ropes
    assert translate(old, 64).spec.layers == translate(_with(new, layer_types=kinds), 64).spec.layers


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_of_a_model_that_sees_the_language_model_is_built(
    prefix: str, headers: Callable[[str], Headers]
) -> None:
    text = headers("gemma3")
    alone = translate(text, 64)
    tensors = {n.replace("model.", prefix, 1): i for n, i in text.tensors.items()}
    architectures = ["Gemma3ForConditionalGeneration"]
    nested = {k: v for k, v in text.config.items() if k != "architectures"}
    both = Headers({"architectures": architectures, "text_config": nested, "vision_config": {}}, tensors)
    both.resize("vision_tower.patch.weight", 8, 8)
    found = translate(both, 64)
    assert replace(found.spec, architecture=alone.spec.architecture) == alone.spec
    assert found.coverage.unused == ("vision_tower.patch.weight",)


# What is refused


def _with(checkpoint: Headers, **config: Any) -> Headers:
    checkpoint.config |= config
    return checkpoint


@pytest.mark.parametrize("value", [0, -4, 2.5, "64", True, None, [64]])
@pytest.mark.parametrize(
    "key", ["hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size"]
)
def test_a_size_that_is_none_is_named(key: str, value: Any, headers: Callable[[str], Headers]) -> None:
    message = refusal(_with(headers("llama"), **{key: value}))
    assert f"{key} is {value!r}" in message


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"num_key_value_heads": -1}, "num_key_value_heads is -1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": 3}, "model.layers.2."),
        ({"head_dim": 10**9}, "num_attention_heads * head_dim is 4000000000"),
        ({"head_dim": 15}, "head_dim 15"),
        ({"head_dim": 32}, "head_dim 32"),
        ({"hidden_size": 128}, "hidden_size 128"),
        ({"hidden_size": 10**12}, "hidden_size is 1000000000000"),
        ({"num_attention_heads": 8}, "num_attention_heads 8"),
        ({"intermediate_size": 95}, "intermediate_size 95"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"architectures": None}, "architectures is None"),
        ({"architectures": []}, "architectures is []"),
        ({"architectures": [7]}, "architectures is [7]"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'"),
        ({"rope_parameters": [1]}, "rope"),
    ],
)
def test_an_absurd_config_is_named(
    config: dict[str, Any], named: str, headers: Callable[[str], Headers]
) -> None:
    assert named in refusal(_with(headers("llama"), **config))


@pytest.mark.parametrize(
    ("variant", "config", "named"),
    [
        ("llama", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ("llama", {"hidden_act": ["silu"]}, "hidden_act"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("llama", {"num_local_experts": 8}, "num_local_experts is set; mixture of experts"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("qwen2", {"layer_types": ["linear_attention"] * 2}, "linear_attention"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ],
)
def test_an_unsupported_feature_is_named(
    variant: str, config: dict[str, Any], named: str, headers: Callable[[str], Headers]
) -> None:
    checkpoint = headers(variant)
    if "partial_rotary_factor" in config:
        del checkpoint.config["rope_parameters"]
    assert named in refusal(_with(checkpoint, **config), UnsupportedModel)


@pytest.mark.parametrize(
    ("variant", "config", "named"),
    [
        ("mistral-window", {"sliding_window": 0}, "sliding_window is 0"),
        ("qwen2-window", {"layer_types": None, "max_window_layers": -1}, "max_window_layers is -1"),
        ("qwen2-window", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen2", {"num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers is 1000000000"),
        ("gemma3", {"num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers is 1000000000"),
        ("gemma3", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar is -1"),
        ("gemma3", {"rope_parameters": 3}, "rope_parameters is 3"),
        ("gemma3", {"text_config": 3}, "text_config is 3"),
    ],
)
def test_a_familys_own_field_is_named(
    variant: str, config: dict[str, Any], named: str, headers: Callable[[str], Headers]
) -> None:
    assert named in refusal(_with(headers(variant), **config))


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.1.mlp.down_proj.weight",
    ],
)
def test_a_missing_tensor_is_named(name: str, headers: Callable[[str], Headers]) -> None:
    checkpoint = headers("llama")
    del checkpoint.tensors[name]
    assert f"'{name}' is missing" in refusal(checkpoint)


@pytest.mark.parametrize(
    ("variant", "name", "shape"),
    [
        ("llama", "model.layers.0.self_attn.q_proj.weight", (64, 63)),
        ("llama", "model.layers.0.input_layernorm.weight", (64, 1)),
        ("llama", "model.embed_tokens.weight", (288,)),
        ("llama", "lm_head.weight", (287, 64)),
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight", (129, 64)),
        ("phi3", "model.layers.0.mlp.gate_up_proj.weight", (96, 64)),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight", (64,)),
    ],
)
def test_a_tensor_of_another_shape_is_named(
    variant: str, name: str, shape: tuple[int, ...], headers: Callable[[str], Headers]
) -> None:
    checkpoint = headers(variant)
    checkpoint.resize(name, *shape)
    assert name in refusal(checkpoint)


def test_an_unknown_architecture_names_the_nearest_and_all() -> None:
    with pytest.raises(UnsupportedModel) as error:
        family_of("Qwen2MoeForCausalLM")
    message = str(error.value)
    assert "the nearest that is: Qwen2ForCausalLM" in message
    for family in families().values():
        for architecture in family.architectures:
            assert architecture in message


def test_families_are_found_by_being_in_the_folder() -> None:
    assert set(families()) == {"llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3"}


def test_translation_is_what_the_graph_needs(headers: Callable[[str], Headers]) -> None:
    found = translate(headers("llama"), 64)
    assert isinstance(found, Translation)
    assert set(found.sources) == set(found.spec.weight_shapes())
    assert found.spec.num_parameters() == sum(_count(i.shape) for i in headers("llama").tensors.values())


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
