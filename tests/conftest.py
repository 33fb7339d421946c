"""Fixtures that all tests share. Helpers that are not fixtures are plain modules in tests/: `import checkpoints`."""

import numpy as np
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    """A seeded generator: the same numbers in every run."""
    return np.random.default_rng(20260514)
