"""The linear kernel alone: SmolLM2-135M's products against what the machine can read and multiply.

    python benchmarks/kernels.py [--isa avx2] [--threads 2] [--rounds 15] [--plot roofline.png]

Every shape runs with random weights (4-bit in groups of 32 with FP16 scales and minimums, the head 8-bit without
minimums), as many copies of each as the model has layers, so that weights come from memory as they do in a step; and
from a mapped file, as an engine's are. The machine's limits are measured beside it: reading, as the sum of as large a
mapped file, and multiply-adds, as a loop of nothing else on as many threads. Each copy's time is the least of all
rounds, since others may share the cores; the median of the rounds' totals is given beside. --plot draws all of it as a
roofline (needs the `bench` extra). One JSON line comes last.
"""

import argparse
import ctypes
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtforge.plugins import cpu
from trtforge.plugins.cpu.packing import PackedLayout, packed_layout

#: out x in of one layer's linears (QKV, O, gate and up, down), and the head; how many of each a step has.
SHAPES = (((960, 576), 30), ((576, 576), 30), ((3072, 576), 30), ((576, 1536), 30), ((49152, 576), 1))
ROWS = (1, 2, 4, 8, 16, 64, 512)


@dataclass(frozen=True)
class Linear:
    """Some copies of a linear, as one layer each."""

    layout: PackedLayout
    weights: NDArray[np.uint8]  # [copies, row blocks, block bytes]

    @property
    def macs(self) -> int:
        return len(self.weights) * self.layout.in_features * self.layout.out_features


