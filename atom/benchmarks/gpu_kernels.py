"""Our prefill and decode kernels on a GPU: checked against fp32 on fresh random data, then timed in variants.

    python -m atom.benchmarks.gpu_kernels [--parts varlen decode fused sampling gated batch] [--budget 180] [--json OUT]

Times are medians of CUDA graph replays, over tensors that together outgrow the L2 cache. Each line of the table at
the end says what the engine's choice takes, the best variant found, and its share of what the H200 can do: operations
for prefill attention, bytes for the rest. A variant that does not compile or is wrong is named and left out.
With ``--keep`` the engines of this machine take what was faster at prefill attention than their own choice.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from atom.benchmarks.gpu_batch import bench_batch
from atom.benchmarks.gpu_gated import bench_gated
from atom.benchmarks.gpu_measure import device_us, record_graph, relative_error
from atom.benchmarks.gpu_roofline import H200
from atom.benchmarks.gpu_sampling import bench_sampling
from atom.kernels.reference import activation, norm, rotary
from atom.kernels.reference.attention import attend
from atom.kernels.triton import elementwise, head_projection
from atom.kernels.triton.decode_attention import DecodeShape, decode_attention, decode_shape
from atom.kernels.triton.prefill_table import TORCH, Choice, PrefillLayer, Table, save_table
from atom.kernels.triton.rotary_cache import HEADS_PER_PROGRAM, rotate_and_write
from atom.kernels.triton.varlen_attention import TileShape, layer_tile_shape, plan_tiles, varlen_attention
from atom.model_ops.attentions.flash import varlen_parameters
from atom.platforms import get_platform

PAGE = 16
MIN_GAIN = 0.98  # what is kept instead of the engine's choice takes so much of its time at most
MAX_ERROR = 1e-2  # of a bf16 result, ||found - wanted|| / ||wanted||
NUM_COMPILERS = 8
NUM_ROWS = 8192  # of the elementwise passes
HEAD_TOKENS = (2048, 4096)
DECODE_CONTEXT = 1100
NUM_COPIES = 4  # of inputs, rotated


class Heads(NamedTuple):
    q: int
    kv: int
    dim: int


MODELS = {"8B": Heads(32, 8, 128), "0.6B": Heads(16, 8, 128), "1B": Heads(32, 8, 64)}
GEMMA = Heads(4, 1, 256)
HIDDEN = {"8B": (4096, 14336), "0.6B": (1024, 3072), "1B": (2048, 8192)}
PREFILLS = {"2048": [2048], "4096": [4096], "8192": [8192], "16x1024": [1024] * 16}
VARLEN_SHAPES = [  # of the portable kernel
    TileShape(64, 64, 4, 3, True),
    TileShape(128, 64, 8, 3, True),
    TileShape(128, 128, 8, 3, True),
]
DECODE_SHAPES = [(64, 2, 3), (64, 4, 3), (64, 4, 2), (32, 2, 4), (128, 4, 2), (64, 2, 2)]
# Heads and tokens a program, warps.
ROTATE_SHAPES = [(8, 4, 4), (8, 1, 4), (8, 2, 4), (8, 4, 8), (8, 8, 8), (4, 4, 4), (16, 4, 8), (4, 8, 4)]


class Bench:
    """Collects results, and knows when the time is up."""

    def __init__(self, budget_s: float, out: Path | None):
        self.deadline = time.monotonic() + budget_s
        self.out = out
        self.rows: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.details: dict[str, dict[str, Any]] = {}
        self.prefills: Table = {}  # the fastest kernels

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.deadline

    def try_variant(
        self, name: str, check: Callable[[], float] | None, run: list[Callable[[], Any]]
    ) -> float | None:
        """Microseconds of a variant; None when it fails, is wrong, or the time is up."""
        if self.is_over:
            return None
        try:
            if check is not None:
                error = check()
                if not error < MAX_ERROR:
                    self.problems.append(f"{name}: error {error:.1e}")
                    return None
            return time_us(run)
        except Exception as error:  # a shape that does not fit the chip is no reason to stop
            self.problems.append(f"{name}: {type(error).__name__}: {str(error)[:120]}")
            return None

    def add(self, name: str, ours: float | None, variants: dict[str, float], floor_us: float) -> None:
        """One line: the engine's choice beside the variants and the floor."""
        best = min(variants, key=variants.__getitem__) if variants else ""
        row = {"name": name, "us": ours, "floor_us": floor_us, "best": best, "best_us": variants.get(best)}
        self.rows.append(row)
        self.details[name] = variants
        print(format_row(row), flush=True)
        if self.out is not None:
            record = {"rows": self.rows, "variants": self.details, "problems": self.problems}
            self.out.write_text(json.dumps(record, indent=1))


