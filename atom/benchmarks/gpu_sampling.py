"""Sampling on a GPU, the kernels beside the reference: the ``sampling`` part of ``atom.benchmarks.gpu_kernels``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from atom.benchmarks.gpu_measure import device_us
from atom.benchmarks.gpu_roofline import H200
from atom.kernels.reference import sampling as reference
from atom.kernels.reference.sampling import Draw
from atom.kernels.triton import sampling

if TYPE_CHECKING:
    from atom.benchmarks.gpu_kernels import Bench

VOCAB, NUM_VALID = 151_936, 151_669  # Qwen3: rows of the head, ids of the tokenizer
BATCHES = (64, 256, 1)
NUM_COPIES = 4  # of the logits, rotated
MAX_DIFFERING = 0.02  # of the rows: where a bound is met within rounding, a neighbour is chosen
# Temperature, top-k, top-p, min-p.
WAYS = {
    "greedy": None,
    "temperature": (1.0, 0, 1.0, 0.0),
    "top-k 50, top-p 0.9": (1.0, 50, 0.9, 0.0),
    "top-p 0.9": (1.0, 0, 0.9, 0.0),
    "min-p 0.05": (1.0, 0, 1.0, 0.05),
}


def make_draw(n: int, temperature: float, top_k: int, top_p: float, min_p: float) -> Draw:
    """The same parameters for n rows, each with a seed and a position of its own."""
    columns = [torch.full((n,), value, device="cuda") for value in (temperature, top_k, top_p, min_p)]
    columns[1] = columns[1].int()
    seeds = torch.randint(0, 2**62, (n,), device="cuda")
    positions = torch.randint(0, 4096, (n,), device="cuda")
    return Draw(*columns, seeds, positions, is_filtered=top_k > 0 or top_p < 1 or min_p > 0)


def time_eagerly(call: Callable[[], Any], repeats: int = 5) -> float:
    """Median microseconds on the device of a call that cannot be recorded."""
    call()
    return statistics.median(device_us(call) for _ in range(repeats))


def time_host(call: Callable[[], Any], repeats: int = 200) -> float:
    """Median microseconds that a call holds the host, the device far from full."""
    samples = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        samples.append((time.perf_counter() - began) * 1e6)
    return statistics.median(samples)


def bench_sampling(bench: Bench) -> None:
    torch.manual_seed(time.time_ns() % 2**31)
    for n in BATCHES:
        logits = [
            (torch.randn(n, VOCAB, device="cuda") * 2.5).bfloat16()[:, :NUM_VALID] for _ in range(NUM_COPIES)
        ]
        for way, parameters in WAYS.items():
            if bench.is_over:
                return
            draw = None if parameters is None else make_draw(n, *parameters)
            time_way(bench, f"sample {n} {way}", logits, draw)


def time_way(bench: Bench, name: str, logits: list[torch.Tensor], draw: Draw | None) -> None:
    n = len(logits[0])

    def check() -> float:
        """The share of rows beyond those that rounding may move; greedy rows must all be equal."""
        (found, _), (wanted, _) = (ops.sample(logits[0], draw) for ops in (sampling, reference))
        share = float((found != wanted).float().mean())
        return share if draw is None else max(0.0, share - max(MAX_DIFFERING, 1 / n))

    calls = [lambda own=own: sampling.sample(own, draw) for own in logits]
    ours = bench.try_variant(name, check, calls)
    if ours is not None:
        print(f"{name}: the host is held for {time_host(calls[0]):.0f} us", flush=True)
    torch_us = time_eagerly(lambda: reference.sample(logits[0], draw))
    bench.add(name, ours, {"reference": torch_us}, 2 * n * NUM_VALID / H200.read_gb_s / 1e3)
