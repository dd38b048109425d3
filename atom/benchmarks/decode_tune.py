"""Measures block sizes of the decode step's linear layers and keeps the best on disk, see ``decode_table``."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from atom.benchmarks.decode_launches import META, DecodeShape, Recorder, compile_side_by_side, launches_of
from atom.kernels.triton.decode_linear import (
    Choice,
    DecodeLinear,
    LinearArguments,
    LinearShape,
    candidates,
    default_choice,
    token_class,
)
from atom.kernels.triton.decode_table import save_table
from atom.platforms import get_platform

ROTATED_BYTES = 600 << 20  # weights that take turns, so that none is still in the L2 cache
BOUND = 1e-2  # relative error of bf16 against fp32


@dataclass
class Case:
    """One layer's shape at a number of tokens, and what is tried for it."""

    name: str
    rows: int
    columns: int
    has_norm: bool
    activation: int
    num_tokens: int
    has_gluon: bool

    @property
    def shape(self) -> LinearShape:
        return LinearShape(self.rows // 2 if self.activation else self.rows, self.columns, self.activation)

    def choices(self) -> list[Choice]:
        default = default_choice(self.shape, self.num_tokens, self.has_gluon)
        tried = list(candidates(self.shape, self.num_tokens, self.has_gluon))
        return [default, *(choice for choice in tried if choice != default)]

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """x, the norm's factor and the output."""

        def random(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.bfloat16, device=device).normal_()

        norm = random(self.columns) if self.has_norm else None
        return random(self.num_tokens, self.columns), norm, random(self.num_tokens, self.shape.N)


def cases(shapes: list[DecodeShape], batches: list[int], has_gluon: bool) -> list[Case]:
    return [
        Case(f"{shape.name} {part}", rows, columns, has_norm, activation, batch, has_gluon)
        for shape in shapes
        for part, (rows, columns, has_norm, activation) in shape.linears.items()
        for batch in batches
    ]


def tune(shapes: list[DecodeShape], batches: list[int]) -> None:
    """Compile every candidate side by side, time each within a graph, keep the best of each shape."""
    has_gluon = True  # tuned for what this was written on; the portable kernels are among the candidates

    def record(recorder: Recorder) -> None:
        run = DecodeLinear(META, has_gluon=has_gluon, uses_pdl=True)
        for case in cases(shapes, batches, has_gluon):
            weight = torch.empty((case.rows, case.columns), dtype=torch.bfloat16, device=META)
            x, norm, out = case.tensors(META)
            layer = LinearArguments(weight, norm, 1e-6, None, case.activation)
            for choice in case.choices():
                recorder.label = f"{case.name} M={case.num_tokens} {choice}"
                run(x, layer, out, None if case.has_norm else out, choice=choice)

    compile_side_by_side(launches_of(record))
    device = torch.device("cuda")
    pool = torch.empty(ROTATED_BYTES // 2, dtype=torch.bfloat16, device=device).normal_().mul_(0.03)
    table = {}
    for case in cases(shapes, batches, has_gluon):
        timed = _time_case(case, pool)
        if not timed:
            print(f"## {case.name} M={case.num_tokens}: nothing ran", flush=True)
            continue
        floor = case.rows * case.columns * 2 / 4438e9 * 1e6
        best = min(timed, key=timed.get)
        default = case.choices()[0]
        print(
            f"## {case.name} M={case.num_tokens} {case.rows}x{case.columns}: floor {floor:.2f} us, default "
            f"{timed.get(default, float('nan')):.2f} {default.kernel}{default.blocks}",
            flush=True,
        )
        for choice in sorted(timed, key=timed.get)[:3]:
            print(f"   {timed[choice]:.2f} us {choice.kernel}{choice.blocks}", flush=True)
        if timed[best] < 0.98 * timed.get(default, float("inf")):
            table[case.shape, token_class(case.num_tokens)] = best
    architecture = get_platform("cuda").describe()["architecture"]
    print("kept in", save_table(architecture, table))


def _time_case(case: Case, pool: torch.Tensor) -> dict[Choice, float]:
    """Microseconds a launch by choice; what fails or is wrong is told and left out."""
    size = case.rows * case.columns
    count = max(1, min(40, pool.numel() // size))
    if size > pool.numel():
        pool = torch.empty(size, dtype=pool.dtype, device=pool.device).normal_().mul_(0.03)
    weights = [pool[i * size : (i + 1) * size].view(case.rows, case.columns) for i in range(count)]
    x, norm, out = case.tensors(pool.device)
    residual = None if case.has_norm else torch.randn_like(out)
    layers = [LinearArguments(weight, norm, 1e-6, None, case.activation) for weight in weights]
    wanted = _reference(case, layers[0], x, residual)
    run = DecodeLinear(pool.device, has_gluon=True, uses_pdl=True)
    _reserve(run, case)
    timed = {}
    for choice in case.choices():
        try:
            out.fill_(float("nan"))
            run(x, layers[0], out, residual, choice=choice)
            error = float((out.float() - wanted).norm() / wanted.norm())
            if not error < BOUND:
                print(f"   {case.name} M={case.num_tokens} {choice}: error {error:.1e}", flush=True)
                continue
            timed[choice] = _graph_us(run, x, layers, out, residual, choice)
        except Exception as error:
            print(f"   {case.name} {choice}: {type(error).__name__} {str(error)[:120]}", flush=True)
    return timed


def _reserve(run: DecodeLinear, case: Case) -> None:
    """Room for any candidate: eight splits of tiles padded by one row."""
    tiles = -(-case.rows // 64)
    space = run._workspace
    space.partial = torch.zeros(tiles * 8 * 130 * 64, dtype=torch.float32, device=space.partial.device)
    space.arrivals = torch.zeros(tiles, dtype=torch.int32, device=space.partial.device)


def _reference(
    case: Case, layer: LinearArguments, x: torch.Tensor, residual: torch.Tensor | None
) -> torch.Tensor:
    from atom.kernels.reference.decode import fused_linear

    act = "silu" if case.activation else None
    return fused_linear(x.float(), layer.weight, norm=layer.norm, eps=1e-6, activation=act, residual=residual)


def _graph_us(run: DecodeLinear, x: Any, layers: list[Any], out: Any, residual: Any, choice: Choice) -> float:
    """Median microseconds a launch of a graph that runs over all weights."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run(x, layers[0], out, residual, choice=choice)
        torch.cuda.synchronize()
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.cuda.graph(graph, stream=stream))
            for layer in layers:
                run(x, layer, out, residual, choice=choice)
    times = []
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2] / len(layers)
