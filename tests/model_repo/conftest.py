"""One real Triton for all tests of the protocol, over toy engines."""

from collections.abc import Iterator

import pytest
from served import LIMITS, Companion, Served, write_engines

from trtforge.model_repo.serve import TritonServer
from trtforge.runtime.engine import Engine
from trtforge.runtime.executors.null import write_null_engine


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("served")
    repository = write_engines(root)
    write_null_engine(root / "reference", LIMITS)
    log = root / "triton.log"
    with (
        Engine.open(root / "reference") as engine,
        TritonServer(repository, ready_timeout=90, log_file=log) as server,
    ):
        yield Served(server, engine)


@pytest.fixture
def companion(served: Served) -> Iterator[Companion]:
    with Companion(served) as running:
        yield running
