"""Products of 65 to 512 tokens on a GPU: the ``batch`` part of ``atom.benchmarks.gpu_kernels``.

The kernel in variants, without what stands around it in a decode step, beside cuBLAS, for a gated product with a pass
for the activation. Weights rotate, as many as a model reads before it comes to the first again, so that none is in the
L2 cache. The limit is the longer one of reading the weight and of the operations. A model's last line is a layer, one
product after another: as decode steps launch them, and all by cuBLAS.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from atom.benchmarks.gpu_measure import relative_error
from atom.benchmarks.gpu_roofline import H200
from atom.kernels.reference.decode import fused_linear
from atom.kernels.triton.batch_linear import BatchShape, launch
from atom.kernels.triton.compile_ahead import KernelCompilation, missing_kernels, recording
from atom.kernels.triton.decode_choices import LinearShape, default_choice
from atom.kernels.triton.decode_parts import ACTIVATIONS
from atom.kernels.triton.elementwise import silu_and_mul
from atom.kernels.triton.hopper import MULTIPROCESSORS

if TYPE_CHECKING:
    from atom.benchmarks.gpu_kernels import Bench


class Layer(NamedTuple):
    name: str
    rows: int
    columns: int
    activation: str | None = None


MODELS = {
    "8B": [
        Layer("qkv", 6144, 4096),
        Layer("o", 4096, 4096),
        Layer("gate_up", 28672, 4096, "silu"),
        Layer("down", 4096, 14336),
    ],
    "1B": [
        Layer("qkv", 3072, 2048),
        Layer("o", 2048, 2048),
        Layer("gate_up", 16384, 2048, "silu"),
        Layer("down", 2048, 8192),
    ],
    "0.6B": [
        Layer("qkv", 4096, 1024),
        Layer("o", 1024, 2048),
        Layer("gate_up", 6144, 1024, "silu"),
        Layer("down", 1024, 3072),
    ],
}
TOKENS = (256, 128, 512, 192, 80)
ROTATED = 200_000_000  # values of all weights that take turns, and more
BLOCKS = [(64, 2, 256, 4), (128, 2, 128, 4), (64, 2, 128, 6), (64, 1, 128, 8), (64, 2, 64, 8)]
CHECKED = [(1024, 512, 77), (6144, 1024, 200), (1024, 3072, 300), (2048, 1024, 65)]  # rows, columns, tokens


def variants(layer: Layer, num_tokens: int) -> Iterator[BatchShape]:
    """What is worth measuring: blocks, by runs of equal length and by whole tiles or simple parts of them."""
    for rows, groups, tokens, stages in BLOCKS:
        token_tiles = -(-num_tokens // tokens)
        tiles = -(-layer.rows // (rows * groups)) * token_tiles
        if token_tiles * tokens >= 2 * num_tokens or tokens == 64 and tiles > MULTIPROCESSORS:
            continue
        parts = {tiles // n for n in (2, 3, 4) if tiles % n == 0} | {tiles * n for n in (1, 2, 4)}
        for programs in sorted({128, MULTIPROCESSORS // token_tiles * token_tiles, *parts}):
            if 64 <= programs <= MULTIPROCESSORS:
                yield BatchShape(rows, groups, tokens, stages, programs)


def chosen(layer: Layer, num_tokens: int) -> BatchShape:
    """What a decode step takes."""
    is_gated = layer.activation is not None
    shape = LinearShape(layer.rows // (1 + is_gated), layer.columns, ACTIVATIONS.get(layer.activation, 0))
    return BatchShape(*default_choice(shape, num_tokens, True).blocks)


def way(
    layer: Layer, shape: BatchShape | None, x: torch.Tensor, weight: torch.Tensor, uses_pdl: bool = False
) -> torch.Tensor:
    """The product by the kernel, or without a shape by cuBLAS.

    A launch is timed without dependence: what it hides of its neighbours differs from place to place in a step.
    """
    if shape is None:
        y = F.linear(x, weight)
        return y if layer.activation is None else silu_and_mul(y)
    size = layer.rows if layer.activation is None else layer.rows // 2
    output = torch.empty(len(x), size, device=x.device, dtype=x.dtype)
    launch(shape, x, weight, output, ACTIVATIONS.get(layer.activation, 0), uses_pdl=uses_pdl)
    return output


def check(shape: BatchShape, is_gated: bool) -> float:
    """The largest error against fp32 of layers with odd sizes; infinite where two runs differ."""
    worst = 0.0
    for rows, columns, num_tokens in CHECKED:
        layer = Layer("check", rows, columns, "gelu_tanh" if is_gated else None)
        weight = (torch.randn(rows, columns, device="cuda") / columns**0.5).bfloat16()
        x = torch.randn(num_tokens, columns, device="cuda").bfloat16()
        found, again = (way(layer, shape, x, weight) for _ in range(2))
        wanted = fused_linear(x, weight, activation=layer.activation)
        worst = max(worst, relative_error(found, wanted) if torch.equal(found, again) else float("inf"))
    return worst


def compile_variants() -> None:
    """Compile what is launched, side by side; nothing runs."""
    x, weight = (torch.zeros(256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    with recording() as recorder:
        for blocks in BLOCKS:
            for activation in (None, "silu", "gelu_tanh"):
                way(Layer("compile", 256, 64, activation), BatchShape(*blocks, MULTIPROCESSORS), x, weight)
    with KernelCompilation(missing_kernels(list(recorder.launches.values()))) as compilation:
        compilation.wait()


def name_of(shape: BatchShape | None) -> str:
    return "cuBLAS" if shape is None else "x".join(map(str, shape))


def floor_us(layer: Layer, num_tokens: int) -> float:
    size = layer.rows * layer.columns
    return max(2 * num_tokens * size / H200.matmul_tflop_s / 1e6, 2 * size / H200.read_gb_s / 1e3)


def bench_batch(bench: Bench) -> None:
    torch.manual_seed(time.time_ns() % 2**31)
    compile_variants()
    numbers = torch.randn(ROTATED + 28672 * 4096, device="cuda").bfloat16().mul_(0.02)
    right: dict[tuple[Any, ...], float] = {}
    for num_tokens in TOKENS:
        for model, layers in MODELS.items():
            for layer in layers:
                if bench.is_over:
                    return
                time_layer(
                    bench, f"batch {model} {layer.name} {num_tokens}", layer, num_tokens, numbers, right
                )
            time_model(bench, f"batch {model} layer {num_tokens}", layers, num_tokens, numbers)


def time_layer(
    bench: Bench,
    title: str,
    layer: Layer,
    num_tokens: int,
    numbers: torch.Tensor,
    right: dict[tuple[Any, ...], float],
) -> None:
    size = layer.rows * layer.columns
    weights = [
        numbers[i * size : (i + 1) * size].view(layer.rows, layer.columns)
        for i in range(len(numbers) // size)
    ]
    x = torch.randn(num_tokens, layer.columns, device="cuda").bfloat16()
    wanted = fused_linear(x, weights[0], activation=layer.activation)

    def error_of(shape: BatchShape) -> float:
        key = (*shape, layer.activation is None)
        if key not in right:
            right[key] = check(shape, layer.activation is not None)
        return max(right[key], relative_error(way(layer, shape, x, weights[0]), wanted))

    def calls(shape: BatchShape | None) -> list[Callable[[], Any]]:
        return [lambda weight=weight: way(layer, shape, x, weight) for weight in weights]

    times = {name_of(None): bench.try_variant(f"{title} cuBLAS", None, calls(None))}
    for shape in variants(layer, num_tokens):
        name = name_of(shape)
        times[name] = bench.try_variant(f"{title} {name}", lambda shape=shape: error_of(shape), calls(shape))
    found = {name: value for name, value in times.items() if value is not None}
    print(f"{title}: " + ", ".join(f"{name} {value:.1f}" for name, value in found.items()), flush=True)
    bench.add(title, found.get(name_of(chosen(layer, num_tokens))), found, floor_us(layer, num_tokens))


def time_model(bench: Bench, title: str, layers: list[Layer], num_tokens: int, numbers: torch.Tensor) -> None:
    """A layer's products behind each other: those of a decode step, and all by cuBLAS."""
    start, ways = 0, {"choice": [], "cuBLAS": []}
    size = sum(layer.rows * layer.columns for layer in layers)
    inputs = [torch.randn(num_tokens, layer.columns, device="cuda").bfloat16() for layer in layers]
    for _ in range(max(1, len(numbers) // size)):
        for layer, x in zip(layers, inputs, strict=True):
            end = start + layer.rows * layer.columns
            weight = numbers[start:end].view(layer.rows, layer.columns)
            start = end
            one = chosen(layer, num_tokens)
            ways["choice"].append(
                lambda layer=layer, one=one, x=x, weight=weight: way(layer, one, x, weight, uses_pdl=True)
            )
            ways["cuBLAS"].append(lambda layer=layer, x=x, weight=weight: way(layer, None, x, weight))
    times = {name: bench.try_variant(f"{title} {name}", None, calls) for name, calls in ways.items()}
    found = {name: value * len(layers) for name, value in times.items() if value is not None}
    bench.add(title, found.get("choice"), found, sum(floor_us(layer, num_tokens) for layer in layers))
