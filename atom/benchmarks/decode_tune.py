"""Measures block sizes of a decode step's linear layers inside whole layers, and keeps the best on disk.

    python -m atom.benchmarks.decode_tune [--models qwen3-0.6b ...] [--batches 8 16 32 64] [--kernels tile loop]
        [--budget 100] [--json FOLDER]

Every candidate is checked against fp32 on fresh random data, with the norm of the launch behind it or before it.
It is then timed in a graph of layers (QKV, output, gate/up, down, each launched while the one before it ends, without
the attention) whose weights take turns, so that none is left in the L2 cache, x comes from the launch before, and
what a kernel hides of its neighbours is in the figure. One product after the other takes its fastest candidate.
``decode_table`` keeps them for this machine; the entries for ``LINEAR_CHOICES`` are printed last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from atom.benchmarks.child import lines_of_child, print_line
from atom.benchmarks.decode_launches import (
    META,
    SHAPES,
    DecodeShape,
    Recorder,
    compile_side_by_side,
    launches_of,
)
from atom.benchmarks.gpu_measure import device_us, record_graph, relative_error
from atom.benchmarks.gpu_roofline import H200
from atom.kernels.triton.batch_linear import SUMS
from atom.kernels.triton.decode_choices import (
    CLASSES,
    MAX_TOKENS,
    Choice,
    LinearShape,
    candidates,
    default_choice,
    padded,
    token_class,
)
from atom.kernels.triton.decode_linear import DecodeLinear, LinearArguments, Scaled
from atom.kernels.triton.decode_table import save_table
from atom.kernels.triton.hopper import MULTIPROCESSORS
from atom.platforms import get_platform

BATCHES = (8, 16, 32, 64)
KERNELS = ("gemv", "gluon", "mma", "loop", "rows", "ring", "tile", "batch")
PARTS = ("o", "down", "gate_up", "qkv")  # in the order they are tuned: who leaves half a norm first
ROTATED_BYTES = 400 << 20  # weights that take turns
BOUND = 1e-2  # relative error of bf16 against fp32
NUM_SHARES = 48  # of the sums of squares, where no launch left them
EPS = 1e-6

Choices = dict[str, Choice]


def linear_shape(shape: DecodeShape, part: str) -> LinearShape:
    rows, columns, _, activation = shape.linears[part]
    return LinearShape(rows // 2 if activation else rows, columns, activation)


def choices_of(
    shape: DecodeShape, part: str, num_tokens: int, kernels: Sequence[str] = KERNELS
) -> list[Choice]:
    """The usual choice, and what else is tried of ``kernels``."""
    one = linear_shape(shape, part)
    usual = default_choice(one, num_tokens, True)
    others = (choice for choice in candidates(one, num_tokens, True) if choice.kernel in kernels)
    return [usual, *(choice for choice in others if choice != usual)]


class Layers:
    """The products of some layers of a model for ``num_tokens`` tokens, with weights of their own."""

    def __init__(self, shape: DecodeShape, num_tokens: int, device: torch.device, pool: torch.Tensor | None):
        self.shape, self.num_tokens, self.device = shape, num_tokens, device
        self.halves_norms = num_tokens > 1
        sizes = {part: rows * columns for part, (rows, columns, _, _) in shape.linears.items()}
        size = sum(sizes.values())
        count = 1 if pool is None else max(2, pool.numel() // size)
        self.norm = self.random(shape.hidden_size)
        self.layers: list[dict[str, LinearArguments]] = []
        for number in range(count):
            place, layer = number * size, {}
            for part, (rows, columns, has_norm, activation) in shape.linears.items():
                if pool is None:
                    weight = torch.empty((rows, columns), dtype=torch.bfloat16, device=device)
                else:
                    weight = pool[place : place + sizes[part]].view(rows, columns)
                norm = self.norm if has_norm else None
                layer[part] = LinearArguments(weight, norm, EPS, None, activation)
                place += sizes[part]
            self.layers.append(layer)
        self.run = DecodeLinear(device, has_gluon=True, uses_pdl=True)
        self._reserve()
        first = self.layers[0]
        # In rooms for more tokens, as serving has them.
        room = max(MAX_TOKENS, padded(num_tokens))
        self.x, self.next_x = (self.random(room, shape.hidden_size)[:num_tokens] for _ in range(2))
        self.qkv = self.random(room, first["qkv"].shape.N)[:num_tokens]
        # Stands for the output of the attention, so that it is written by the launch before.
        self.attended = self.qkv.view(-1)[: num_tokens * first["o"].shape.K].view(num_tokens, -1)
        self.gated = self.random(room, first["down"].shape.K)[:num_tokens]

    def random(self, *size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=self.device).normal_()

    def _reserve(self) -> None:
        """Room for any candidate: eight splits of tiles of 64 rows and one, shares of tiles of eight rows; for more
        tokens, sums of every multiprocessor.
        """
        most = max(rows for rows, *_ in self.shape.linears.values())
        if self.device.type == "meta":
            return
        space = self.run._workspace
        size = max(most // 8 * 9 * 8 * 64, MULTIPROCESSORS * SUMS)
        space.partial = torch.zeros(size, device=self.device)
        space.arrivals = torch.zeros(
            max(most // 8, 2 * MULTIPROCESSORS), dtype=torch.int32, device=self.device
        )
        space.shares = torch.zeros(max(most // 8, 8 * NUM_SHARES) * 64, device=self.device)

    def launch(self, choices: Choices) -> None:
        """All layers once."""
        run, scaled, halves = self.run, None, {}
        if self.halves_norms:
            halves = {"next_norm": self.norm, "next_x": self.next_x}
            # Left by the layer before the first one.
            scaled = Scaled(self.next_x, NUM_SHARES)
        for layer in self.layers:
            run(self.x, layer["qkv"], self.qkv, choice=choices["qkv"], scaled=scaled)
            scaled = run(self.attended, layer["o"], self.x, self.x, choice=choices["o"], **halves)
            run(self.x, layer["gate_up"], self.gated, choice=choices["gate_up"], scaled=scaled)
            scaled = run(self.gated, layer["down"], self.x, self.x, choice=choices["down"], **halves)

    def check(self, part: str, choice: Choice) -> str:
        """What is wrong with a candidate; empty where nothing is."""
        from atom.kernels.reference.decode import fused_linear

        layer = self.layers[0][part]
        one = layer.shape
        x = self.random(self.num_tokens, one.K)
        residual = self.random(self.num_tokens, one.N) if layer.norm is None else None
        act = "silu" if layer.activation else None
        wanted = fused_linear(
            x.float(), layer.weight, norm=layer.norm, eps=EPS, activation=act, residual=residual
        )
        out, next_x = (torch.full_like(wanted, float("nan"), dtype=torch.bfloat16) for _ in range(2))
        shares = self.run._workspace.shares.fill_(float("nan"))
        wide = max(16, token_class(self.num_tokens))
        options: dict[str, Any] = {}
        if self.halves_norms and layer.norm is None:
            options = {"next_norm": self.norm, "next_x": next_x}
        elif self.halves_norms:
            given = torch.rand(NUM_SHARES, wide, device=self.device)
            given[:, : self.num_tokens] *= x.float().square().sum(1) / given[:, : self.num_tokens].sum(0)
            shares[: given.numel()] = given.view(-1)
            options = {"scaled": Scaled((x.float() * layer.norm.float()).to(x.dtype), NUM_SHARES)}
        self.run._workspace.partial.fill_(float("nan"))
        for _ in range(2):  # arrivals are left as they were found
            left = self.run(x, layer, out, residual, choice=choice, **options)
        if not (error := relative_error(out, wanted)) < BOUND:
            return f"error {error:.1e}"
        if left is not None:
            if not (error := relative_error(next_x, out.float() * self.norm.float())) < BOUND:
                return f"error of the next input {error:.1e}"
            sums = shares[: left.num_shares * wide].view(-1, wide).sum(0)[: self.num_tokens]
            if not (error := relative_error(sums, out.float().square().sum(1))) < 1e-3:
                return f"error of the squares {error:.1e}"
        return ""

    def time_us(self, choices: Choices, repeats: int = 15) -> float:
        """Median microseconds a layer of recorded layers."""
        self.x.normal_()
        self.run._workspace.shares.fill_(1.0)
        graph = record_graph(lambda: self.launch(choices))
        return statistics.median(device_us(graph.replay) for _ in range(repeats)) / len(self.layers)


def tune_layers(layers: Layers, deadline: float, kernels: Sequence[str] = KERNELS) -> dict[str, Any]:
    """Choices and microseconds a layer of one model and number of tokens, and how they were reached."""
    shape, n = layers.shape, layers.num_tokens
    best = {part: choices_of(shape, part, n)[0] for part in PARTS}
    fastest = usual = layers.time_us(best)
    floor = 2 * shape.layer_weights / H200.read_gb_s / 1e3
    print(f"## {shape.name} M={n}: floor {floor:.1f} us a layer, usual choices {usual:.2f}", flush=True)
    timed: dict[str, list[tuple[float, str, tuple[int, ...]]]] = {}
    for number, part in enumerate(PARTS):
        until = time.monotonic() + (deadline - time.monotonic()) / (len(PARTS) - number)
        before, found, num_wrong, num_left = fastest, [], 0, 0
        for choice in choices_of(shape, part, n, kernels):
            if time.monotonic() > until and found:
                num_left += 1
                continue
            try:
                wrong = layers.check(part, choice)
                if not wrong:
                    found.append((layers.time_us(best | {part: choice}), choice))
            except Exception as error:  # blocks that do not fit the chip are no reason to stop
                if "CUDA error" in str(error):
                    print(f"   {part} {choice.kernel}{choice.blocks} ended the device's work", flush=True)
                    raise
                wrong = f"{type(error).__name__}: {str(error)[:100]}"
            if wrong:
                num_wrong += 1
                print(f"   {part} {choice.kernel}{choice.blocks}: {wrong}", flush=True)
        found.sort(key=lambda entry: entry[0])
        if found and found[0][0] < 0.995 * before:
            best[part] = found[0][1]
        fastest = layers.time_us(best)
        timed[part] = [(us, choice.kernel, choice.blocks) for us, choice in found]
        shown = ", ".join(f"{us:.2f} {choice.kernel}{choice.blocks}" for us, choice in found[:4])
        print(
            f"   {part}: {before:.2f} -> {fastest:.2f}; {shown}; {num_wrong} wrong, {num_left} not timed",
            flush=True,
        )
        by_kernel = {choice.kernel: (us, choice.blocks) for us, choice in reversed(found)}
        print("      " + ", ".join(f"best {k} {us:.2f} {b}" for k, (us, b) in by_kernel.items()), flush=True)
    print(f"   together {usual:.2f} -> {fastest:.2f} us a layer", flush=True)
    return {
        "model": shape.name, "num_tokens": n, "floor_us": floor, "usual_us": usual, "best_us": fastest,
        "best": {part: (choice.kernel, choice.blocks) for part, choice in best.items()}, "timed": timed,
    }  # fmt: skip


def record_all(
    recorder: Recorder, shapes: list[DecodeShape], batches: list[int], kernels: Sequence[str] = KERNELS
) -> None:
    """Let ``recorder`` see every launch of every candidate."""
    for shape in shapes:
        for n in batches:
            layers = Layers(shape, n, META, None)
            usual = {part: choices_of(shape, part, n)[0] for part in PARTS}
            layers.launch(usual)
            for part in PARTS:
                for choice in choices_of(shape, part, n, kernels):
                    recorder.label = f"{shape.name} {part} M={n} {choice.kernel}{choice.blocks}"
                    options: dict[str, Any] = {}
                    layer, given = layers.layers[0][part], layers.random(n, linear_shape(shape, part).K)
                    residual = out = layers.random(n, layer.shape.N)
                    if layer.norm is not None:
                        residual = None
                        if layers.halves_norms:
                            options = {"scaled": Scaled(given, NUM_SHARES)}
                    elif layers.halves_norms:
                        options = {"next_norm": layers.norm, "next_x": out}
                    layers.run(given, layer, out, residual, choice=choice, **options)


def tune(
    shapes: list[DecodeShape],
    batches: list[int],
    budget_s: float = 100.0,
    json_folder: Any = None,
    kernels: Sequence[str] = KERNELS,
) -> None:
    """Compile every candidate side by side, time them model by model in processes of their own, keep the best."""
    compile_side_by_side(launches_of(lambda recorder: record_all(recorder, shapes, batches, kernels)))
    lines: list[dict[str, Any]] = []
    for shape in shapes:
        args = ["--one", "--models", shape.name, "--batches", *map(str, batches)]
        args += ["--budget", str(budget_s / len(shapes)), "--kernels", *kernels]
        lines += lines_of_child("atom.benchmarks.decode_tune", args, shape.name)
    if json_folder is not None:
        folder = Path(json_folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "decode_tune.json").write_text(json.dumps(lines, indent=1))
    table = {}
    for line in lines:
        shape = next(shape for shape in shapes if shape.name == line["model"])
        for part, (kernel, blocks) in line["best"].items():
            key = linear_shape(shape, part), token_class(line["num_tokens"])
            table[key] = Choice(kernel, tuple(blocks))
    for line in lines:
        print(
            f"{line['model']} M={line['num_tokens']}: {line['usual_us']:.2f} -> {line['best_us']:.2f} us a layer, "
            f"floor {line['floor_us']:.1f}"
        )
    print(measured_of(shapes, table))
    print("kept in", save_table(get_platform("cuda").describe()["architecture"], table))


def measured_of(shapes: list[DecodeShape], table: dict[tuple[LinearShape, int], Choice]) -> str:
    """Entries of ``decode_choices.LINEAR_CHOICES``; classes that were not measured keep their usual choice."""
    entries = {}
    for shape in shapes:
        for part in shape.linears:
            one = linear_shape(shape, part)
            choices = [table.get((one, most)) or default_choice(one, most, True) for most in CLASSES]
            texts = [f'Choice("{choice.kernel}", {choice.blocks})' for choice in choices]
            lines = [f"        {', '.join(texts[i : i + 2])}," for i in range(0, len(texts), 2)]
            entries[one.N, one.K, one.activation > 0] = "\n".join(lines)
    return "\n".join(f"    {key}: (\n{text}\n    )," for key, text in entries.items())


def run_one(shape: DecodeShape, batches: list[int], budget_s: float, kernels: Sequence[str]) -> None:
    """Tune one model in this process."""
    device = torch.device("cuda")
    size = shape.layer_weights
    count = max(2, ROTATED_BYTES // (2 * size))
    pool = torch.empty(count * size, dtype=torch.bfloat16, device=device).normal_().mul_(0.01)
    began = time.monotonic()
    for number, n in enumerate(batches):
        deadline = began + budget_s * (number + 1) / len(batches)
        print_line(tune_layers(Layers(shape, n, device, pool), deadline, kernels))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--budget", type=float, default=100.0, help="seconds for timing, without compiling")
    parser.add_argument(
        "--kernels", nargs="+", choices=KERNELS, default=KERNELS, help="tried beside the usual"
    )
    parser.add_argument("--json", type=Path, help="folder of decode_tune.json with every figure")
    # --one: this process runs the model itself.
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    shapes = [shape for shape in SHAPES if shape.name in args.models]
    if args.one:
        run_one(shapes[0], args.batches, args.budget, args.kernels)
    else:
        tune(shapes, args.batches, args.budget, args.json, args.kernels)


if __name__ == "__main__":
    main()
