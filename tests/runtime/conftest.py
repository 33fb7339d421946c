from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trtforge.runtime.config import EngineConfig
from trtforge.runtime.engine import Engine
from trtforge.runtime.executors.null import NullBehaviour, write_null_engine
from trtforge.runtime.manifest import Limits


@pytest.fixture
def null_engine(tmp_path: Path) -> Callable[..., Path]:
    """(limits, **write_null_engine's and NullBehaviour's fields) -> an engine directory of the toy model."""

    def make(limits: Limits | None = None, **fields: Any) -> Path:
        behaviour = {k: fields.pop(k) for k in list(fields) if k in NullBehaviour.__dataclass_fields__}
        path = tmp_path / f"null-{len(list(tmp_path.iterdir()))}"
        write_null_engine(path, limits, behaviour=NullBehaviour(**behaviour), **fields)
        return path

    return make


@pytest.fixture
def start(null_engine: Callable[..., Path]) -> Iterator[Callable[..., Engine]]:
    """(limits, **fields as above and of EngineConfig) -> a running engine that checks its integrity after each step.
    When the test is done, nothing may be in flight and no block in use."""
    engines = []

    def run(limits: Limits | None = None, **fields: Any) -> Engine:
        config = {k: fields.pop(k) for k in list(fields) if k in EngineConfig.__dataclass_fields__}
        engine = Engine.open(null_engine(limits, **fields), EngineConfig(check_integrity=True, **config))
        engines.append(engine)
        return engine.start()

    yield run
    for engine in engines:
        engine.shutdown()
        if engine._death is None:
            assert engine.metrics().used_blocks == 0
        assert not engine._outputs
