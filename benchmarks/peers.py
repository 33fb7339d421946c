"""trtforge beside llama.cpp, OpenVINO GenAI and Transformers: the same weights, lengths and threads, in turn.

    python benchmarks/peers.py [--rounds 5] [--threads 2] [--peers llama.cpp openvino] [--only 1x512 16x128]

The model is SmolLM2-135M-Instruct in Q4_1; trtforge runs it `as_is`, as its own commands do. Each peer is built or
installed by peer_install.py into an environment of its own under --cache, once. A round runs everything once, each
measurement in a process of its own, every other round backwards; a ratio is of one round's two figures. All are bound
to as many CPUs as there are threads. A measurement waits for other processes to be quiet, and is made again where these
took more than 5% of the CPUs meanwhile, for up to --patience seconds; the least disturbed one counts. Prints a table in
Markdown, then one JSON line.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
TRTFORGE = str(Path(sys.executable).with_name("trtforge"))
INSTALLER, WORKER = (Path(__file__).with_name(name) for name in ("peer_install.py", "peer_worker.py"))
US, FP32 = "trtforge", "trtforge, fp32 cache"
LLAMA, OPENVINO, TRANSFORMERS = "llama.cpp", "openvino", "transformers"
PEER_NOTES = {
    OPENVINO: "GenAI's continuous batching over the GGUF itself; it rounds the minimums of Q4_1 to 4-bit integers",
    TRANSFORMERS: "the same weights dequantized to FP32",
}

#: Tokens of context and then decoded, for one request; requests, prompt and output tokens of many; the long context.
DEPTH, DECODED = 512, 128
REQUESTS, PROMPT, OUTPUT = 16, 128, 64
LONG_CONTEXT = 8000
WHAT = ("1x512", "16x128", "8k", "load")

#: Share of the CPUs that others may take during a measurement.
DISTURBED = 0.05


@dataclass(frozen=True)
class Line:
    """A line of the table before it is measured: a figure of ours, and beside it those of peers.

    wanted: by peer, or by US for the figure itself: at least this, and the aim.
    """

    name: str
    figure: str
    unit: str
    peers: tuple[str, ...] = ()
    wanted: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    less_is_better: bool = False


ALL = (LLAMA, OPENVINO, TRANSFORMERS)
MANY = f"{REQUESTS} requests of {PROMPT} + {OUTPUT} tokens"
LINES = (
    Line(f"decode, 1 request at {DEPTH} tokens", "decode_1", "t/s", ALL, {LLAMA: (1.5, 1.8)}),
    Line("share of the read bandwidth in it", "share", "%", wanted={US: (60, 75)}),
    Line("read bandwidth just before", "bandwidth", "GB/s"),
    Line(f"prefill, {DEPTH} tokens", "prefill", "t/s", ALL, {LLAMA: (2.5, 3.5)}),
    Line(f"{MANY}: decode", "decode_16", "t/s", (LLAMA,), {LLAMA: (3, 4)}),
    Line(f"{MANY}: total time", "total_16", "s", ALL, {OPENVINO: (1.3, 1.8)}, less_is_better=True),
    Line(f"decode at {LONG_CONTEXT} tokens, int8 cache", "decode_8k", "t/s", (FP32,), {FP32: (1.4, 1.8)}),
    Line("engine opened to first token", "load", "s", wanted={US: (1.5, 0.5)}, less_is_better=True),
    Line("`trtforge generate` of 1 token, whole process", "process", "s", less_is_better=True),
)


class NotRun(Exception):
    """Why a peer has no figures."""


# -- what is measured


def install(peer: str, cache: Path) -> None:
    """Raises NotRun."""
    command = (sys.executable, str(INSTALLER), peer, str(cache))
    run = subprocess.run(command, stderr=subprocess.PIPE, stdout=sys.stderr, text=True)
    if run.returncode:
        raise NotRun(f"not installed: {last_line(run.stderr)}")


def build_engines(model: Path, engines: Path) -> None:
    for kv in ("fp16", "int8", "fp32"):
        options = ("--recipe", "as_is", "--kv-cache-dtype", kv)
        command = (TRTFORGE, "build", str(model), "-o", str(engines / kv), *options)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]


# -- what they print


def read_llama_bench(text: str) -> dict[str, float]:
    """Of `llama-bench -o json`: tokens per second of prompts, and of decoding."""
    return {"decode_1" if test["n_gen"] else "prefill": float(test["avg_ts"]) for test in json.loads(text)}


def read_batched_bench(text: str) -> dict[str, float]:
    """Of `llama-batched-bench --output-format jsonl`, with a single line of numbers."""
    (line,) = (json.loads(line) for line in text.splitlines() if line.startswith("{"))
    return {"decode_16": float(line["speed_tg"]), "total_16": float(line["t"])}


def read_worker(text: str) -> dict[str, float]:
    """Of peer_worker.py."""
    found: dict[str, float] = {}
    for shape, of in json.loads(text.strip().splitlines()[-1]).items():
        if shape.startswith("1x"):
            found |= {"decode_1": of["decode_tokens_per_s"], "prefill": of["prefill_tokens_per_s"]}
        else:
            found["total_16"] = of["total_s"]
    return found


def read_bench_1(text: str) -> dict[str, float]:
    """Of `trtforge bench --json`, with one request."""
    of = json.loads(text)
    return {
        "decode_1": of["decode_tokens_per_s"],
        "prefill": of["prefill_tokens_per_s"],
        "share": 100 * of["bandwidth_share"],
        "bandwidth": of["read_bytes_per_s"] / 1e9,
    }


def read_bench_16(text: str) -> dict[str, float]:
    of = json.loads(text)
    return {"decode_16": of["decode_tokens_per_s"], "total_16": of["total_s"]}


# -- the rounds


@dataclass(frozen=True)
class Job:
    """A measurement: a command, and what its output says. what: one of WHAT."""

    runner: str
    what: str
    command: tuple[str, ...]
    read: Callable[[str], dict[str, float]]
    is_timed: str = ""  # the figure that its seconds are


def our_jobs(engines: Path, threads: int) -> list[Job]:
    def bench(what: str, kv: str, n: int, p: int, o: int, read: Callable[[str], dict[str, float]]) -> Job:
        lengths = ("--concurrency", f"{n}", "--prompt-tokens", f"{p}", "--output-tokens", f"{o}")
        options = (str(engines / kv), *lengths, "--threads", str(threads), "--json")
        return Job(FP32 if kv == "fp32" else US, what, (TRTFORGE, "bench", *options), read)

    def decode_8k(text: str) -> dict[str, float]:
        return {"decode_8k": json.loads(text)["decode_tokens_per_s"]}

    def load(text: str) -> dict[str, float]:
        return {"load": json.loads(text)["load_to_first_token_s"]}

    options = (str(engines / "fp16"), "--prompt", "Hello", "--max-tokens", "1")
    return [
        bench("1x512", "fp16", 1, DEPTH, DECODED + 1, read_bench_1),  # the first of them is prefill's
        bench("16x128", "fp16", REQUESTS, PROMPT, OUTPUT, read_bench_16),
        bench("8k", "int8", 1, LONG_CONTEXT, DECODED + 1, decode_8k),
        bench("8k", "fp32", 1, LONG_CONTEXT, DECODED + 1, decode_8k),
        bench("load", "fp16", 1, 8, 2, load),
        Job(US, "load", (TRTFORGE, "generate", *options), lambda text: {}, is_timed="process"),
    ]


def peer_jobs(peer: str, place: Path, model: Path, threads: int) -> list[Job]:
    if peer != LLAMA:
        python = (str(place / "bin" / "python"), "-I", str(WORKER), peer, str(model), str(threads))
        shapes = {"1x512": f"1x{DEPTH}+{DECODED + 1}", "16x128": f"{REQUESTS}x{PROMPT}+{OUTPUT}"}
        return [Job(peer, what, (*python, shape), read_worker) for what, shape in shapes.items()]
    binaries, common = place / "build" / "bin", ("-m", str(model), "-t", str(threads))
    one = (str(binaries / "llama-bench"), *common, "-r", "1", "-o", "json")
    many = (str(binaries / "llama-batched-bench"), *common, "--output-format", "jsonl", "-c", "4096")
    lengths = ("-npp", str(PROMPT), "-ntg", str(OUTPUT), "-npl", str(REQUESTS))
    return [
        Job(peer, "1x512", (*one, "-p", "0", "-n", str(DECODED), "-d", str(DEPTH)), read_llama_bench),
        Job(peer, "1x512", (*one, "-p", str(DEPTH), "-n", "0"), read_llama_bench),
        Job(peer, "16x128", (*many, *lengths), read_batched_bench),
    ]


def run_job(job: Job) -> dict[str, float]:
    """Raises NotRun with what the command said last."""
    start = time.perf_counter()
    run = subprocess.run(job.command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    if run.returncode:
        raise NotRun(f"{Path(job.command[0]).name} exited with {run.returncode}: {last_line(run.stderr)}")
    try:
        return {job.is_timed: seconds} if job.is_timed else job.read(run.stdout)
    except (ValueError, KeyError, IndexError) as e:
        raise NotRun(f"{Path(job.command[0]).name} printed something else than figures: {e!r}") from e


def busy_seconds(stat: str, cpus: set[int]) -> float:
    """Of /proc/stat: CPU seconds that these CPUs have not been idle, those that a hypervisor took included."""
    lines = (line.split() for line in stat.splitlines())
    counts = [list(map(int, line[1:9])) for line in lines if line and line[0] in {f"cpu{n}" for n in cpus}]
    return sum(sum(of) - of[3] - of[4] for of in counts) / os.sysconf("SC_CLK_TCK")  # idle, iowait


def others_seconds(cpus: set[int]) -> float:
    """CPU seconds of all but this process and those it has waited for."""
    own = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return busy_seconds(Path("/proc/stat").read_text(), cpus) - sum(u.ru_utime + u.ru_stime for u in own)


def share_of_others(cpus: set[int], during: Callable[[], None]) -> float:
    before, start = others_seconds(cpus), time.perf_counter()
    during()
    return max(0.0, (others_seconds(cpus) - before) / (time.perf_counter() - start) / len(cpus))


def measure(job: Job, cpus: set[int], patience: float) -> tuple[dict[str, float], float]:
    """The figures, and the share of the CPUs that others took meanwhile: of the least disturbed attempt."""
    tries: list[tuple[dict[str, float], float]] = []
    end = time.monotonic() + patience
    while not tries or (min(share for _, share in tries) > DISTURBED and time.monotonic() < end):
        while share_of_others(cpus, lambda: time.sleep(0.5)) > DISTURBED and time.monotonic() < end:
            pass
        found: dict[str, float] = {}
        share = share_of_others(cpus, lambda found=found: found.update(run_job(job)))  # type: ignore[misc]
        tries.append((found, share))
    return min(tries, key=lambda of: of[1])


@dataclass
class Measured:
    """By runner and figure, of each round; why peers did not run; each measurement's share of others."""

    figures: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    others: list[float] = field(default_factory=list)


