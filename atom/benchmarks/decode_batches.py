"""Attention of decode batches in every form there is: checked against its twin, then timed inside a chain of layers.

``python -m atom.benchmarks.decode_chain --attention`` runs it. A chain is a few layers of the model's real shapes with
weights and keys of their own, launched as serving launches them and replayed from a graph. A figure is the chain with
attention less the chain without, in microseconds a layer: what a kernel hides of its neighbours is in it.
"""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import torch

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
from atom.errors import ConfigError
from atom.kernels.triton.decode_attention import arrival_counters, decode_attention
from atom.kernels.triton.decode_choices import MAX_TOKENS, padded
from atom.kernels.triton.decode_linear import DecodeLinear, LinearArguments, Scaled
from atom.kernels.triton.fused_attention_launch import (
    MAX_PROGRAMS,
    BatchShape,
    DecodeAttention,
    SplitShape,
    StepTables,
    WarpShape,
    batch_shape,
)
from atom.kernels.triton.rotary_cache import rotate_and_write

# A figure is the mean over these ranges; within one, the sequences' lengths are evenly spread, in no order.
CONTEXTS = {
    "256": ((144, 144), (208, 208), (272, 272), (336, 336)),
    "1100": ((1040, 1040), (1160, 1160)),
    "1285": ((1285, 1285),),
    "1025-1545": ((1025, 1545),),
}
FEW_CONTEXTS, MANY_CONTEXTS = ("256", "1100"), ("1100", "1285", "1025-1545")
LONGEST = 1568
PAGE = 16
MIN_BATCH, MAX_BATCH = 2, 512  # one has a kernel of its own
NUM_LAYERS = 6
BOUND = 1e-2  # relative error of bf16 against fp32
OLD = {8: SplitShape(8, 64, 4, 3), 32: SplitShape(1, 64, 4, 3), 64: SplitShape(1, 64, 4, 3)}
# Splits, keys of a warp, warps, stages, registers.
FEW = (
    (1, 16, 8, 1, 128), (1, 16, 8, 2, 128), (1, 16, 4, 4, 128), (4, 16, 4, 1, 128), (4, 16, 4, 2, 128),
    (4, 16, 4, 3, 0), (4, 16, 2, 2, 128), (8, 16, 2, 2, 128),
)  # fmt: skip
MANY = (
    (1, 16, 4, 1, 128), (1, 16, 4, 2, 0), (1, 16, 4, 3, 0), (2, 16, 4, 3, 0), (1, 16, 8, 1, 128),
    (1, 16, 8, 2, 128), (1, 16, 2, 3, 0), (1, 16, 2, 4, 128), (2, 16, 2, 3, 0), (1, 16, 2, 2, 128),
)  # fmt: skip


class TwoLaunches(NamedTuple):
    """Not a form of the fused launch: ``rotate_and_write`` and ``decode_attention``, as the modules launch them."""

    splits: int = 1


Form = BatchShape | TwoLaunches


def contexts_of(batch: int) -> tuple[str, ...]:
    """Which contexts are timed: the long ones where attention is most of a step."""
    return FEW_CONTEXTS if batch < 64 else MANY_CONTEXTS


