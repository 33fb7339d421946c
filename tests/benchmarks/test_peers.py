"""The parts of `benchmarks/peers.py` that measure nothing: what peers print, ratios, the table."""

import importlib.util
import json
import sys
from types import ModuleType
from typing import Any

import pytest
import tree


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    """The script as a module; benchmarks/ is no package."""
    spec = importlib.util.spec_from_file_location("peers", tree.ROOT / "benchmarks" / "peers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "peers", module)  # dataclasses look their module up
        spec.loader.exec_module(module)
    return module


def test_llama_bench_is_read(peers: ModuleType) -> None:
    tests = [
        {"n_prompt": 512, "n_gen": 0, "n_depth": 0, "avg_ts": 298.5, "samples_ts": [298.5]},
        {"n_prompt": 0, "n_gen": 128, "n_depth": 512, "avg_ts": 86.25, "samples_ts": [86.25]},
    ]
    assert peers.read_llama_bench(json.dumps(tests, indent=2)) == {"prefill": 298.5, "decode_1": 86.25}


def test_batched_bench_is_read(peers: ModuleType) -> None:
    line = {"pp": 128, "tg": 64, "pl": 16, "n_kv": 3072, "t_pp": 7.0, "speed_pp": 292.5}
    line |= {"t_tg": 4.5, "speed_tg": 227.5, "t": 11.5, "speed": 267.1}
    text = f"\n{json.dumps(line)}\nllama_perf_context_print: nothing\n"
    assert peers.read_batched_bench(text) == {"decode_16": 227.5, "total_16": 11.5}


def test_the_worker_is_read_whatever_its_library_said_before(peers: ModuleType) -> None:
    one = {"total_s": 1.5, "prefill_tokens_per_s": 1600.0, "decode_tokens_per_s": 80.0}
    found = peers.read_worker("a notice\n" + json.dumps({"1x512+129": one, "16x128+64": {"total_s": 2.75}}))
    assert found == {"decode_1": 80.0, "prefill": 1600.0, "total_16": 2.75}


def test_a_ratio_is_of_the_figures_of_a_round(peers: ModuleType) -> None:
    assert peers.ratio([10, 30, 20], [10, 10, 5], False) == peers.Spread(3.0, 1.0, 4.0)
    assert peers.ratio([1, 2, 4], [4, 4, 4], True) == peers.Spread(2.0, 1.0, 4.0), "of times, less is better"


def test_busy_is_what_is_neither_idle_nor_waiting_on_the_cpus_asked_for(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    stat = (
        "cpu  999 0 0 0 0 0 0 0 0 0\n"
        "cpu0 100 10 50 7000 900 5 15 20 3 0\n"
        "cpu1 100 0 0 7000 900 0 0 0 0 0\n"
        "cpu10 5000 0 0 0 0 0 0 0 0 0\n"
        "intr 1 2 3\n"
    )
    assert peers.busy_seconds(stat, {0, 1}) == pytest.approx(2.0 + 1.0)


def test_the_table_has_what_was_measured_and_why_the_rest_was_not(peers: ModuleType) -> None:
    figures = {
        "trtforge": {
            "decode_1": [90.0, 100.0],
            "share": [50.0, 54.0],
            "total_16": [2.0, 2.0],
            "bandwidth": [30.0, 1234.5],
        },
        "llama.cpp": {"decode_1": [45.0, 40.0]},
        "openvino": {"total_16": [4.0, 3.0]},
    }
    measured = peers.Measured(figures, not_run={"transformers": "not installed: no such package"})
    text = peers.markdown(peers.rows(measured), measured.not_run)
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line
    ]
    assert cells[2] == [
        "decode, 1 request at 512 tokens",
        "95 t/s",
        "llama.cpp",
        "42.5 t/s",
        "2.25 (2 to 2.5)",
        "1.5 x",
        "1.8 x",
    ]
    assert cells[3] == ["share of the read bandwidth in it", "52 (50 to 54) %", "", "", "", "60 %", "75 %"]
    assert cells[4][:2] == ["read bandwidth just before", "632 (30 to 1234) GB/s"]
    assert cells[5][2:] == ["openvino", "3.5 s", "1.75 (1.5 to 2)", "1.3 x", "1.8 x"]
    assert len(cells) == 6
    assert len({len(line) for line in text.splitlines() if "|" in line}) == 1, "the columns line up"
    assert "- transformers: not installed: no such package" in text
    assert "- openvino: " in text and "- llama.cpp" not in text


def test_a_peer_that_fails_is_left_out_and_the_rest_goes_on(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(runner: str, program: str) -> object:
        return peers.Job(runner, "1x512", (sys.executable, "-c", program), json.loads)

    def measure(job: Any, cpus: set[int], patience: float) -> tuple[dict[str, float], float]:
        """Once, and without waiting for quiet."""
        called.append(job.runner)
        return peers.run_job(job), 0.0

    called: list[str] = []
    monkeypatch.setattr(peers, "measure", measure)
    measured, good = peers.Measured(), "print('{\"decode_1\": 2.0}')"
    bad = "import sys; sys.exit('it broke')"
    jobs = [job("trtforge", good), job("llama.cpp", bad), job("openvino", "print('figures')")]
    peers.run_rounds(jobs, 2, {0}, 0.0, measured)
    assert called == ["trtforge", "llama.cpp", "openvino", "trtforge"]
    assert measured.figures == {"trtforge": {"decode_1": [2.0, 2.0]}}
    assert measured.not_run["llama.cpp"].endswith("exited with 1: it broke")
    assert "printed something else than figures" in measured.not_run["openvino"]
    with pytest.raises(SystemExit, match=r"trtforge: .*it broke"):
        peers.run_rounds([job("trtforge", bad)], 1, {0}, 0.0, peers.Measured())