class Library:
    """The extension's entry for benchmarks."""

    def __init__(self, isa: str, threads: int) -> None:
        import openvino

        assert openvino.__version__  # loaded first: the extension finds its libraries by soname
        self._library, self._threads = ctypes.CDLL(str(cpu.library_path())), threads
        self._library.trtforge_cpu_isa.restype = ctypes.c_char_p
        if not self._library.trtforge_cpu_force_isa(isa.encode()):
            raise SystemExit(f"this CPU lacks {isa}")
        self.isa = self._library.trtforge_cpu_isa().decode()

    def multiply(
        self, linear: Linear, x: NDArray[np.float32], out: NDArray[np.float32], bits: int
    ) -> list[float]:
        """All copies, one after the other; seconds of each."""
        n = linear.layout
        sizes = (len(x), n.in_features, n.out_features, n.group_size, n.bits, n.zero_point, n.scale_bits // 8)
        arguments = (ctypes.c_int64 * 9)(*sizes, n.has_minimums, bits == 8)
        multiply, pointer, seconds = self._library.trtforge_cpu_packed_linear, ctypes.c_void_p, []
        given, taken = pointer(x.ctypes.data), pointer(out.ctypes.data)
        for address in [pointer(weights.ctypes.data) for weights in linear.weights]:
            start = time.perf_counter()
            multiply(arguments, given, address, taken, self._threads)
            seconds.append(time.perf_counter() - start)
        return seconds

    def read(self, buffer: NDArray[np.uint8]) -> None:
        """Read all of a buffer."""
        self._library.trtforge_cpu_read(
            ctypes.c_void_p(buffer.ctypes.data), ctypes.c_int64(buffer.nbytes), self._threads
        )

    def peak(self, bits: int) -> float:
        """Multiply-adds a second: each thread's best of some tries, all of them; 0 if the set has no loop for it."""
        run = self._library.trtforge_cpu_peak
        run.argtypes, run.restype = (ctypes.c_int, ctypes.c_int64), ctypes.c_int64

        def best(_: int) -> float:
            rate = 0.0
            for _ in range(500):
                start = time.perf_counter()  # a foreign call holds no lock of the interpreter
                done = run(bits == 8, 1 << 15)
                rate = max(rate, done / (time.perf_counter() - start))
            return rate

        with ThreadPoolExecutor(self._threads) as pool:
            return sum(pool.map(best, range(self._threads)))


def mapped(shape: tuple[int, ...], folder: Path) -> NDArray[np.uint8]:
    """Bytes of a new mapped file."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return np.memmap(file, np.uint8, "w+", shape=shape)


def make_linears(rng: np.random.Generator, folder: Path) -> list[Linear]:
    linears = []
    for (rows, columns), copies in SHAPES:
        head = copies == 1
        layout = packed_layout((rows, columns), "INT8" if head else "UINT4", 32, "FLOAT16", not head)
        weights = mapped((copies, *layout.shape), folder)
        weights[:] = rng.integers(0, 256, weights.shape, np.uint8)
        groups = weights.reshape(
            copies, -1, columns // 32, layout.group_bytes
        )  # these shapes need no padding
        groups[..., 32 * 16 * layout.bits // 8 :] = 0x14  # scales and minimums of about 0.001
        linears.append(Linear(layout, weights))
    return linears


@dataclass(frozen=True)
class Measured:
    bandwidth: float  # bytes per second
    peak: float  # multiply-adds per second, or 0
    linears: list[Linear]
    seconds: dict[tuple[int, int], NDArray[np.float64]]  # by rows and index of the linear: [rounds, copies]


def measure(library: Library, rounds: int, bits: int, all_rows: list[int], folder: Path) -> Measured:
    """Each round runs everything once."""
    rng = np.random.default_rng(1)
    linears = make_linears(rng, folder)
    reading: list[float] = []
    seconds: dict[tuple[int, int], list[list[float]]] = {}
    buffer = mapped((96 << 20,), folder)
    buffer[:] = rng.integers(0, 256, buffer.shape, np.uint8)
    x = rng.standard_normal((max(all_rows), 1536), np.float32)
    out = np.empty(max(all_rows) * 49152, np.float32)
    for _ in range(rounds):
        start = time.perf_counter()
        library.read(buffer)
        reading.append(time.perf_counter() - start)
        for rows in all_rows:
            for i, linear in enumerate(linears):
                if rows > 64 and len(linear.weights) == 1:
                    continue  # the head runs for the rows that sample, never for a whole prompt
                inputs = np.ascontiguousarray(x[:rows, : linear.layout.in_features])
                seconds.setdefault((rows, i), []).append(library.multiply(linear, inputs, out, bits))
    arrays = {key: np.array(value) for key, value in seconds.items()}
    return Measured(buffer.nbytes / min(reading), library.peak(bits), linears, arrays)


def report(library: Library, found: Measured, all_rows: list[int]) -> dict[str, Any]:
    """The table, and the same in short."""
    peak = f", multiplies at most {found.peak / 1e9:.0f} GMAC/s" if found.peak else ""
    print(f"{library.isa}: reads {found.bandwidth / 1e9:.1f} GB/s{peak}")
    print(
        f"{'rows':>5} {'shape':>12} {'us':>8} {'median':>8} {'GB/s':>6} {'share':>6} {'GMAC/s':>7} {'of peak':>7}"
    )
    steps = {}
    for rows in all_rows:
        all_best, all_median, all_bytes, all_macs = 0.0, 0.0, 0, 0
        for i, linear in enumerate(found.linears):
            if (rows, i) not in found.seconds:
                continue
            seconds, macs, copies = found.seconds[rows, i], linear.macs * rows, len(linear.weights)
            best, median = seconds.min(0).sum(), float(np.median(seconds.sum(1)))
            all_best, all_median = all_best + best, all_median + median
            all_bytes, all_macs = all_bytes + linear.weights.nbytes, all_macs + macs
            shape = f"{linear.layout.out_features}x{linear.layout.in_features}"
            _line(
                rows,
                shape,
                best / copies,
                median / copies,
                linear.weights.nbytes / copies,
                macs / copies,
                found,
            )
        _line(rows, "step", all_best, all_median, all_bytes, all_macs, found)
        steps[rows] = {
            "ms": round(all_best * 1e3, 3),
            "median_ms": round(all_median * 1e3, 3),
            "share": round(all_bytes / all_best / found.bandwidth, 3),
            "gmac_per_s": round(all_macs / all_best / 1e9, 1),
        }
    limits = {"read_gb_per_s": round(found.bandwidth / 1e9, 2), "peak_gmac_per_s": round(found.peak / 1e9, 1)}
    return {"isa": library.isa, **limits, "steps": steps}


def _line(
    rows: int, what: str, best: float, median: float, size: float, macs: float, found: Measured
) -> None:
    rate = size / best
    print(
        f"{rows:>5} {what:>12} {best * 1e6:>8.1f} {median * 1e6:>8.1f} {rate / 1e9:>6.1f} "
        f"{rate / found.bandwidth:>6.0%} {macs / best / 1e9:>7.1f} "
        + (f"{macs / best / found.peak:>7.0%}" if found.peak else "")
    )


@dataclass(frozen=True)
class Point:
    """A kernel in the plot. series: what its points are joined by; intensity: multiply-adds per byte read."""

    series: str
    label: str
    intensity: float
    rate: float


def linear_points(found: Measured, all_rows: list[int]) -> list[Point]:
    points = []
    for i, linear in enumerate(found.linears):
        series = f"{linear.layout.out_features}x{linear.layout.in_features}, {linear.layout.bits}-bit"
        for rows in all_rows:
            if (rows, i) in found.seconds:
                macs = linear.macs * rows
                rate = macs / float(found.seconds[rows, i].min(0).sum())
                points.append(Point(series, str(rows), macs / linear.weights.nbytes, rate))
    return points


def plot(path: Path, title: str, bandwidth: float, peak: float, points: list[Point]) -> None:
    """The machine's limits as a roof, kernels as points under it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit('--plot needs matplotlib: pip install "trtforge[bench]"') from None
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot()
    x = np.geomspace(min(p.intensity for p in points) / 2, max(p.intensity for p in points) * 2, 200)
    roof = np.minimum(x * bandwidth, peak or np.inf)
    limits = f"{bandwidth / 1e9:.1f} GB/s" + (f", {peak / 1e9:.0f} GMAC/s" if peak else "")
    axes.loglog(x, roof / 1e9, color="black", label=f"measured limits: {limits}")
    for series in dict.fromkeys(p.series for p in points):
        own = [p for p in points if p.series == series]
        axes.loglog([p.intensity for p in own], [p.rate / 1e9 for p in own], "o-", label=series, markersize=4)
        for p in own:
            axes.annotate(
                p.label, (p.intensity, p.rate / 1e9), (3, -9), textcoords="offset points", fontsize=7
            )
    axes.set(xlabel="multiply-adds per byte of weights", ylabel="GMAC/s", title=title)
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--isa", default="", help="generic, avx2 or avx512; by default the best")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--activation-bits", type=int, choices=(8, 32), default=8)
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the roofline")
    options = parser.parse_args()
    library = Library(options.isa, options.threads)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(library, options.rounds, options.activation_bits, options.rows, Path(folder))
    result = report(library, found, options.rows)
    if options.plot:
        title = f"Packed linears, {options.threads} threads, {library.isa}, labels are rows"
        points = linear_points(found, options.rows)
        plot(options.plot, title, found.bandwidth, found.peak, points)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
