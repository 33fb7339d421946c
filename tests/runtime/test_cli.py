"""The commands generate and bench, over the toy model."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from trtforge.builder.cli import main
from trtforge.plugins.errors import InvalidArgument
from trtforge.runtime.bench import Arrivals, measure_server, steady_rate
from trtforge.runtime.manifest import Limits
from trtforge.runtime.metrics import Metrics
from trtforge.runtime.request import FinishReason, RequestOutput

Make = Callable[..., Path]


def run(*args: object, input: str | None = None) -> Result:
    return CliRunner().invoke(main, [str(a) for a in args], input=input)


def lines(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture
def prompts(tmp_path: Path) -> Callable[..., Path]:
    def write(*objects: object) -> Path:
        path = tmp_path / "prompts.jsonl"
        path.write_text("\n".join(o if isinstance(o, str) else json.dumps(o) for o in objects) + "\n")
        return path

    return write


def test_a_prompt_streams_its_text(null_engine: Make) -> None:
    engine = null_engine()
    shown = run("generate", engine, "--prompt", "hello", "--max_tokens", 20)
    (line,) = lines(run("generate", engine, "--prompt", "hello", "--max-tokens", 20, "--json"))
    assert shown.stdout == line["text"] + "\n"
    assert line == {
        "id": 1,
        "text": line["text"],
        "token_ids": line["token_ids"],
        "finish_reason": "length",
        "num_prompt_tokens": 6,
        "num_cached_tokens": 0,
    }
    assert len(line["token_ids"]) == 20
    assert "KV pool: 4096 blocks of 16 tokens" in shown.stderr


def test_chat_uses_the_models_template(null_engine: Make) -> None:
    engine = null_engine()
    (chat,) = lines(run("generate", engine, "--chat", "--prompt", "hi", "--json"))
    (text,) = lines(run("generate", engine, "--prompt", "<s>user: hi\nassistant: ", "--json"))
    assert chat == text


def test_a_file_runs_as_one_batch_in_its_order(
    null_engine: Make, prompts: Callable[..., Path], tmp_path: Path
) -> None:
    asked = [
        {"id": "first", "prompt": "p" * 40, "max_tokens": 60},
        "",
        {"token_ids": [1, 2, 3], "max_tokens": 4, "logprobs": 1},
        {"id": 7, "messages": [{"role": "user", "content": "hi"}], "temperature": 0.9, "seed": 5, "top_k": 3},
        *({"id": f"r{i}", "prompt": "x" * i, "max_tokens": 30, "top_p": None} for i in range(20)),
    ]
    engine, stats = null_engine(Limits(16, 64, 256)), tmp_path / "stats.json"
    path = prompts(*asked)
    answers = lines(
        run(
            "generate",
            engine,
            "--prompts",
            path,
            "--json",
            "--stats",
            stats,
            "--kv_cache_tokens",
            320,
            "--max-tokens",
            9,
        )
    )
    assert [a["id"] for a in answers] == ["first", 3, 7, *(f"r{i}" for i in range(20))]
    assert [len(a["token_ids"]) for a in answers] == [60, 4, 9] + [30] * 20
    assert [len(p["top"]) for p in answers[1]["logprobs"]] == [1] * 4
    counters = json.loads(stats.read_text())
    assert counters["mean_batch"] > 4
    assert counters["preemptions"] > 0
    assert counters["peak_used_blocks"] == counters["max_blocks"] == 20
    assert counters["final_used_blocks"] == counters["swapped_blocks"] == counters["prefix_hit_tokens"] == 0
    assert 0 < counters["kv_waste"] < 0.5

    for answer, line in zip(answers, (a for a in asked if a), strict=True):
        (one,) = lines(
            run("generate", engine, "--prompts", "-", "--json", "--max-tokens", 9, input=json.dumps(line))
        )
        assert one["token_ids"] == answer["token_ids"]


def test_a_file_as_text(null_engine: Make, prompts: Callable[..., Path]) -> None:
    engine, path = null_engine(), prompts({"id": "a", "prompt": "hello", "max_tokens": 5, "stop": "zzz"})
    shown = run("generate", engine, "--prompts", path)
    (line,) = lines(run("generate", engine, "--prompts", path, "--json"))
    assert shown.stdout == f"== a\n{line['text']}\n"


def test_bad_words_are_text_and_do_not_come(null_engine: Make, prompts: Callable[..., Path]) -> None:
    engine = null_engine()
    free, kept = lines(
        run(
            "generate",
            engine,
            "--json",
            "--prompts",
            prompts(
                {"prompt": "a", "max_tokens": 80}, {"prompt": "a", "max_tokens": 80, "bad_words": ["g", ""]}
            ),
        )
    )
    assert "g" in free["text"]
    assert "g" not in kept["text"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{nope", "not JSON"),
        ("[1]", "must be a JSON object"),
        ({"prompt": "x", "max_token": 3}, "unknown key 'max_token'; did you mean 'max_tokens'?"),
        ({"prompt": "x", "max_tokens": "3"}, "max_tokens: must be an integer"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens: must be an integer"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens must be from 1"),
        ({"prompt": 5}, "prompt: must be a string"),
        ({"prompt": "x", "stop": [1]}, "stop: must be a string"),
        ({"token_ids": "x"}, "token_ids: must be a list of integers"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
        ({"prompt": "x", "ignore_eos": 1}, "ignore_eos: must be true or false"),
        ({}, "exactly one of prompt, token_ids and messages"),
        ({"prompt": "x" * 3000}, "the prompt has 3001 tokens"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ("[" * 100_000, "not JSON"),
        ({"prompt": "x", "id": "\ud83d"}, "id: not valid Unicode"),
        ({"prompt": "x", "deadline": math.nan}, "deadline must be at least 0, got nan"),
        ({"prompt": "x", "deadline": -1}, "deadline must be at least 0, got -1"),
        ({"prompt": "x", "logit_bias": {"5": 1e39}}, "logit_bias: must be from -1e+30 to 1e+30, got 1e+39"),
    ],
    ids=lambda v: v[:30] if isinstance(v, str) else "",
)
def test_a_bad_line_is_named_by_its_number(
    null_engine: Make, prompts: Callable[..., Path], line: object, words: str
) -> None:
    path = prompts({"prompt": "good"}, "", line)
    result = run("generate", null_engine(), "--prompts", path, "--json")
    assert result.exit_code == 1
    error = result.stderr.splitlines()[-1]
    assert error.startswith(f"error: {path}:3: ")
    assert words in error
    assert not result.stdout


def test_only_line_feeds_end_a_line(null_engine: Make, tmp_path: Path) -> None:
    """JSON strings may hold the other line ends of Unicode as they are; files of Windows have a mark and CRs."""
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('\ufeff{"prompt": "a\u2028b\x85c"}\r\n\r\n{"prompt": "d"}'.encode())
    first, second = lines(run("generate", null_engine(), "--prompts", path, "--json", "--max-tokens", 2))
    assert (first["num_prompt_tokens"], second["id"]) == (1 + 3 + 3 + 2, 3)


def test_standard_input_is_utf_8_whatever_the_locale(null_engine: Make) -> None:
    code = "from trtforge.builder.cli import main; main()"
    args = ["generate", str(null_engine()), "--prompts", "-", "--json", "--max-tokens", "1"]
    for given, returncode, words in (
        ('{"prompt": "ä→"}'.encode(), 0, b""),
        (b"\xff", 1, b"-: cannot be read"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *args],
            input=given,
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        )
        assert (done.returncode, words in done.stderr) == (returncode, True), done.stderr
        if returncode == 0:
            assert json.loads(done.stdout)["num_prompt_tokens"] == 1 + 2 + 3


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        ([], 2, "either --prompt or --prompts"),
        (["--prompt", "a", "--prompts", "b"], 2, "either --prompt or --prompts"),
        (["--prompts", "b", "--chat"], 2, "--chat"),
        (["--prompts", "no/such/file"], 1, "no/such/file: cannot be read"),
        (["--prompt", "a", "--kv-memory", "1"], 1, "less than a KV block"),
        (["--prompt", "a", "--kv-memory", "lots"], 1, "'lots' is not a number of bytes"),
        (["--prompt", "a", "--users", "3"], 1, "give both"),
        (["--prompt", "a", "--max-seq-len", "9999"], 1, "built for at most 2048"),
        (["--prompt", "a", "--stats", "/no/such/folder/x"], 1, "cannot be written"),
    ],
    ids=str,
)
def test_bad_options(null_engine: Make, args: list[str], code: int, words: str) -> None:
    result = run("generate", null_engine(), *args)
    assert result.exit_code == code
    assert words in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--top-p", "2"], "top_p must be from 1e-09 to 1, got 2"),
        (["--max-tokens", "0"], "max_tokens must be from 1"),
        (["--temperature", "nan"], "temperature must be"),
        (["--stop", ""], "stop: an empty string"),
        (["--stats", "/no/such/folder/x"], "/no/such/folder/x: cannot be written"),
        (["--stats", "."], ".: cannot be written"),
    ],
    ids=str,
)
def test_options_are_looked_at_before_the_engine(tmp_path: Path, args: list[str], words: str) -> None:
    """Which takes minutes to load, and its answers as long to compute."""
    result = run("generate", tmp_path / "no-engine", "--prompt", "a", *args)
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert words in result.stderr


def test_a_run_that_fails_leaves_the_stats_file_as_it_was(tmp_path: Path) -> None:
    stats = tmp_path / "stats.json"
    for before in (None, "old"):
        if before is not None:
            stats.write_text(before)
        result = run("generate", tmp_path / "no-engine", "--prompt", "a", "--stats", stats)
        assert (result.exit_code, "no-engine" in result.stderr) == (1, True)
        assert (stats.read_text() if stats.exists() else None) == before


def test_lines_may_allow_what_the_options_want_at_least(
    null_engine: Make, prompts: Callable[..., Path]
) -> None:
    path = prompts({"prompt": "a", "max_tokens": 150})
    (line,) = lines(run("generate", null_engine(), "--prompts", path, "--min-tokens", 140, "--json"))
    assert len(line["token_ids"]) >= 140


def test_an_engine_that_is_none(tmp_path: Path) -> None:
    result = run("generate", tmp_path, "--prompt", "a")
    assert (result.exit_code, "not an engine directory" in result.stderr) == (1, True)


def test_a_failure_of_the_engine_is_one_line(null_engine: Make) -> None:
    result = run("generate", null_engine(lost_at=3), "--prompt", "a")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("error: the engine has failed")


def test_bench_reports_rates_latencies_and_the_share_of_the_bandwidth(null_engine: Make) -> None:
    engine = null_engine()
    options = ["--concurrency", 4, "--prompt-tokens", 50, "--output-tokens", 20]
    (report,) = lines(run("bench", engine, *options, "--json"))
    assert report["decode_tokens_per_s"] > 0
    assert report["prefill_tokens_per_s"] > 0
    assert 0 < report["ttft_ms_p50"] <= report["ttft_ms_p99"]
    assert 0 < report["itl_ms_p50"] <= report["itl_ms_p99"]
    assert report["total_s"] > report["ttft_ms_p99"] / 1e3
    assert report["load_to_first_token_s"] > 0
    assert report["bytes_per_token"] == 60 * 16  # no weights; K and V of 50 + 10 tokens, 16 bytes each
    assert report["bandwidth_share"] == pytest.approx(
        report["bytes_per_token"] * report["decode_tokens_per_s"] / report["read_bytes_per_s"], rel=1e-4
    )
    assert 1 < report["mean_batch"] <= 4
    assert sum(report[f"{part}_share"] for part in ("plan", "run", "sample", "send")) == pytest.approx(
        1, abs=1e-4
    )
    assert report["loop_share"] == pytest.approx(1 - report["run_share"], abs=1e-4)
    assert 0 < report["step_ms"] < 1e3 * report["total_s"]
    table = run("bench", engine, *options).stdout
    assert "between tokens" in table
    assert "ms a step: plan" in table


def test_the_time_of_a_step_is_of_steps_in_which_all_requests_decode(null_engine: Make) -> None:
    """The prompts' steps are longer, and would make little of what a step costs beside the model."""
    engine = null_engine(Limits(max_batch_size=4, max_num_tokens=8), delay=0.002)
    options = ["--concurrency", 4, "--prompt-tokens", 40, "--output-tokens", 20, "--json"]
    (report,) = lines(run("bench", engine, *options))
    assert report["step_ms"] > 2
    first = Arrivals(2, Metrics)
    for id, tokens, finished in (
        ("a", (1,), 0),
        ("a", (), 0),
        ("b", (1,), 0),
        ("b", (2,), 0),
        ("a", (2,), 1),
    ):
        before = len(first.steady)
        first([RequestOutput(id, "", tokens, finish_reason=FinishReason.LENGTH if finished else None)])
        assert len(first.steady) - before == ((id, tokens) in (("b", (1,)), ("a", (2,))))
    never = Arrivals(2, Metrics)
    never([RequestOutput("a", "", (1,), finish_reason=FinishReason.LENGTH)])
    never([RequestOutput("b", "", (1,))])
    assert not never.steady


