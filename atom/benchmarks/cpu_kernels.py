"""The native CPU products beside torch's, on the demo model's shapes.

    python -m atom.benchmarks.cpu_kernels [--shapes qkv,head] [--formats bf16,int8] [--rows 1,16,512] [--per-core]

Prints a line for each shape, format and number of rows: the best time, bytes of weights read or operations a second,
the share of what the same run measured as this machine's limit (reading memory for few rows, a large product for
many), and torch's best time for the same work. Few rows go through enough copies of a weight that none is in a
cache. ``--per-core`` uses one thread and counts its CPU time, which neighbours on a shared machine disturb less.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import torch
import torch.nn.functional as F

from atom.benchmarks.machine_limits import best_time, measure_limits
from atom.errors import ConfigError
from atom.kernels.cpu.linear import IntMmLinear, OneDnnLinear
from atom.kernels.cpu.native.library import native_library
from atom.kernels.cpu.native.weights import FORMATS, PackedWeight, linear, pack
from atom.kernels.reference.linear import quantize_rows_int8
from atom.platforms import get_platform

SHAPES = {  # of gemma-3-270m: (out, in)
    "qkv": (1536, 640),
    "o": (640, 1024),
    "gate_up": (4096, 640),
    "down": (640, 2048),
    "head": (262144, 640),
}
COLD_BYTES = 320 << 20  # of copies of a weight; a larger last-level cache makes few rows look too fast
FEW_ROWS = 4  # up to here a product is bound by reading the weight
MAX_COLD_ROWS = 64
_ROUNDS, _MIN_SECONDS = 5, 0.2


@dataclass(frozen=True)
class Limits:
    """Bytes a second read, operations a second of a large product in floating point and in int8."""

    read: float
    floating: float
    int8: float


@dataclass(frozen=True)
class Line:
    shape: str
    format: str
    rows: int
    seconds: float
    weight_bytes: int
    operations: int
    torch_seconds: dict[str, float]

    def text(self, limits: Limits) -> str:
        if self.rows <= FEW_ROWS:
            rate, limit, unit = self.weight_bytes / self.seconds, limits.read, "GB/s  "
        else:
            rate, unit = self.operations / self.seconds, "Gop/s "
            limit = limits.int8 if self.format.startswith("int") else limits.floating
        beside = ", ".join(
            f"{name} {t * 1e3:.3f} ms ({t / self.seconds:.2f}x)" for name, t in self.torch_seconds.items()
        )
        return (
            f"{self.shape:8}{self.format:8}{self.rows:5}{self.seconds * 1e3:10.3f} ms{rate / 1e9:8.1f} {unit}"
            f"{rate / limit:6.0%}   {beside}"
        )


def measure(
    shape: str, format: str, num_rows: int, clock: Callable[[], float], cold_bytes: int = COLD_BYTES
) -> Line:
    """One line of the table; ATOM's and torch's runs alternate."""
    n, k = SHAPES[shape]
    weight = (torch.randn(n, k) / k**0.5).bfloat16()
    packed = pack(weight, format)
    num_copies = 1 if num_rows > MAX_COLD_ROWS else 1 + cold_bytes // packed.num_bytes
    panels = cycle([packed, *(_copy(packed) for _ in range(num_copies - 1))])
    x, out = torch.randn(num_rows, k), torch.empty(num_rows, n)
    runs: dict[str, Callable[[], object]] = {"atom": lambda: linear(x, next(panels), out)}
    if format == "bf16":
        narrow, onednn = x.bfloat16(), OneDnnLinear()
        plain = cycle([weight, *(weight.clone() for _ in range(num_copies - 1))])
        blocked = cycle([onednn.pack(weight) for _ in range(num_copies)])
        runs["F.linear"] = lambda: F.linear(narrow, next(plain))
        runs["oneDNN packed"] = lambda: onednn(narrow, next(blocked), None)
    elif format == "fp32":
        wide = cycle([weight.float() for _ in range(num_copies)])
        runs["F.linear"] = lambda: F.linear(x, next(wide))
    elif format.startswith("int8"):
        values, scales = quantize_rows_int8(weight)
        quantised = cycle([values, *(values.clone() for _ in range(num_copies - 1))])
        runs["_int_mm W8A8"] = lambda: IntMmLinear().product(x, next(quantised), scales)
    times = {name: float("inf") for name in runs}
    for _ in range(_ROUNDS):
        for name, run in runs.items():
            times[name] = min(times[name], _best(run, clock, _MIN_SECONDS / _ROUNDS, min(num_copies, 100)))
    atom = times.pop("atom")
    return Line(shape, format, num_rows, atom, packed.num_bytes, 2 * num_rows * n * k, times)


def _copy(packed: PackedWeight) -> PackedWeight:
    return PackedWeight(
        packed.format, packed.epilogue, packed.n, packed.k, packed.data.clone(), packed.scales, packed.sums
    )


def _best(run: Callable[[], object], clock: Callable[[], float], seconds: float, min_runs: int) -> float:
    best, count, began = float("inf"), 0, time.perf_counter()
    while count < min_runs or time.perf_counter() - began < seconds:
        start = clock()
        run()
        best = min(best, clock() - start)
        count += 1
    return best


def measure_all_limits(num_threads: int) -> Limits:
    limits = measure_limits(num_threads)
    size = 2048
    values = torch.ones(size, size, dtype=torch.int8)
    int8 = 2 * size**3 / best_time(lambda: torch._int_mm(values, values))
    return Limits(limits.read_bandwidth, max(limits.matmul_bf16, limits.matmul_fp32), int8)


def chosen(text: str, known: dict, field: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise ConfigError(f"{field} must be of {', '.join(known)}, got {name!r}")
    return names


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rows", default="1,16,512")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--per-core", action="store_true")
    args = parser.parse_args(argv)
    try:
        shapes = chosen(args.shapes, SHAPES, "--shapes")
        formats = chosen(args.formats, FORMATS, "--formats")
        rows = [int(value) for value in args.rows.split(",")]
    except (ConfigError, ValueError) as error:
        parser.error(str(error))
    library = native_library()
    if library is None:
        print("no native kernels on this machine", file=sys.stderr)
        return 1
    num_threads = 1 if args.per_core else args.num_threads or get_platform("cpu").default_num_threads
    clock = time.thread_time if args.per_core else time.perf_counter
    torch.set_num_threads(num_threads)
    library.set_threads(num_threads)
    limits = measure_all_limits(num_threads)
    print(
        f"{num_threads} threads: read {limits.read / 1e9:.1f} GB/s, products {limits.floating / 1e9:.0f} GFLOP/s, "
        f"int8 {limits.int8 / 1e9:.0f} Gop/s"
    )
    for shape in shapes:
        for format in formats:
            for num_rows in rows:
                if shape == "head" and num_rows > MAX_COLD_ROWS:
                    continue  # logits are wanted of few rows
                print(measure(shape, format, num_rows, clock).text(limits), flush=True)
    after = measure_all_limits(num_threads)
    print(f"after: read {after.read / 1e9:.1f} GB/s, products {after.floating / 1e9:.0f} GFLOP/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
