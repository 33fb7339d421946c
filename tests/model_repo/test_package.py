"""What `package` writes, and what `check` says when it is changed."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from trtforge.model_repo.check import check
from trtforge.model_repo.package import package
from trtforge.model_repo.serve import require_sound
from trtforge.plugins.errors import EngineFormatError, InvalidArgument, RepositoryError
from trtforge.runtime.executors.null import write_null_engine

MODELS = ["ensemble", "postprocessing", "preprocessing", "tensorrt_llm", "tensorrt_llm_bls"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("null") / "engine"
    write_null_engine(path)
    return path


@pytest.fixture
def repository(engine: Path, tmp_path: Path) -> Path:
    place = tmp_path / "repo"
    package(engine, place)
    return place


def names(repository: Path) -> list[str]:
    return sorted(d.name for d in repository.iterdir())


def test_a_fresh_repository_is_sound_and_says_no_place(repository: Path, engine: Path) -> None:
    assert names(repository) == MODELS
    assert check(repository, checksums=True) == []
    moved = repository.rename(repository.with_name("moved"))
    assert check(moved, checksums=True) == []
    for file in moved.rglob("*"):
        if file.is_file():
            assert str(engine.parent).encode() not in file.read_bytes(), file
            assert str(moved.parent).encode() not in file.read_bytes(), file
    assert [p.name for p in moved.parent.iterdir()] == ["moved"]


def test_each_engine_file_is_on_the_disk_once(repository: Path, engine: Path) -> None:
    inside = repository / "tensorrt_llm" / "1" / "engine"
    assert all((inside / f.name).stat().st_ino == f.stat().st_ino for f in engine.iterdir())


def test_several_engines_in_one_repository(repository: Path, engine: Path) -> None:
    assert package(engine, repository, prefix="big", decoupled=False)[0] == "big_tensorrt_llm"
    assert names(repository) == sorted([*MODELS, *(f"big_{m}" for m in MODELS)])
    assert check(repository) == []
    package(engine, repository, decoupled=False)  # replaces its own five only
    assert names(repository) == sorted([*MODELS, *(f"big_{m}" for m in MODELS)])
    assert "decoupled: false" in (repository / "ensemble" / "config.pbtxt").read_text() or (
        "decoupled: true" not in (repository / "ensemble" / "config.pbtxt").read_text()
    )
    assert check(repository) == []


def test_it_replaces_nothing_that_is_no_repository(engine: Path, tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "mum.txt").write_text("dear")
    with pytest.raises(RepositoryError, match=r"mum.txt has no config.pbtxt"):
        package(engine, tmp_path / "letters")
    assert (tmp_path / "letters" / "mum.txt").read_text() == "dear"
    with pytest.raises(RepositoryError, match="is a file"):
        package(engine, tmp_path / "letters" / "mum.txt")
    with pytest.raises(InvalidArgument, match="--name"):
        package(engine, tmp_path / "r", prefix="../x")
    with pytest.raises(EngineFormatError):
        package(tmp_path / "letters", tmp_path / "r")
    with pytest.raises(InvalidArgument, match="max_beam_width: '2' is not supported"):
        package(engine, tmp_path / "r", parameters={"max_beam_width": "2"})
    assert not (tmp_path / "r").exists()


def edit(repository: Path, model: str, old: str, new: str) -> None:
    file = repository / model / "config.pbtxt"
    text = file.read_text()
    assert re.search(old, text), old
    file.write_text(re.sub(old, new, text, count=1))


def add(repository: Path, model: str, text: str) -> None:
    file = repository / model / "config.pbtxt"
    file.write_text(file.read_text() + text + "\n")


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def damage(path: Path) -> None:
    """Through a copy: the original is linked."""
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-1])


MUTATIONS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "unfilled in a string": (
        lambda r: edit(r, "tensorrt_llm", '"engine"', '"${engine_dir}"'),
        "tensorrt_llm/config.pbtxt",
        "parameters.gpt_model_path",
    ),
    "unfilled number": (
        lambda r: edit(r, "ensemble", "max_batch_size: 32", "max_batch_size: ${triton_max_batch_size}"),
        "ensemble/config.pbtxt",
        "max_batch_size",
    ),
    "unfilled number of the engine model": (
        lambda r: edit(r, "tensorrt_llm", "count: 1", "count: ${count}"),
        "tensorrt_llm/config.pbtxt",
        "count",
    ),
    "hidden directory": (lambda r: (r / ".git").mkdir(), ".git/config.pbtxt", "config.pbtxt"),
    "wrong dtype": (
        lambda r: edit(
            r,
            "ensemble",
            'name: "max_tokens"\n  data_type: TYPE_INT32',
            'name: "max_tokens"\n  data_type: TYPE_INT64',
        ),
        "ensemble/config.pbtxt",
        "input.max_tokens.data_type",
    ),
    "wrong dims": (
        lambda r: edit(r, "tensorrt_llm", '("output_ids"\n.*\n)  dims: -1\n', r"\1"),
        "tensorrt_llm/config.pbtxt",
        "output.output_ids.dims",
    ),
    "no model.py": (lambda r: remove(r / "ensemble/1/model.py"), "ensemble/1/model.py", "model.py"),
    "no version": (lambda r: remove(r / "tensorrt_llm_bls/1"), "tensorrt_llm_bls", "version"),
    "no config": (lambda r: remove(r / "ensemble/config.pbtxt"), "ensemble/config.pbtxt", "config.pbtxt"),
    "count 2": (
        lambda r: edit(r, "tensorrt_llm", "count: 1", "count: 2"),
        "tensorrt_llm/config.pbtxt",
        "instance_group.count",
    ),
    "on the GPU": (
        lambda r: edit(r, "tensorrt_llm", "KIND_CPU", "KIND_GPU"),
        "tensorrt_llm/config.pbtxt",
        "instance_group.kind",
    ),
    "dead engine path": (
        lambda r: edit(r, "tensorrt_llm", '"engine"', '"/engines/llama"'),
        "tensorrt_llm/config.pbtxt",
        "parameters.gpt_model_path",
    ),
    "damaged engine": (
        lambda r: damage(r / "tensorrt_llm/1/engine/tokenizer.json"),
        "tensorrt_llm/config.pbtxt",
        "parameters.gpt_model_path",
    ),
    "unknown field": (
        lambda r: edit(r, "ensemble", "max_batch_size", "max_batchsize"),
        "ensemble/config.pbtxt",
        "max_batchsize",
    ),
    "unknown parameter": (
        lambda r: edit(r, "tensorrt_llm", "gpt_model_type", "gpt_model_typ"),
        "tensorrt_llm/config.pbtxt",
        "parameters.gpt_model_typ",
    ),
    "V1": (
        lambda r: edit(r, "tensorrt_llm", "inflight_fused_batching", "V1"),
        "tensorrt_llm/config.pbtxt",
        "parameters.gpt_model_type",
    ),
    "syntax": (lambda r: edit(r, "ensemble", "input {", "input {{"), "ensemble/config.pbtxt", "syntax"),
    "other name": (
        lambda r: edit(r, "ensemble", 'name: "ensemble"', 'name: "assemble"'),
        "ensemble/config.pbtxt",
        "name",
    ),
    "renamed folder": (
        lambda r: (r / "tensorrt_llm").rename(r / "my_tensorrt_llm"),
        "ensemble/config.pbtxt",
        "parameters.engine_model",
    ),
    "one is not decoupled": (
        lambda r: edit(r, "ensemble", "decoupled: true", "decoupled: false"),
        "ensemble/config.pbtxt",
        "model_transaction_policy.decoupled",
    ),
    "no batches": (
        lambda r: edit(r, "ensemble", "max_batch_size: 32", "max_batch_size: 0"),
        "ensemble/config.pbtxt",
        "max_batch_size",
    ),
    "another backend": (
        lambda r: edit(r, "tensorrt_llm", 'backend: "python"', 'backend: "tensorrtllm"'),
        "tensorrt_llm/config.pbtxt",
        "backend",
    ),
    "an input is gone": (
        lambda r: edit(r, "ensemble", r'input \{\n  name: "seed"(.*\n)*?\}\n', ""),
        "ensemble/config.pbtxt",
        "input",
    ),
    "a version that is not there": (
        lambda r: add(r, "tensorrt_llm", "version_policy { specific { versions: 3 } }"),
        "tensorrt_llm/config.pbtxt",
        "version_policy",
    ),
    "no version at all": (
        lambda r: add(r, "ensemble", "version_policy { specific { } }"),
        "ensemble/config.pbtxt",
        "version_policy",
    ),
    "sequences": (
        lambda r: add(r, "tensorrt_llm", "sequence_batching { }"),
        "tensorrt_llm/config.pbtxt",
        "sequence_batching",
    ),
    "cached answers": (
        lambda r: add(r, "ensemble", "response_cache { enable: true }"),
        "ensemble/config.pbtxt",
        "response_cache",
    ),
    "binary": (
        lambda r: (r / "ensemble/config.pbtxt").write_bytes(b"\xff\xfe"),
        "ensemble/config.pbtxt",
        "config.pbtxt",
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_check_names_file_and_key(repository: Path, mutation: str) -> None:
    mutate, file, key = MUTATIONS[mutation]
    mutate(repository)
    found = [(str(f.file.relative_to(repository)), f.key) for f in check(repository)]
    assert (file, key) in found
    assert len(found) <= 2 or mutation == "renamed folder", found


@pytest.mark.parametrize(
    "harmless",
    [
        "version_policy { specific { versions: [1, 3] } }",
        "version_policy { latest { num_versions: 1 } }",
        "version_policy { all { } }",
        "response_cache { enable: false }",
    ],
)
def test_check_lets_pass_what_changes_nothing(repository: Path, harmless: str) -> None:
    add(repository, "tensorrt_llm", harmless)
    assert check(repository) == []


def test_check_says_the_line(repository: Path) -> None:
    edit(repository, "tensorrt_llm", "count: 1", "count: 2")
    (fault,) = check(repository)
    line = (repository / "tensorrt_llm/config.pbtxt").read_text().splitlines()[(fault.line or 0) - 1]
    assert "count: 2" in line
    assert str(fault).startswith(
        f"{repository}/tensorrt_llm/config.pbtxt:{fault.line}: instance_group.count: 2"
    )


def test_a_config_of_the_old_repository_takes_few_lines(repository: Path) -> None:
    """It declares a part of the tensors, in another order; all that lack are one fault."""
    config = repository / "tensorrt_llm" / "config.pbtxt"
    text = re.sub(r"^(in|out)put \{\n.*?^\}\n", "", config.read_text(), flags=re.M | re.S)
    config.write_text(text + 'input { name: "input_ids" data_type: TYPE_INT32 dims: -1 }\n')
    inputs, outputs = (str(fault) for fault in check(repository))
    assert "input: lacks input_lengths, request_output_len, streaming, stop, " in inputs
    assert inputs.endswith(": clients that use them would be refused; package the engine again")
    assert "output: lacks output_ids, sequence_length, " in outputs


def test_serve_tells_the_first_faults_and_counts_the_rest(repository: Path) -> None:
    config = repository / "tensorrt_llm" / "config.pbtxt"
    more = "".join(f'parameters {{ key: "x{i}" value {{ string_value: "1" }} }}\n' for i in range(9))
    config.write_text(config.read_text() + more)
    with pytest.raises(
        RepositoryError, match=r"parameters\.x2: [^;]*; and 6 more: trtforge check "
    ) as refused:
        require_sound(repository)
    assert "x3" not in str(refused.value)


def test_only_checksums_see_a_changed_byte(repository: Path) -> None:
    file = repository / "tensorrt_llm/1/engine/tokenizer.json"
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data[:-1] + b" ")
    assert check(repository) == []
    (fault,) = check(repository, checksums=True)
    assert "sha256" in fault.message


def test_check_of_nothing(tmp_path: Path) -> None:
    assert "no such directory" in str(check(tmp_path / "x")[0])
    assert "no model in it" in str(check(tmp_path)[0])
