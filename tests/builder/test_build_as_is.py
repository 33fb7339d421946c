"""Recipe as_is: a GGUF's blocks reach the kernels as they are, for every family and every type of blocks."""

import logging
from collections.abc import Callable
from pathlib import Path

import checkpoints
import gguf_files
import numpy as np
import pytest
from stepping import Logits, Stepper

from trtforge.builder.build import build
from trtforge.builder.checkpoint.gguf_format import QUANTIZED
from trtforge.builder.spec import BuildConfig
from trtforge.plugins.errors import InvalidArgument
from trtforge.runtime.executors import open_executor
from trtforge.runtime.manifest import Limits

LIMITS = Limits(max_seq_len=64)
VARIANTS = (
    "llama-tied",
    "llama-bias",
    "llama-odd-vocab",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma3-untied",
)


def engine(source: Path, output: Path, **config: str) -> Path:
    build(
        source,
        output,
        BuildConfig(**{"recipe": "as_is", "limits": LIMITS, "kv_cache_dtype": "fp32"} | config),
    )
    return output


def logits(engine: Path, prompt: list[int]) -> Logits:
    executor = open_executor(engine, threads=2)
    try:
        return Stepper(executor, 16).logits(prompt)
    finally:
        executor.close()


def random_blocks(dtype: str, rng: np.random.Generator) -> Callable[[np.ndarray], np.ndarray]:
    """Matrix -> blocks of a type that the `gguf` package cannot make: random ones, of a weight's usual size."""
    import gguf

    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]]
    #: where the FP16 units lie, and what they must be for values of about 0.1
    units = {
        "Q2_K": {80: 6e-3, 82: 6e-3},
        "Q3_K": {108: 2e-3},
        "Q4_K": {0: 7e-4, 2: 5e-3},
        "Q5_K": {0: 3e-4, 2: 5e-3},
        "Q6_K": {208: 7e-5},
        "IQ4_NL": {0: 2e-3},
        "IQ4_XS": {0: 1e-4},
    }[dtype]

    def encode(weight: np.ndarray) -> np.ndarray:
        blocks = rng.integers(0, 256, (weight.size // values, size), np.uint8)
        for at, unit in units.items():
            scale = (unit * rng.uniform(0.5, 1.5, (len(blocks), 1))).astype(np.float16)
            blocks[:, at : at + 2] = scale.view(np.uint8)
        return blocks.reshape(len(weight), -1)

    return encode


@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_computes_with_the_values_of_its_blocks(
    variant: str, dtype: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """The same logits as the engine in full precision, whose weights are the blocks' values."""
    source = gguf_files.write(tmp_path / "m.gguf", tiny_checkpoint(variant), dtype)
    prompt = checkpoints.prompt_ids(24)
    exact = logits(engine(source, tmp_path / "as_is", activations="fp32"), prompt)
    wanted = logits(engine(source, tmp_path / "full", recipe="full_prec"), prompt)
    assert np.abs(wanted).max() > 1, "logits that say nothing"
    np.testing.assert_allclose(exact, wanted, rtol=0, atol=1e-3)
    rounded = logits(engine(source, tmp_path / "int8"), prompt)
    assert 1e-3 < np.abs(rounded - wanted).max() < 0.2 * np.abs(wanted).max()


@pytest.mark.parametrize(
    "dtype", ["Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
)
def test_every_type_of_blocks(
    dtype: str, tmp_path: Path, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    """K types need rows of 256. Those of groups of 16 are rounded once more, and the build says which."""
    directory = checkpoints.save("llama", tmp_path / "hf", hidden_size=256, intermediate_size=256)
    encode = None if dtype in ("Q5_0", "Q5_1") else random_blocks(dtype, rng)
    source = gguf_files.write(tmp_path / "m.gguf", directory, dtype, encode=encode)
    prompt = checkpoints.prompt_ids(24)
    with caplog.at_level(logging.WARNING):
        found = logits(engine(source, tmp_path / "as_is", activations="fp32"), prompt)
    wanted = logits(engine(source, tmp_path / "full", recipe="full_prec"), prompt)
    assert np.abs(wanted).max() > 0.5, "logits that say nothing"
    rounded = f"16 weights are stored as {dtype}: rounded once more, to 8 bits in groups of 32"
    if dtype in ("Q2_K", "Q3_K", "Q6_K"):
        assert rounded in caplog.text and "embedding.weight" in caplog.text
        assert 1e-4 < np.abs(found - wanted).max() < 0.1 * np.abs(wanted).max()
    else:
        assert "rounded once more" not in caplog.text
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-3)


def test_all_types_that_are_read_are_tested() -> None:
    tested = {
        "Q4_0",
        "Q4_1",
        "Q8_0",
        "Q5_0",
        "Q5_1",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "IQ4_NL",
        "IQ4_XS",
    }
    assert tested == set(QUANTIZED)


def test_auto_is_as_is_for_a_gguf_and_full_precision_for_others(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = tiny_checkpoint("llama")
    quantized = gguf_files.write(tmp_path / "q.gguf", directory, "Q8_0")
    floats = gguf_files.write(tmp_path / "f.gguf", directory, "F16")
    config = BuildConfig(recipe="auto", limits=LIMITS)
    made = [build(s, tmp_path / "e", config) for s in (quantized, floats, directory)]
    assert [(m.recipe, m.activations) for m in made] == [
        ("as_is", "int8"),
        ("as_is", "fp32"),
        ("full_prec", "fp32"),
    ]


def test_values_stay_as_they_are(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    source = gguf_files.write(tmp_path / "m.gguf", tiny_checkpoint("llama"), "F32")
    prompt = checkpoints.prompt_ids(24)
    as_is, full = (
        logits(engine(source, tmp_path / recipe, recipe=recipe), prompt) for recipe in ("as_is", "full_prec")
    )
    assert np.array_equal(as_is, full)


def test_int8_activations_need_quantized_weights(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match="need quantized weights, and the recipe full_prec has none"):
        engine(tiny_checkpoint("llama"), tmp_path / "e", recipe="full_prec", activations="int8")
    with pytest.raises(InvalidArgument, match="'int4' is unknown; choose from: auto, int8, fp32"):
        engine(tiny_checkpoint("llama"), tmp_path / "e", activations="int4")


def test_rows_do_not_depend_on_each_other(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Bit for bit the same alone, in chunks of any size, and beside another request."""
    source = gguf_files.write(tmp_path / "m.gguf", tiny_checkpoint("llama-tied"), "Q4_1")
    executor = open_executor(engine(source, tmp_path / "engine"), threads=2)
    steps = Stepper(executor, 48)
    prompt = checkpoints.prompt_ids(48)
    alone = steps.logits(prompt)
    for chunk in (1, 3, 4, 17):
        assert np.array_equal(steps.logits(prompt, chunk), alone), chunk
    sequence, other = steps.new(), steps.new()
    steps.step([(other, prompt[:5], 1), (sequence, prompt[:31], 1)])
    (*_, rows) = steps.step([(other, prompt[5:6], 1), (sequence, prompt[31:], 17)])
    assert np.array_equal(rows, alone[31:])
    executor.close()
