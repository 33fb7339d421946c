"""Fixtures that all tests share. Helpers that are not fixtures are plain modules in tests/: `import checkpoints`."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import tree


@pytest.fixture
def rng() -> np.random.Generator:
    """A seeded generator: the same numbers in every run."""
    return np.random.default_rng(20260514)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """variant of tests/checkpoints.py -> its directory; made once, for reading only."""

    @cache
    def make(variant: str = "llama") -> Path:
        return checkpoints.save(variant, tmp_path_factory.mktemp("checkpoint") / variant)

    return make


@pytest.fixture(scope="session")
def tiny_engine(
    tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """(variant, **BuildConfig fields) -> an engine directory of it; built once per arguments, for reading only.

    Fields of Limits may be given beside those of BuildConfig.
    """
    from trtforge.builder.build import build
    from trtforge.builder.spec import BuildConfig
    from trtforge.runtime.manifest import Limits

    @cache
    def make(variant: str = "llama", **config: Any) -> Path:
        limits = Limits(**{k: config.pop(k) for k in list(config) if k in Limits.__dataclass_fields__})
        output = tmp_path_factory.mktemp("engine") / variant
        build(tiny_checkpoint(variant), output, BuildConfig(limits=limits, **config))
        return output

    return make


@pytest.fixture(scope="session")
def real_gguf() -> Path:
    """SmolLM2-135M-Instruct (Q4_1, 98 MB), fetched once as `make demo` does; for tests marked slow."""
    from trtforge.model_repo.demo import fetch_demo_model

    return fetch_demo_model(tree.ROOT / ".cache")


@pytest.fixture(scope="session")
def real_engine(real_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model as it is built by default, with an fp16 KV cache; for tests marked slow."""
    from trtforge.builder.build import build
    from trtforge.builder.spec import BuildConfig

    output = tmp_path_factory.mktemp("engine") / "smollm2"
    build(real_gguf, output, BuildConfig())
    return output