@pytest.mark.parametrize("tokens", [2, 3])
def test_so_few_tokens_that_requests_hardly_decode_together(null_engine: Make, tokens: int) -> None:
    engine = null_engine(Limits(max_batch_size=4, max_num_tokens=8))
    options = ["--concurrency", 4, "--prompt-tokens", 40, "--output-tokens", tokens, "--json"]
    (report,) = lines(run("bench", engine, *options))
    assert report["step_ms"] > 0


def test_bytes_are_of_the_tokens_that_came(null_engine: Make) -> None:
    engine = null_engine(Limits(max_seq_len=64))
    full, cut = (
        json.loads(run("bench", engine, "--prompt-tokens", 32, "--output-tokens", n, "--json").stdout)
        for n in (32, 100_000)
    )
    assert cut["output_tokens"] == 32
    assert cut["bytes_per_token"] == full["bytes_per_token"]


def test_a_server_is_measured_by_the_pieces_of_its_answers() -> None:
    sent = []

    def send(text: str, max_tokens: int) -> Iterator[str]:
        sent.append((len(text.split()), max_tokens))
        yield from ("x" for _ in range(max_tokens))

    speeds = measure_server(send, 3, 10, 7)
    assert sent == [(10, 4), (10, 7), (10, 7), (10, 7)]
    assert (speeds.concurrency, speeds.prompt_tokens, speeds.output_tokens) == (3, 10, 7)
    assert "bytes_per_token" not in speeds.to_dict()
    assert "between tokens" in speeds.table()