def format_row(row: dict[str, Any]) -> str:
    def cell(microseconds: float | None) -> str:
        if not microseconds:
            return "- | -"
        return f"{microseconds:.1f} | {row['floor_us'] / microseconds:.0%}"

    return f"| {row['name']} | {cell(row['us'])} | {row['best']} | {cell(row['best_us'])} |"


def time_us(calls: list[Callable[[], Any]], repeats: int = 15) -> float:
    """Median microseconds of one of ``calls``, which are captured behind each other and replayed."""

    def run() -> None:
        for call in calls:
            call()

    graph = record_graph(run)
    return statistics.median(device_us(graph.replay) for _ in range(repeats)) / len(calls)


def compile_all(calls: list[Callable[[], Any]]) -> None:
    """Run every call once, so that kernels compile beside each other; what fails is told when it is timed."""

    def run(call: Callable[[], Any]) -> None:
        torch.cuda.set_device(0)  # gives the thread its context
        with contextlib.suppress(Exception):
            call()

    with ThreadPoolExecutor(NUM_COMPILERS) as pool:
        list(pool.map(run, calls))
    torch.cuda.synchronize()


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


class Pages(NamedTuple):
    """Caches of several layers, and sequences of any lengths in shuffled pages."""

    caches: list[tuple[torch.Tensor, torch.Tensor]]
    table: torch.Tensor
    lens: torch.Tensor

    def read(self, seq: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        pages = self.table[seq, : -(-length // PAGE)].long()
        return tuple(cache[pages].transpose(1, 2).flatten(0, 1)[:length] for cache in self.caches[0])


def make_pages(heads: Heads, lens: list[int], num_layers: int) -> Pages:
    width = -(-max(lens) // PAGE)
    num_pages = len(lens) * width + 8
    shape = (num_pages, heads.kv, PAGE, heads.dim)
    caches = [(random(*shape), random(*shape)) for _ in range(num_layers)]
    table = torch.randperm(num_pages, device="cuda")[: len(lens) * width].view(len(lens), width).int()
    return Pages(caches, table, torch.tensor(lens, dtype=torch.int32, device="cuda"))


# -- prefill attention


def bench_varlen(bench: Bench) -> None:
    torch.manual_seed(time.time_ns() % 2**31)
    for model, heads in MODELS.items():
        check_varlen(bench, model, heads)
        shapes = VARLEN_SHAPES
        for name, lens in PREFILLS.items():
            if bench.is_over:
                return
            times = time_varlen(bench, f"{model} {name}", heads, lens, shapes)
            # Later sizes take only what was not far behind.
            if times:
                bench.prefills.setdefault(PrefillLayer(heads.dim, heads.q // heads.kv), {})[max(lens)] = (
                    fastest(times)
                )
                limit = 1.3 * min(times.values())
                shapes = [shape for shape in shapes if times.get(shape, limit) < limit] or shapes


def fastest(times: dict[Choice, float]) -> Choice:
    """The first of ``times``, the engine's own choice, unless another one is clearly faster."""
    usual, best = next(iter(times)), min(times, key=times.__getitem__)
    return best if times[best] < MIN_GAIN * times[usual] else usual


def check_varlen(bench: Bench, model: str, heads: Heads) -> None:
    """A mixed step: whole prompts, chunks behind cached prefixes, decodes, padding; a window too."""
    query_lens, context_lens, padding = [300, 70, 200, 1, 1, 0], [300, 500, 1037, 400, 33, 0], 37
    pages = make_pages(heads, [max(1, n) for n in context_lens], 1)
    lens = torch.tensor(context_lens, dtype=torch.int32, device="cuda")
    cu_seqlens = torch.tensor([0, *query_lens], device="cuda").cumsum(0).int()
    num_tokens = sum(query_lens) + padding
    q, k, v = random(num_tokens, heads.q + 2 * heads.kv, heads.dim).split((heads.q, heads.kv, heads.kv), 1)
    for window in (None, 100):
        parts, start = [], 0
        for seq, (count, context) in enumerate(zip(query_lens, context_lens, strict=True)):
            if count:
                old_k, old_v = pages.read(seq, max(context - count, 1))
                own = slice(start, start + count)
                all_k = torch.cat((old_k[: context - count], k[own])).float()
                all_v = torch.cat((old_v[: context - count], v[own])).float()
                parts.append(attend(q[own].float(), all_k, all_v, scale=heads.dim**-0.5, window=window))
            start += count
        wanted = torch.cat((*parts, torch.zeros(padding, heads.q, heads.dim, device="cuda")))
        for shape in (None, TileShape(128, 64, 8, 3, False)):
            output = torch.full_like(wanted, float("nan"), dtype=q.dtype)
            try:
                varlen_attention(
                    q, k, v, *pages.caches[0], pages.table, None, cu_seqlens, lens, output,
                    scale=heads.dim**-0.5, window=window, shape=shape,
                )  # fmt: skip
                error = relative_error(output, wanted)
            except Exception as caught:
                bench.problems.append(f"varlen {model} {shape}: {type(caught).__name__}: {str(caught)[:120]}")
                continue
            if not error < MAX_ERROR:
                bench.problems.append(f"varlen {model} window {window} {shape}: error {error:.1e}")


def time_varlen(
    bench: Bench, name: str, heads: Heads, lens: list[int], shapes: list[TileShape]
) -> dict[Choice, float]:
    """Microseconds of the engine's choice, which comes first, and of others; without it nothing."""
    num_tokens, scale = sum(lens), heads.dim**-0.5
    qkvs = [random(num_tokens, heads.q + 2 * heads.kv, heads.dim) for _ in range(NUM_COPIES)]
    split = [qkv.split((heads.q, heads.kv, heads.kv), 1) for qkv in qkvs]
    cu_seqlens = torch.tensor([0, *lens], device="cuda").cumsum(0).int()
    context_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    pages = make_pages(heads, [PAGE], 1)
    table = pages.table.expand(len(lens), 1).contiguous()
    output = torch.empty(num_tokens, heads.q, heads.dim, dtype=torch.bfloat16, device="cuda")
    # The first, a middle and the last rows of the last prompt are checked: all of them would take as long as timing.
    q, k, v = (part[-lens[-1] :].float() for part in split[0])
    probes = [1, lens[-1] // 2 + 3, lens[-1]]
    wanted = torch.cat([attend(q[n - 1 : n], k[:n], v[:n], scale=scale) for n in probes])
    rows = [num_tokens - lens[-1] + n - 1 for n in probes]

    def call(index: int, shape: TileShape, tiles: torch.Tensor) -> None:
        varlen_attention(
            *split[index], *pages.caches[0], table, None, cu_seqlens, context_lens, output,
            scale=scale, shape=shape, tiles=tiles,
        )  # fmt: skip

    def measure(shape: TileShape) -> float | None:
        tiles = plan_tiles(cu_seqlens, context_lens, num_tokens, shape.tokens(heads.q // heads.kv))

        def check() -> float:
            output.fill_(float("nan"))
            call(0, shape, tiles)
            return relative_error(output[rows], wanted) + float(output.isnan().any())

        calls = [lambda i=i: call(i, shape, tiles) for i in range(NUM_COPIES)]
        return bench.try_variant(f"varlen {name} {tuple(shape)}", check, calls)

    def first_call(shape: TileShape) -> None:
        tiles = plan_tiles(cu_seqlens, context_lens, num_tokens, shape.tokens(heads.q // heads.kv))
        call(0, shape, tiles)

    usual = layer_tile_shape(*split[0], *pages.caches[0])
    shapes = list(dict.fromkeys([usual, *shapes]))
    compile_all([lambda shape=shape: first_call(shape) for shape in shapes])
    times: dict[Choice, float | None] = {shape: measure(shape) for shape in shapes}
    times[TORCH] = time_flash(bench, name, split, output, cu_seqlens, max(lens), scale, rows, wanted)
    found = {choice: value for choice, value in times.items() if value is not None}
    flops = sum(2 * heads.q * heads.dim * n * (n + 1) for n in lens)
    labels = {choice if choice == TORCH else str(tuple(choice)): us for choice, us in found.items()}
    bench.add(f"varlen {name}", times[usual], labels, flops / H200.matmul_tflop_s / 1e6)
    return found if usual in found else {}


def time_flash(
    bench: Bench, name: str, split: list, output: torch.Tensor, cu_seqlens: torch.Tensor, longest: int, scale: float,
    rows: list[int], wanted: torch.Tensor,
) -> float | None:  # fmt: skip
    """PyTorch's own kernel on the same data, and the copy to where the engine wants it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        bench.problems.append(f"torch varlen: {error}")
        return None
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0), "enable_gqa": True, "is_causal": True}
    options = {key: value for key, value in options.items() if key in varlen_parameters()}
    if "window_size" in options:
        options.pop("is_causal", None)

    def call(index: int) -> torch.Tensor:
        return output.copy_(varlen_attn(*split[index], cu_seqlens, cu_seqlens, longest, longest, **options))

    def check() -> float:
        return relative_error(call(0)[rows], wanted)

    return bench.try_variant(f"torch varlen {name}", check, [lambda i=i: call(i) for i in range(NUM_COPIES)])


# -- decode attention


def bench_decode(bench: Bench) -> None:
    for batch in (8, 1):  # whose attention no other kernel serves
        time_decode(bench, f"decode Gemma 3 1B {batch} x {DECODE_CONTEXT}", GEMMA, batch)
    for model in ("8B", "0.6B", "1B"):
        for batch in (64, 256, 8):
            if not bench.is_over:
                time_decode(bench, f"decode {model} {batch} x {DECODE_CONTEXT}", MODELS[model], batch)


def time_decode(bench: Bench, name: str, heads: Heads, batch: int) -> None:
    num_layers = 2 if batch > 8 else 8
    pages = make_pages(heads, [DECODE_CONTEXT] * batch, num_layers)
    q = random(batch, heads.q, heads.dim)
    output = torch.empty_like(q)
    arrivals = torch.zeros(batch * heads.kv, dtype=torch.int32, device=q.device)
    scale = heads.dim**-0.5
    probes = [0, batch - 1]
    wanted = torch.cat(
        [attend(q[i : i + 1].float(), *pages.read(i, DECODE_CONTEXT), scale=scale) for i in probes]
    )

    def call(index: int, shape: DecodeShape) -> None:
        decode_attention(
            q, *pages.caches[index], pages.table, None, pages.lens, output, arrivals, scale=scale, shape=shape
        )

    def measure(shape: DecodeShape) -> float | None:
        def check() -> float:
            output.fill_(float("nan"))
            call(0, shape)
            return relative_error(output[probes], wanted) + float(output.isnan().any() | arrivals.any())

        calls = [lambda i=i: call(i, shape) for i in range(num_layers)] * (8 // num_layers)
        return bench.try_variant(f"{name} {tuple(shape)}", check, calls)

    counts = (1, 2) if batch >= 64 else (4, 8, 16)
    shapes = [DecodeShape(count, *rest) for count in counts for rest in DECODE_SHAPES]
    compile_all([lambda shape=shape: call(0, shape) for shape in shapes])
    times = {str(tuple(shape)): measure(shape) for shape in shapes}
    found = {key: value for key, value in times.items() if value is not None}
    num_bytes = batch * DECODE_CONTEXT * heads.kv * heads.dim * 4
    ours = measure(decode_shape(batch, heads.kv, heads.dim * 2))
    bench.add(name, ours, found, num_bytes / H200.read_gb_s / 1e3)


# -- norms, rotation, activation


def bench_fused(bench: Bench) -> None:
    for model in MODELS:
        if not bench.is_over:
            time_rotation(bench, model)
            time_rows(bench, model)
            for num_tokens in HEAD_TOKENS:
                time_heads(bench, model, num_tokens)


def time_rotation(bench: Bench, model: str) -> None:
    heads = MODELS[model]
    total, num_turned = heads.q + 2 * heads.kv, heads.q + heads.kv
    slots = torch.randperm(NUM_ROWS, device="cuda")
    qkvs = [random(NUM_ROWS, total, heads.dim) for _ in range(NUM_COPIES)]
    cos, sin = (random(NUM_ROWS, 1, heads.dim) for _ in range(2))
    weight = random(num_turned, heads.dim, dtype=torch.float32)
    cache = [random(NUM_ROWS // PAGE, heads.kv, PAGE, heads.dim) for _ in range(2)]

    def call(qkv: torch.Tensor, shape: tuple[int, int, int]) -> None:
        num_heads, num_tokens, num_warps = shape
        rotate_and_write(
            qkv, heads.q, cos, sin, weight, 1e-6, *cache, slots,
            heads_per_program=num_heads, tokens_per_program=num_tokens, num_warps=num_warps,
        )  # fmt: skip

    def measure(shape: tuple[int, int, int]) -> float | None:
        def check() -> float:
            qkv = qkvs[0].clone()
            turned = rotary.rotary(norm.rms_norm(qkv[:, :num_turned], weight, 1e-6), cos, sin)
            wanted = torch.cat((turned, qkv[:, num_turned:]), 1)
            for part in cache:
                part.fill_(float("nan"))
            call(qkv, shape)
            stored = [part.transpose(1, 2).flatten(0, 1)[slots] for part in cache]
            return relative_error(qkv, wanted) + relative_error(torch.cat(stored, 1), wanted[:, heads.q :])

        calls = [lambda qkv=qkv: call(qkv, shape) for qkv in qkvs]
        return bench.try_variant(f"rotate {model} {shape}", check, calls)

    times = {str(shape): measure(shape) for shape in ROTATE_SHAPES}
    found = {key: value for key, value in times.items() if value is not None}
    # All is read; turned heads are written back, and keys and values to the cache.
    num_bytes = 2 * NUM_ROWS * heads.dim * (total + num_turned + 2 * heads.kv)
    ours = found.get(str((HEADS_PER_PROGRAM, 4, 4)))
    bench.add(f"rotate {model}", ours, found, num_bytes / H200.read_gb_s / 1e3)


def time_heads(bench: Bench, model: str, num_tokens: int) -> None:
    """Query, key and value heads of a step in one launch, beside the product by cuBLAS and a pass for the rest."""
    heads, hidden = MODELS[model], HIDDEN[model][0]
    total, num_turned = heads.q + 2 * heads.kv, heads.q + heads.kv
    xs = [random(num_tokens, hidden) for _ in range(NUM_COPIES)]
    weights = [random(total * heads.dim, hidden) / hidden**0.5 for _ in range(NUM_COPIES)]
    angles = 6 * torch.rand(num_tokens, 1, heads.dim // 2, device="cuda")
    cos = torch.cat((angles.cos(), angles.cos()), -1).bfloat16()
    sin = torch.cat((-angles.sin(), angles.sin()), -1).bfloat16()
    factors = random(num_turned, heads.dim, dtype=torch.float32) if model == "0.6B" else None
    cache = [random(num_tokens // PAGE, heads.kv, PAGE, heads.dim) for _ in range(2)]
    slots = torch.randperm(num_tokens, device="cuda")
    arguments = (heads.q, cos, sin, factors, 1e-6, *cache, slots)
    output = torch.empty(num_tokens, total, heads.dim, dtype=torch.bfloat16, device="cuda")

    def in_one(index: int) -> torch.Tensor:
        head_projection.launch(xs[index], weights[index], output, *arguments)
        return output

    def in_two(index: int) -> None:
        qkv = F.linear(xs[index], weights[index]).view(num_tokens, total, heads.dim)
        rotate_and_write(qkv, *arguments)

    def check() -> float:
        wide = (xs[0].float() @ weights[0].float().t()).view(num_tokens, total, heads.dim)
        turned = (
            wide[:, :num_turned] if factors is None else norm.rms_norm(wide[:, :num_turned], factors, 1e-6)
        )
        turned = rotary.rotary(turned, cos.float(), sin.float())
        return relative_error(in_one(0), torch.cat((turned, wide[:, num_turned:]), 1))

    name, indices = f"heads {model} {num_tokens}", range(NUM_COPIES)
    ours = bench.try_variant(name, check, [lambda i=i: in_one(i) for i in indices])
    others = bench.try_variant(f"{name} cuBLAS", None, [lambda i=i: in_two(i) for i in indices])
    flops = 2 * num_tokens * total * heads.dim * hidden
    found = {} if others is None else {"cuBLAS and a pass": others}
    bench.add(name, ours, found, flops / H200.matmul_tflop_s / 1e6)


def time_rows(bench: Bench, model: str) -> None:
    num_tokens = NUM_ROWS
    hidden, inner = HIDDEN[model]
    xs = [random(num_tokens, hidden) for _ in range(NUM_COPIES)]
    weight = random(hidden, dtype=torch.float32)

    def check_norm() -> float:
        return relative_error(elementwise.rms_norm(xs[0], weight, 1e-6), norm.rms_norm(xs[0], weight, 1e-6))

    calls = [lambda x=x: elementwise.rms_norm(x, weight, 1e-6) for x in xs]
    ours = bench.try_variant(f"rms_norm {model}", check_norm, calls)
    bench.add(f"rms_norm {model}", ours, {}, 4 * num_tokens * hidden / H200.read_gb_s / 1e3)
    gates = [random(num_tokens, 2 * inner) for _ in range(2)]

    def check_gate() -> float:
        return relative_error(elementwise.silu_and_mul(gates[0]), activation.silu_and_mul(gates[0]))

    calls = [lambda gate=gate: elementwise.silu_and_mul(gate) for gate in gates]
    ours = bench.try_variant(f"silu_and_mul {model}", check_gate, calls)
    bench.add(f"silu_and_mul {model}", ours, {}, 6 * num_tokens * inner / H200.read_gb_s / 1e3)


SHARES = {"varlen": 3, "decode": 2, "fused": 1, "sampling": 1, "gated": 2, "batch": 2}  # of the budget
PARTS = {
    "varlen": bench_varlen,
    "decode": bench_decode,
    "fused": bench_fused,
    "sampling": bench_sampling,
    "gated": bench_gated,
    "batch": bench_batch,
}


@torch.inference_mode()
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="atom.benchmarks.gpu_kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument(
        "--budget", type=float, default=180.0, help="Seconds in all; the parts have shares of it."
    )
    parser.add_argument("--json", type=Path, help="Write all variants there.")
    parser.add_argument(
        "--keep", action="store_true", help="Let engines of this machine take the fastest of varlen."
    )
    args = parser.parse_args(argv)
    if args.keep and "varlen" not in args.parts:
        parser.error("--keep needs varlen among --parts")
    bench = Bench(args.budget, args.json)
    began = time.monotonic()
    shares = sum(SHARES[part] for part in args.parts)
    for number, part in enumerate(args.parts, 1):
        bench.deadline = began + args.budget * sum(SHARES[done] for done in args.parts[:number]) / shares
        try:
            PARTS[part](bench)
        except Exception as error:  # the other parts are still of use
            bench.problems.append(f"{part}: {type(error).__name__}: {str(error)[:300]}")
        torch.cuda.empty_cache()
    for problem in bench.problems:
        print(problem)
    print("\n| kernel | ours (us) | of the limit | best variant | us | of the limit |\n" + "|---" * 6 + "|")
    for row in bench.rows:
        print(format_row(row))
    if args.keep and bench.prefills:
        print("kept in", save_table(get_platform("cuda").describe()["architecture"], bench.prefills))
    return int(not bench.rows)


if __name__ == "__main__":
    sys.exit(main())