def run_rounds(jobs: Sequence[Job], rounds: int, cpus: set[int], patience: float, measured: Measured) -> None:
    """A peer that fails is left out from then on; a failure of our own ends it all."""
    for number in range(rounds):
        for job in jobs if number % 2 == 0 else reversed(jobs):
            if job.runner in measured.not_run:
                continue
            try:
                figures, share = measure(job, cpus, patience)
            except NotRun as e:
                if job.runner in (US, FP32):
                    raise SystemExit(f"{job.runner}: {e}") from e
                measured.not_run[job.runner] = str(e)
                measured.figures.pop(job.runner, None)
                continue
            measured.others.append(share)
            for name, value in figures.items():
                measured.figures.setdefault(job.runner, {}).setdefault(name, []).append(value)
            shown = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
            print(f"round {number + 1}, {job.runner}: {shown} (others {share:.0%})", file=sys.stderr)


# -- the table


def short(value: float) -> str:
    """Three digits, or all that stand before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


@dataclass(frozen=True)
class Spread:
    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{short(self.median)} ({short(self.lowest)} to {short(self.highest)})"


def ratio(ours: Sequence[float], theirs: Sequence[float], less_is_better: bool) -> Spread:
    """How many times as good we are, round by round."""
    pairs = zip(ours, theirs, strict=True)
    return Spread.of([t / o if less_is_better else o / t for o, t in pairs])


@dataclass(frozen=True)
class Row:
    name: str
    unit: str
    ours: Spread
    peer: str = ""
    theirs: Spread | None = None
    ratio: Spread | None = None
    at_least: float | None = None
    aim: float | None = None


def rows(measured: Measured) -> list[Row]:
    """Those of LINES of which both sides were measured; a line without peers has one row."""
    found = []
    for line in LINES:
        ours = measured.figures.get(US, {}).get(line.figure)
        if ours is None:
            continue
        there = [p for p in line.peers if line.figure in measured.figures.get(p, {})]
        for peer in there or ([""] if not line.peers else []):
            theirs = measured.figures[peer][line.figure] if peer else None
            of = ratio(ours, theirs, line.less_is_better) if theirs else None
            wanted = line.wanted.get(peer or US, (None, None))
            spread = Spread.of(theirs) if theirs else None
            found.append(Row(line.name, line.unit, Spread.of(ours), peer, spread, of, *wanted))
    return found


def markdown(found: Sequence[Row], not_run: Mapping[str, str]) -> str:
    """The table for a README, and below it what must be known about peers."""
    cells = [["", US, "peer", "", "ratio", "at least", "aim"]]
    for row in found:
        unit = row.unit if row.ratio is None else "x"
        wanted = ["" if w is None else f"{w:g} {unit}" for w in (row.at_least, row.aim)]
        theirs = "" if row.theirs is None else f"{short(row.theirs.median)} {row.unit}"
        ours = f"{row.ours if row.ratio is None else short(row.ours.median)} {row.unit}"
        cells.append([row.name, ours, row.peer, theirs, str(row.ratio or ""), *wanted])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in cells)
    lines = [f"| {' | '.join(line)} |" for line in padded]
    shown = {row.peer for row in found}
    notes = [f"- {peer}: {note}" for peer, note in PEER_NOTES.items() if peer in shown]
    notes += [f"- {peer}: {reason}" for peer, reason in not_run.items()]
    return "\n".join([*lines, "", *notes])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peers", nargs="*", choices=ALL, default=ALL)
    parser.add_argument("--only", nargs="+", choices=WHAT, default=WHAT, help="some of the measurements")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for quiet, of each")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "peers")
    options = parser.parse_args()

    from trtforge.model_repo.demo import fetch_demo_model

    model = fetch_demo_model(ROOT / ".cache").resolve()
    cache, measured = options.cache.resolve(), Measured()
    jobs = our_jobs(cache / "engines", options.threads)
    for peer in options.peers:
        try:
            install(peer, cache)
            jobs += peer_jobs(peer, cache / peer, model, options.threads)
        except NotRun as e:
            measured.not_run[peer] = str(e)
    build_engines(model, cache / "engines")
    cpus = set(sorted(os.sched_getaffinity(0))[: options.threads])
    os.sched_setaffinity(0, cpus)
    # What is compared runs side by side.
    jobs = sorted((job for job in jobs if job.what in options.only), key=lambda job: WHAT.index(job.what))
    run_rounds(jobs, options.rounds, cpus, options.patience, measured)
    found = rows(measured)
    print(markdown(found, measured.not_run))
    others = f"{median(measured.others):.0%}, at most {max(measured.others):.0%}"
    print(f"\n{options.rounds} rounds, {options.threads} threads; others took {others} of the CPUs")
    versions = {
        peer: (cache / peer / "installed.txt").read_text().split() for peer in measured.figures if peer in ALL
    }
    settings = {"rounds": options.rounds, "threads": options.threads, "versions": versions}
    print(json.dumps({**settings, "rows": [asdict(row) for row in found], **asdict(measured)}))


if __name__ == "__main__":
    main()
