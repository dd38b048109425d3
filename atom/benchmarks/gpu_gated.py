"""A gated MLP's first product with its activation on a GPU: the ``gated`` part of ``atom.benchmarks.gpu_kernels``.

The kernel in variants beside cuBLAS with a pass for the activation, each alone and "hot": behind itself for long
enough that the device's power limit sets the clocks, as a prefill does. The limit is the H200's matrix throughput; the
product's operations alone are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from atom.benchmarks.gpu_measure import device_us, record_graph, relative_error
from atom.benchmarks.gpu_roofline import H200
from atom.kernels.reference import activation
from atom.kernels.triton import elementwise
from atom.kernels.triton.compile_ahead import KernelCompilation, missing_kernels, recording
from atom.kernels.triton.gated_linear import ACTIVATIONS, SHAPE, TALL, GatedShape, gated_shape, launch

if TYPE_CHECKING:
    from atom.benchmarks.gpu_kernels import Bench

LAYERS = {"0.6B": (1024, 3072), "1B": (2048, 8192), "8B": (4096, 14336)}  # hidden size, intermediate size
TOKENS = (512, 1024, 2048, 8192, 16384)
VARIANTS = [SHAPE, TALL, SHAPE._replace(band=8), TALL._replace(band=16)]
CHECKED = [(300, 1024, 3072), (777, 2056, 1000), (129, 4096, 136)]  # tokens, hidden size, intermediate size
PRODUCT, TWO = "product alone", "product, pass"  # cuBLAS; the latter is what the kernel stands in for
HOT_S, COUNTED_S = 0.3, 0.1  # how long a call repeats, and how much of the end counts


def check(shape: GatedShape) -> float:
    """The largest error against fp32 of layers with odd sizes; infinite where rows around them are written to."""
    worst = 0.0
    for num_tokens, hidden, size in CHECKED:
        for name in ACTIVATIONS:
            x = torch.randn(num_tokens, hidden, device="cuda").bfloat16()
            weight = (2 * torch.randn(2 * size, hidden, device="cuda") / hidden**0.5).bfloat16()
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
    x, weight, output = (torch.zeros(128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    with recording() as recorder:
        for shape in VARIANTS:
            for name in ACTIVATIONS:
                launch(shape, x, weight, output, name)
    with KernelCompilation(missing_kernels(list(recorder.launches.values()))) as compilation:
        compilation.wait()


def hot_us(run: Callable[[], Any], guess_us: float) -> float:
    """Microseconds of a call among calls back to back, at the end of ``HOT_S`` seconds of them."""
    graph = record_graph(run)
    for _ in range(round((HOT_S - COUNTED_S) * 1e6 / guess_us)):
        graph.replay()
    return device_us(graph.replay, max(3, round(COUNTED_S * 1e6 / guess_us)))


def bench_gated(bench: Bench) -> None:
    compile_variants()
    for model, (hidden, size) in LAYERS.items():
        weight = (torch.randn(2 * size, hidden, device="cuda") / hidden**0.5).bfloat16()
        for num_tokens in TOKENS:
            if bench.is_over:
                return
            time_layer(bench, f"gated {model} {num_tokens}", num_tokens, weight)


def time_layer(bench: Bench, title: str, num_tokens: int, weight: torch.Tensor) -> None:
    """Two lines of the table: alone and hot, for every variant that is right."""
    size, hidden = len(weight) // 2, weight.shape[1]
    x = torch.randn(num_tokens, hidden, device="cuda").bfloat16()
    output = torch.empty(num_tokens, size, device="cuda", dtype=torch.bfloat16)
    wanted = elementwise.silu_and_mul(F.linear(x, weight))
    runs: dict[str, tuple[Callable[[], float] | None, Callable[[], Any]]] = {
        PRODUCT: (None, lambda: F.linear(x, weight)),
        TWO: (None, lambda: elementwise.silu_and_mul(F.linear(x, weight))),
    }

    def error_of(shape: GatedShape) -> float:
        output.fill_(float("nan"))
        launch(shape, x, weight, output, "silu")
        return max(relative_error(output, wanted), check(shape))

    for shape in VARIANTS:
        runs["x".join(map(str, shape))] = (
            lambda shape=shape: error_of(shape),
            lambda shape=shape: launch(shape, x, weight, output, "silu"),
        )
    alone, hot = {}, {}
    for name, (check_run, run) in runs.items():
        microseconds = bench.try_variant(f"{title} {name}", check_run, [run])
        if microseconds is not None:
            alone[name] = microseconds
            hot[name] = hot_us(run, microseconds)
    print(f"{title}, hot: " + ", ".join(f"{name} {value:.0f}" for name, value in hot.items()), flush=True)
    floor_us = 4 * num_tokens * hidden * size / H200.matmul_tflop_s / 1e6
    taken = gated_shape(num_tokens, size)
    ours = TWO if taken is None else "x".join(map(str, taken))
    for times, suffix in ((alone, ""), (hot, " hot")):
        times.pop(PRODUCT, None)
        bench.add(title + suffix, times.get(ours), times, floor_us)
