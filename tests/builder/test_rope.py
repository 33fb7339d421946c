"""RoPE rules against transformers' own functions, for both spellings of a config."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from trtforge.builder.rope import rope, rope_parameters
from trtforge.plugins.errors import CheckpointError, UnsupportedModel
from trtforge.runtime.manifest import Rope

_FACTORS = {
    "short_factor": [1 + 0.03 * i for i in range(32)],
    "long_factor": [1 + 1.7 * i for i in range(32)],
}

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 1024,
        "mscale": 0.9,
        "mscale_all_dim": 0.7,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn-not-truncated": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "truncate": False,
        "attention_factor": 1.25,
    },
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 1024, **_FACTORS},
    "longrope-factor": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 1024,
        "factor": 16.0,
        **_FACTORS,
    },
}


def theirs(config: Any, seq_len: int) -> tuple[np.ndarray, float]:
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        inv_freq, attention_factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=seq_len)
    return inv_freq.numpy(), float(attention_factor)


def ours(config: dict[str, Any], max_seq_len: int, head_size: int = 64) -> Rope:
    positions = config["max_position_embeddings"]
    return rope(
        rope_parameters(config),
        head_size=head_size,
        max_position_embeddings=positions,
        max_seq_len=max_seq_len,
    )


@pytest.mark.parametrize("theta", [10000.0, 500000.0, 54321.7])
@pytest.mark.parametrize("max_seq_len", [1000, 4096, 20000])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(name: str, max_seq_len: int, theta: float) -> None:
    scaling = SCALINGS[name]
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 4096}
    config = LlamaConfig(**sizes, rope_parameters={"rope_type": "default", **scaling, "rope_theta": theta})
    inv_freq, attention_factor = theirs(config, max_seq_len)
    new = json.loads(config.to_json_string())
    old = {**sizes, "rope_theta": theta, "rope_scaling": scaling or None}
    for spelling in (new, old):
        found = ours(spelling, max_seq_len)
        np.testing.assert_allclose(np.array(found.inv_freq), inv_freq, rtol=2.0**-21, atol=0)
        assert found.attention_factor == pytest.approx(attention_factor, abs=1e-12)


def test_every_value_is_a_float32_and_nearly_all_are_torch_s_to_the_bit() -> None:
    config = LlamaConfig(hidden_size=256, num_attention_heads=2)
    inv_freq, _ = theirs(config, 0)
    found = np.array(ours(config.to_dict(), 2048, head_size=128).inv_freq)
    assert (found == found.astype(np.float32)).all()
    assert (found == inv_freq).mean() > 0.95


def test_length_dependent_rules_are_fixed_by_the_engines_length() -> None:
    sizes = {"max_position_embeddings": 4096, "rope_theta": 10000.0}
    for name, lengths in (("dynamic", (100, 4096)), ("longrope", (100, 1024))):
        config = {**sizes, "rope_scaling": SCALINGS[name]}
        short, at_most, beyond = (ours(config, n) for n in (*lengths, 8192))
        assert short == at_most != beyond


@pytest.mark.parametrize("kind", ["su", "longrope"])
def test_the_configs_own_original_context_goes_before_the_rules(kind: str) -> None:
    scaling = {**_FACTORS, "type": kind, "original_max_position_embeddings": 4096}
    old = {"max_position_embeddings": 8192, "original_max_position_embeddings": 1024, "rope_scaling": scaling}
    config = Phi3Config(hidden_size=256, num_attention_heads=4, **{**old, "rope_scaling": dict(scaling)})
    inv_freq, attention_factor = theirs(config, 2048)
    found = ours(old, 2048)
    np.testing.assert_allclose(np.array(found.inv_freq), inv_freq, rtol=2.0**-21, atol=0)
    assert found.attention_factor == pytest.approx(attention_factor)


def test_part_of_a_head_may_be_rotated() -> None:
    config = {"max_position_embeddings": 64, "partial_rotary_factor": 0.75}
    assert ours(config, 64, head_size=128).rotary_dim == 96


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is None"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -2}}, "factor is -2"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "8"}}, "factor is '8'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor is nan"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": True}, "rope_theta is True"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 3}},
            "short_factor has 3 numbers",
        ),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": 1.0}}, "short_factor is 1.0"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}, "rope_theta": 1.0}, "cannot be computed"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 1e308}, "max_position_embeddings": 64},
            "rope_type 'dynamic'",
        ),
        (
            {"rope_scaling": {**SCALINGS["llama3"], "low_freq_factor": 4.0, "high_freq_factor": 1.0}},
            "low_freq_factor 4.0",
        ),
        ({"partial_rotary_factor": 0.01}, "partial_rotary_factor 0.01"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5"),
    ],
)
def test_a_bad_field_is_named_with_its_value(config: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError) as error:
        ours({"max_position_embeddings": 128, **config}, 128)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_rule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        UnsupportedModel, match=r"'mrope' .* default, dynamic, linear, llama3, longrope, yarn"
    ):
        ours({"max_position_embeddings": 64, "rope_scaling": {"type": "mrope"}}, 64)