def test_a_server_that_does_not_stream_is_not_measured() -> None:
    with pytest.raises(InvalidArgument, match=r"in one piece.*--decoupled-mode true"):
        measure_server(lambda text, max_tokens: iter(["x" * max_tokens]), 3, 10, 7)


def test_bench_wants_an_engine_or_a_server(null_engine: Make) -> None:
    assert run("bench").exit_code == run("bench", null_engine(), "--url", "x").exit_code == 2
    refused = run("bench", "--url", "grpc://127.0.0.1:9")
    assert (refused.exit_code, "nothing answers at grpc://127.0.0.1:9" in refused.stderr) == (1, True)


def test_the_decode_rate_is_of_the_time_in_which_all_decode() -> None:
    first = [1.0, 2.0, 3.0, 4.0]  # still decoding when the second one begins, done first
    second = [2.5, 3.0, 3.5, 4.0, 4.5, 9.0]
    assert steady_rate([first, second]) == 5 / (4.0 - 2.5)
    assert steady_rate([[1.0, 2.0], [3.0, 4.0]]) == 0, "they never decode together"


def test_bench_refuses_what_cannot_run_at_once(null_engine: Make) -> None:
    result = run("bench", null_engine(Limits(2, 64, 256)), "--concurrency", 3)
    assert "above max_batch_size 2" in result.stderr
