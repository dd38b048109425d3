"""A gated MLP's first product with its activation on a GPU: the ``gated`` part of ``atom.benchmarks.gpu_kernels``.

The kernel in variants beside cuBLAS with a pass for the activation, each alone and "hot": behind itself for long
enough that the device's power limit sets the clocks, as a prefill does. Shares are of the H200's matrix throughput;
the product's operations alone are counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from atom.benchmarks.gpu_measure import device_us, record_graph, relative_error
from atom.benchmarks.gpu_roofline import H200
from atom.kernels.reference import activation
from atom.kernels.triton import elementwise
from atom.kernels.triton.compile_ahead import KernelCompilation, missing_kernels, recording
from atom.kernels.triton.gated_linear import SHAPE, GatedShape, gated_shape, launch

if TYPE_CHECKING:
    from atom.benchmarks.gpu_kernels import Bench

LAYERS = {"0.6B": (1024, 3072), "1B": (2048, 8192), "8B": (4096, 14336)}  # hidden size, intermediate size
TOKENS = (2048, 8192, 16384)
VARIANTS = [
    SHAPE,
    SHAPE._replace(skew=0),
    SHAPE._replace(skew=2),
    SHAPE._replace(band=8),
    SHAPE._replace(band=32),
    GatedShape(3, 3, 11, 0),
    GatedShape(3, 3, 11, 1),
]
CHECKED = [(300, 1024, 3072), (777, 2056, 1000), (129, 4096, 136)]  # tokens, hidden size, intermediate size
MAX_ERROR = 1e-2  # ||found - wanted|| / ||wanted||
HOT_S, HOT_TAIL_S = 0.3, 0.1  # how long a product repeats, and how much of the end counts


def check(shape: GatedShape) -> float:
    """The largest error against fp32 of layers with odd sizes; what is not written is NaN."""
    worst = 0.0
    for num_tokens, hidden, size in CHECKED:
        for name in ("silu", "gelu_tanh"):
            x = torch.randn(num_tokens, hidden, device="cuda").bfloat16()
            weight = (torch.randn(2 * size, hidden, device="cuda") * 2 / hidden**0.5).bfloat16()
            # Rows around the output must stay as they are.
            whole = torch.full((num_tokens + 256, size), float("nan"), device="cuda").bfloat16()
            found = whole[128 : 128 + num_tokens]
            launch(shape, x, weight, found, name)
            twin = getattr(activation, f"{name}_and_mul")
            error = relative_error(found, twin(F.linear(x.float(), weight.float())))
            around = torch.cat((whole[:128], whole[128 + num_tokens :]))
            worst = max(worst, error if error == error and bool(around.isnan().all()) else float("inf"))
    return worst


def compile_variants() -> None:
    """Compile what is launched, side by side; nothing runs."""
    x, output = (torch.zeros(128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.zeros(128, 64, device="cuda", dtype=torch.bfloat16)
    with recording() as recorder:
        for shape in VARIANTS:
            for name in ("silu", "gelu_tanh"):
                launch(shape, x, weight, output, name)
    with KernelCompilation(missing_kernels(list(recorder.launches.values()))) as compilation:
        compilation.wait()


def hot_us(run: Callable[[], Any], guess_us: float) -> float:
    """Microseconds of a call among calls back to back, at the end of ``HOT_S`` seconds of them."""
    graph = record_graph(run)
    before, counted = (
        max(3, round(seconds * 1e6 / guess_us)) for seconds in (HOT_S - HOT_TAIL_S, HOT_TAIL_S)
    )
    for _ in range(before):
        graph.replay()
    return device_us(graph.replay, counted)


def cold_us(run: Callable[[], Any]) -> float:
    graph = record_graph(run)
    samples = []
    for _ in range(8):
        torch.cuda.synchronize()
        time.sleep(0.004)
        samples.append(device_us(graph.replay))
    return statistics.median(samples)


def bench_gated(bench: Bench) -> None:
    compile_variants()
    errors = {}
    for shape in VARIANTS:
        try:
            errors[shape] = check(shape)
            print(f"gated {tuple(shape)}: error {errors[shape]:.1e}", flush=True)
        except Exception as error:  # the other variants are still of use
            bench.problems.append(f"gated {tuple(shape)}: {type(error).__name__}: {str(error)[:200]}")
    able = [shape for shape, error in errors.items() if error < MAX_ERROR]
    for model, (hidden, size) in LAYERS.items():
        for num_tokens in TOKENS:
            if bench.is_over:
                return
            time_layer(bench, model, num_tokens, hidden, size, able)


def time_layer(
    bench: Bench, model: str, num_tokens: int, hidden: int, size: int, shapes: list[GatedShape]
) -> None:
    """Print one line: alone and hot, microseconds and shares of the peak, for every variant."""
    x = torch.randn(num_tokens, hidden, device="cuda").bfloat16()
    weight = (torch.randn(2 * size, hidden, device="cuda") / hidden**0.5).bfloat16()
    output = torch.empty(num_tokens, size, device="cuda", dtype=torch.bfloat16)
    floor_us = 4 * num_tokens * hidden * size / H200.matmul_tflop_s / 1e6
    runs: dict[str, Callable[[], Any]] = {
        "cuBLAS": lambda: F.linear(x, weight),
        "cuBLAS + pass": lambda: elementwise.silu_and_mul(F.linear(x, weight)),
    }
    for shape in shapes:
        runs["x".join(map(str, shape))] = lambda shape=shape: launch(shape, x, weight, output, "silu")
    wanted = runs["cuBLAS + pass"]()
    cells, cold, hot = [], {}, {}
    for name, run in runs.items():
        try:
            output.fill_(float("nan"))
            cold[name] = cold_us(run)
            if name[0].isdigit() and not (error := relative_error(output, wanted)) < MAX_ERROR:
                raise ValueError(f"error {error:.1e}")
            hot[name] = hot_us(run, cold[name])
        except Exception as error:
            bench.problems.append(
                f"gated {model} {num_tokens} {name}: {type(error).__name__}: {str(error)[:120]}"
            )
            continue
        cells.append(
            f"{name} {cold[name]:.0f} {floor_us / cold[name]:.0%} hot {hot[name]:.0f} {floor_us / hot[name]:.0%}"
        )
    title = f"gated {model} {num_tokens}"
    print(f"{title}: " + " | ".join(cells), flush=True)
    taken = gated_shape(num_tokens, hidden, size)
    ours = "cuBLAS + pass" if taken is None else "x".join(map(str, taken))
    del cold["cuBLAS"], hot["cuBLAS"]
    bench.add(title, cold.get(ours), cold, floor_us)
    bench.add(f"{title} hot", hot.get(ours), hot, floor_us)