def spread(first: int, last: int, count: int) -> list[int]:
    """``count`` lengths from ``first`` to ``last``, neighbours far apart."""
    order = sorted(range(count), key=lambda i: i * 0.6180339887 % 1.0)
    return [first + (last - first) * place // max(1, count - 1) for place in order]


def shapes_of(shape: DecodeShape, batch: int) -> list[Form]:
    """What is timed: the choice of serving first, the portable kernels, then what else fits."""
    tried: list[Form] = [batch_shape(shape.attention_layer(), batch, True)]
    tried += [OLD[min(OLD, key=lambda n: abs(n - batch))], TwoLaunches()]
    tried += [WarpShape(*one) for one in (FEW if batch <= 16 else MANY)]
    if shape.head_dim <= 64:  # tiles of half the size: more of them
        tried += [WarpShape(*one[:3], 2 * one[3], one[4]) for one in (FEW if batch <= 16 else MANY)]
    return [
        one
        for one in dict.fromkeys(tried)
        if one.splits == 1 or one.splits * batch * shape.num_kv_heads <= MAX_PROGRAMS
    ]


class Chain:
    """A few layers of a model for ``batch`` sequences; on ``META`` it only launches, for a recorder.

    On a CPU, for tests, there is no dependent launch.
    """

    def __init__(
        self,
        shape: DecodeShape,
        batch: int,
        device: torch.device,
        num_layers: int = NUM_LAYERS,
        dtype: torch.dtype = torch.bfloat16,
    ):
        self.shape, self.batch, self.device, self.dtype = shape, batch, device, dtype
        hidden, dim, kv_heads = shape.hidden_size, shape.head_dim, shape.num_kv_heads
        columns = -(-LONGEST // PAGE)
        self.layers = []
        for _ in range(num_layers):
            linears = {
                name: LinearArguments(
                    self._random(rows, size, scale=size**-0.5),
                    1 + self._random(size, scale=0.1) if has_norm else None,
                    1e-6,
                    None,
                    activation,
                )
                for name, (rows, size, has_norm, activation) in shape.linears.items()
            }
            cache = [self._random(batch * columns + 1, kv_heads, PAGE, dim) for _ in range(2)]
            self.layers.append((linears, cache))
        qk_norm = 1 + self._random(shape.num_heads + kv_heads, dim, scale=0.1) if shape.has_qk_norm else None
        self.attention = shape.attention_layer(qk_norm)
        uses_pdl = device.type != "cpu"
        self.linear = DecodeLinear(device, has_gluon=True, uses_pdl=uses_pdl)
        self.attend = DecodeAttention(device, [self.attention], batch, uses_pdl, True)
        self.linear.reserve([layer.shape for layer in self.layers[0][0].values()], batch)
        self.form: Form | None = None
        self.arrivals = arrival_counters(device)
        # In rooms for more tokens, as serving has them.
        room = max(padded(batch), MAX_TOKENS)
        self.x, self.next_x = (self._random(room, hidden)[:batch] for _ in range(2))
        self.qkv = self._random(batch, shape.linears["qkv"][0])
        self.attended = self._random(room, shape.num_heads * dim)[:batch]
        self.gated = self._random(room, shape.intermediate_size)[:batch]
        pages = torch.arange(batch * columns, device=device)
        if device != META:
            pages = torch.randperm(batch * columns, device=device)
        self.tables = (pages + 1).int().view(batch, columns)
        self.rows = torch.arange(batch, device=device)
        self.lens = torch.ones(batch, dtype=torch.int32, device=device)
        self.slots = torch.zeros(batch, dtype=torch.int64, device=device)
        angle = self._random(batch, dim // 2).float()
        self.cos = torch.cat((angle.cos(), angle.cos()), -1).to(dtype)[:, None].contiguous()
        self.sin = torch.cat((-angle.sin(), angle.sin()), -1).to(dtype)[:, None].contiguous()

    def _random(self, *size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.empty(size, dtype=self.dtype, device=self.device).normal_().mul_(scale)

    def set_lengths(self, lens: list[int]) -> None:
        """Context lengths of the sequences; 0 is a padded row."""
        self.lens.copy_(torch.tensor(lens, dtype=torch.int32))
        last = (self.lens.long() - 1).clamp(min=0)
        block = self.tables.gather(1, (last // PAGE)[:, None])[:, 0].long()
        self.slots.copy_(torch.where(self.lens > 0, block * PAGE + last % PAGE, -1))

    def set_form(self, form: Form | None) -> None:
        """What attends from here on; None: the choice of serving."""
        self.form = form
        self.attend._batch_shape = None if isinstance(form, TwoLaunches) else form

    def attend_layer(self, index: int = 0) -> None:
        keys, values = self.layers[index][1]
        if not isinstance(self.form, TwoLaunches):
            step = StepTables(self.tables, self.rows, self.lens, self.slots, self.cos, self.sin)
            self.attend(self.qkv, self.attention, keys, values, step, self.attended)
            return
        layer = self.attention
        qkv = self.qkv.view(self.batch, -1, layer.head_dim)
        norm = None if layer.qk_norm is None else layer.qk_norm.float()
        rotate_and_write(qkv, layer.num_heads, self.cos, self.sin, norm, layer.eps, keys, values, self.slots)
        decode_attention(
            qkv[:, : layer.num_heads], keys, values, self.tables, self.rows, self.lens,
            self.attended.view(self.batch, layer.num_heads, layer.head_dim), self.arrivals, scale=layer.scale,
        )  # fmt: skip

    def run(self, has_attention: bool = True) -> None:
        """One step, launched as ``FusedCudaDecoder`` does."""
        is_many, x = self.batch > MAX_TOKENS, self.x
        # Of many tokens the embedding leaves half of the first norm.
        scaled = Scaled(self.next_x, 1) if is_many else None
        for index, (layer, _) in enumerate(self.layers):
            self.linear(x, layer["qkv"], self.qkv, is_first=index == 0, scaled=scaled)
            if has_attention:
                self.attend_layer(index)
            is_last = index + 1 == len(self.layers)
            behind = self.layers[0 if is_last else index + 1][0]
            following = None if is_last and not is_many else behind["qkv"].norm
            norm = layer["gate_up"].norm
            scaled = self.linear(self.attended, layer["o"], x, x, next_norm=norm, next_x=self.next_x)
            self.linear(x, layer["gate_up"], self.gated, scaled=scaled)
            scaled = self.linear(self.gated, layer["down"], x, x, next_norm=following, next_x=self.next_x)

    def check(self, shape: Form, wanted: torch.Tensor, cache: list[torch.Tensor]) -> str | None:
        """What is wrong with the kernel of ``shape``; None: nothing."""
        self.set_form(shape)
        own = [tensor.clone() for tensor in self.layers[0][1]]
        before, self.layers[0] = self.layers[0], (self.layers[0][0], own)
        projected, first = self.qkv.clone(), None
        try:
            for _ in range(3):
                self.qkv.copy_(projected)
                self.attended.fill_(float("nan"))
                self.attend_layer()
                error = relative_error(self.attended, wanted)
                if not error < BOUND:
                    return f"error {error:.1e}"
                first = self.attended.clone() if first is None else first
                if not torch.equal(first, self.attended):
                    return "another run, other bits"
            stored = [relative_error(a, b) for a, b in zip(own, cache, strict=True)]
            if not max(stored) < 1e-3:
                return f"stored keys and values differ by {max(stored):.1e}"
            return "arrivals are left behind" if bool(self.attend._arrivals.any()) else None
        finally:
            self.layers[0] = before
            self.qkv.copy_(projected)

    def twin(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """What attention of layer 0 must write, in fp32, and the cache behind it."""
        from atom.kernels.reference.decode import fused_attention

        cache = [tensor.clone() for tensor in self.layers[0][1]]
        wanted = fused_attention(
            self.qkv.float(), *cache, self.tables, self.lens.tolist(), self.slots, self.cos[:, 0], self.sin[:, 0],
            num_heads=self.shape.num_heads, scale=self.attention.scale, qk_norm=self.attention.qk_norm, eps=1e-6,
        )  # fmt: skip
        return wanted, cache

    def record(self, has_attention: bool = True) -> Any:
        """A graph of the step."""
        return record_graph(lambda: self.run(has_attention))

    def time_us(self, graph: Any, first: int, last: int) -> float:
        """Microseconds a layer of replays with contexts from ``first`` to ``last``: the best of three runs."""
        replays = 12 if self.batch < 64 else 6
        self.set_lengths(spread(first, last, self.batch))
        best = math.inf
        for _ in range(3):
            self.x.normal_()
            graph.replay()
            best = min(best, device_us(graph.replay, replays) / len(self.layers))
        return best


def record_launches(recorder: Recorder, shapes: list[DecodeShape], batches: list[int]) -> None:
    """Let ``recorder`` see every kernel that will be timed."""
    for shape in shapes:
        for batch in batches:
            chain = Chain(shape, batch, META, num_layers=2)
            recorder.label = f"{shape.name} M={batch}"
            chain.run(has_attention=False)
            for one in shapes_of(shape, batch):
                recorder.label = f"{shape.name} M={batch} {one}"
                chain.set_form(one)
                chain.attend_layer()


def time_batch(shape: DecodeShape, batch: int, deadline: float) -> dict[Form, dict[str, float]]:
    """Microseconds of attention a layer, by form and context; what fails or is wrong is told and left out."""
    chain = Chain(shape, batch, torch.device("cuda"))
    lens = [(1 + 97 * i * i) % (LONGEST - 1) + 1 for i in range(batch)]
    lens[0], lens[-1] = 0, LONGEST
    chain.set_lengths(lens)
    wanted, cache = chain.twin()
    right = []
    for one in shapes_of(shape, batch):  # before any step writes into the cache
        try:
            wrong = chain.check(one, wanted, cache)
        except Exception as error:  # a form that does not fit the chip is no reason to stop
            wrong = f"{type(error).__name__} {str(error)[:150]}"
        if wrong is None:
            right.append(one)
        else:
            print(f"{shape.name} b{batch} {one}: {wrong}", flush=True)
    without = chain.time_us(chain.record(has_attention=False), LONGEST, LONGEST)
    found: dict[Form, dict[str, float]] = {}
    for one in right:
        if time.monotonic() > deadline:
            print(f"{shape.name} b{batch}: no time for {one}", flush=True)
            continue
        chain.set_form(one)
        graph = chain.record()
        found[one] = {
            context: sum(chain.time_us(graph, *ends) for ends in CONTEXTS[context]) / len(CONTEXTS[context])
            - without
            for context in contexts_of(batch)
        }
    print(f"{shape.name} b{batch}: {without:.2f} us a layer without attention", flush=True)
    return found


def table_of(name: str, batch: int, floors: dict[str, float], found: dict[Form, dict[str, float]]) -> str:
    """The best forms of one batch, the choice of serving (marked) and the portable kernels among them."""
    kept: dict[Form, None] = {}
    for context in floors:
        kept |= dict.fromkeys(sorted(found, key=lambda one: found[one][context])[:4])
    kept |= dict.fromkeys(list(found)[:3])
    head = ", ".join(f"{context}: floor {floor:.1f}" for context, floor in floors.items())
    lines = [f"## {name} b{batch}, us a layer and share of the bandwidth ({head})"]
    for one in sorted(kept, key=lambda one: found[one][list(floors)[-1]]):
        mark = " <- serving" if one == next(iter(found)) else ""
        figures = "  ".join(
            f"{found[one][c]:6.2f} {floor / found[one][c]:4.0%}" for c, floor in floors.items()
        )
        lines.append(f"  {figures}  {type(one).__name__}{tuple(one)}{mark}")
    return "\n".join(lines)


def time_attention(
    models: list[str], batches: list[int], budget_s: float, compile_only: bool = False
) -> None:
    """Compile all forms side by side, check and time them, print a table a batch at the end."""
    for batch in batches:
        if not MIN_BATCH <= batch <= MAX_BATCH:
            raise ConfigError(f"--batches of --attention must be {MIN_BATCH} to {MAX_BATCH}, got {batch}")
    shapes = [shape for shape in SHAPES if shape.name in models]
    compile_side_by_side(launches_of(lambda recorder: record_launches(recorder, shapes, batches)))
    if compile_only:
        return
    began, tables = time.monotonic(), []
    todo = [(shape, batch) for shape in shapes for batch in batches]
    for number, (shape, batch) in enumerate(todo):
        share = (began + budget_s - time.monotonic()) / (len(todo) - number)
        found = time_batch(shape, batch, time.monotonic() + share)
        kept = 4 * shape.num_kv_heads * shape.head_dim * batch  # bytes a token
        means = {c: sum(map(sum, CONTEXTS[c])) / 2 / len(CONTEXTS[c]) for c in contexts_of(batch)}
        floors = {c: kept * mean / H200.read_gb_s / 1e3 for c, mean in means.items()}
        if found:
            tables.append(table_of(shape.name, batch, floors, found))
        torch.cuda.empty_cache()
    print("\n".join(tables), flush=True)
    print(f"[{time.monotonic() - began:.0f} s]", flush=True)
