"""What this CPU can do at most, measured: reading memory, and large products.

    python -m atom.benchmarks.machine_limits [--num-threads N]

A decode step reads every weight once and a prefill is products, so these two say how far from the hardware's
end a figure is. Prints one JSON line (``RESULT {...}``) with :class:`MachineLimits`.
"""

import argparse
import sys
import time
from collections.abc import Callable

import msgspec

from atom.benchmarks.child import print_result

READ_BYTES = 512 << 20  # larger than the caches: a machine with a larger last-level cache reads too fast here
MATMUL_SIZE = 2048
_ROW = 4096  # elements
_MIN_SECONDS = 0.25  # per figure; the best of at least five runs


class MachineLimits(msgspec.Struct):
    """Best of several runs. Bandwidth in bytes per second; products in floating-point operations per second."""

    read_bandwidth: float
    matmul_bf16: float
    matmul_fp32: float
    matmul_int8: float | None = None  # integer operations per second; None: not asked for


def measure_limits(
    num_threads: int,
    read_bytes: int = READ_BYTES,
    matmul_size: int = MATMUL_SIZE,
    has_int8: bool = False,
) -> MachineLimits:
    """Read ``read_bytes`` of fp32, and multiply square matrices, with ``num_threads`` threads.

    The read is a sum or a matrix-vector product, whichever is faster here: the one is bound by its adds on
    some machines, the other on others.
    """
    import torch

    torch.set_num_threads(num_threads)
    rows, vector = torch.ones(read_bytes // 4 // _ROW, _ROW), torch.ones(_ROW)
    read_s = min(best_time(rows.sum), best_time(lambda: rows @ vector))
    flops = {}
    for dtype in (torch.bfloat16, torch.float32):
        left = torch.ones(matmul_size, matmul_size, dtype=dtype)
        right = torch.ones(matmul_size, matmul_size, dtype=dtype)
        flops[dtype] = 2 * matmul_size**3 / best_time(lambda a=left, b=right: a @ b)
    limits = MachineLimits(read_bytes / read_s, flops[torch.bfloat16], flops[torch.float32])
    if has_int8:
        ones = torch.ones(matmul_size, matmul_size, dtype=torch.int8)
        limits.matmul_int8 = 2 * matmul_size**3 / best_time(lambda: torch._int_mm(ones, ones.t()))
    return limits


def best_time(run: Callable[[], object], min_seconds: float = _MIN_SECONDS, min_runs: int = 5) -> float:
    """Shortest seconds of ``run`` over ``min_runs`` runs, and more until ``min_seconds`` have passed."""
    run()
    times: list[float] = []
    while len(times) < min_runs or sum(times) < min_seconds:
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--int8", action="store_true", help="int8 products too")
    args = parser.parse_args(argv)
    from atom.platforms import get_platform

    num_threads = args.num_threads or get_platform("cpu").default_num_threads
    print_result(measure_limits(num_threads, has_int8=args.int8))
    return 0


if __name__ == "__main__":
    sys.exit(main())
