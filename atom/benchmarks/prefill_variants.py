"""Prefill attention kernels on an H200, beside each other: checked against fp32 on fresh random data, then timed.

    python -m atom.benchmarks.prefill_variants [--variants gluon portable] [--limit 100]

Every kernel runs in a child process, one after the other, so that one that hangs is killed and the others go on; the
children compile side by side before. Queries, keys and values are views of one packed projection, as the engine has
them. "hot" is the same kernel between matrix products, at the clocks that a long step leaves it. Microseconds; the
last table has each case's share of the H200's matrix throughput too.
"""

from __future__ import annotations

import argparse
import json
import random as host_random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from atom.benchmarks.gpu_roofline import H200

VARIANTS = ("gluon", "portable")
MAX_ERROR = 1e-2  # ||found - wanted|| / ||wanted|| of one sequence
CHECKED = [
    (128, 1),
    (128, 2),
    (128, 4),
    (128, 8),
    (64, 4),
    (64, 8),
]  # head dimension, query heads of a kv head
NUM_HOT = 30


class Case(NamedTuple):
    """A step to time: prompts' lengths, each behind ``prefix`` cached tokens."""

    model: str
    lens: tuple[int, ...]
    prefix: int = 0
    is_hot: bool = False

    @property
    def name(self) -> str:
        size = f"{len(self.lens)}x{self.lens[0]}" + (f"+{self.prefix}" if self.prefix else "")
        return f"{self.model} {size}" + (" hot" if self.is_hot else "")


CASES = [Case(model, lens) for model in ("0.6B", "1B", "8B") for lens in ((2048,), (8192,), (1024,) * 16)] + [
    Case("8B", (4096,), 4096),
    Case("8B", (8192,), 0, True),
    Case("0.6B", (8192,), 0, True),
]


def shapes_of(variant: str) -> list[Any]:
    """Tile shapes to try, the engine's first."""
    from atom.benchmarks.gpu_kernels import VARLEN_SHAPES
    from atom.kernels.triton.varlen_attention import HOPPER_SHAPE

    return VARLEN_SHAPES if variant == "portable" else [HOPPER_SHAPE]


# -- the child: one variant


class Step:
    """Random sequences: packed projections, a paged cache with what came before, and the attention's arguments."""

    def __init__(
        self, heads: Any, query_lens: list[int], context_lens: list[int], padding: int, copies: int = 1
    ):
        import torch

        from atom.benchmarks.gpu_kernels import make_pages, random

        self.heads, self.query_lens, self.context_lens = heads, query_lens, context_lens
        self.num_tokens = sum(query_lens) + padding
        width = heads.q + 2 * heads.kv
        self.split = [
            random(self.num_tokens, width, heads.dim).split((heads.q, heads.kv, heads.kv), 1)
            for _ in range(copies)
        ]
        self.pages = make_pages(heads, [max(1, n) for n in context_lens], 1)
        self.lens = torch.tensor(context_lens, dtype=torch.int32, device="cuda")
        self.cu_seqlens = torch.tensor([0, *query_lens], device="cuda").cumsum(0).int()
        self.output = torch.full_like(self.split[0][0], float("nan"), memory_format=torch.contiguous_format)
        self.scale = heads.dim**-0.5

    def plan(self, shape: Any) -> Any:
        from atom.kernels.triton.varlen_attention import plan_tiles

        tokens = shape.tokens(self.heads.q // self.heads.kv)
        return plan_tiles(self.cu_seqlens, self.lens, self.num_tokens, tokens)

    def run(self, shape: Any, tiles: Any, copy: int = 0) -> None:
        from atom.kernels.triton.varlen_attention import varlen_attention

        varlen_attention(
            *self.split[copy], *self.pages.caches[0], self.pages.table, None, self.cu_seqlens, self.lens, self.output,
            scale=self.scale, shape=shape, tiles=tiles,
        )  # fmt: skip

    def wanted(self, seq: int, probes: list[int] | None = None) -> tuple[Any, Any]:
        """(rows of the output, their fp32 attention) of a sequence's tokens; ``probes``: of these only."""
        import torch

        from atom.kernels.reference.attention import attend

        start, count, context = sum(self.query_lens[:seq]), self.query_lens[seq], self.context_lens[seq]
        old = [part[: context - count] for part in self.pages.read(seq, max(context - count, 1))]
        q, k, v = (part[start : start + count].float() for part in self.split[0])
        all_k, all_v = torch.cat((old[0].float(), k)), torch.cat((old[1].float(), v))
        if probes is None:
            return slice(start, start + count), attend(q, all_k, all_v, scale=self.scale)
        before = context - count
        parts = [
            attend(q[n : n + 1], all_k[: before + n + 1], all_v[: before + n + 1], scale=self.scale)
            for n in probes
        ]
        return [start + n for n in probes], torch.cat(parts)


def mixed_step(dim: int, group: int) -> Step:
    """Whole prompts, chunks behind prefixes, decodes, sequences of padding, tokens of padding."""
    from atom.benchmarks.gpu_kernels import Heads

    any_len = host_random.Random(time.time_ns()).randint
    pairs = [
        (any_len(200, 400), 0),
        (any_len(60, 130), any_len(1, 700)),
        (any_len(130, 300), 128 * any_len(1, 4)),
    ]
    pairs += [(1, any_len(0, 600)), (128, 0), (any_len(2, 40), any_len(1, 15)), (257, 129), (1, 16)]
    query_lens, prefixes = (list(part) for part in zip(*pairs, strict=True))
    context_lens = [q + p for q, p in pairs]
    # A request of a recorded step that is not there, and room for one.
    return Step(Heads(4 * group, 4, dim), [*query_lens, 1, 0], [*context_lens, 0, 0], 37)


def check(shape: Any, dim: int, group: int) -> float:
    """The largest error of a sequence of a mixed step; NaN and padding that is not zero count as infinite."""
    import torch

    from atom.benchmarks.gpu_measure import relative_error

    step = mixed_step(dim, group)
    worst = 0.0
    tiles = step.plan(shape)
    for _ in range(2):
        step.output.fill_(float("nan"))
        step.run(shape, tiles)
        torch.cuda.synchronize()
        for seq, context in enumerate(step.context_lens):
            if context:
                rows, wanted = step.wanted(seq)
                error = relative_error(step.output[rows], wanted)
                worst = max(worst, error if error == error else float("inf"))
        behind = step.output[sum(step.query_lens[:-2]) :]
        if behind.any() or behind.isnan().any():
            return float("inf")
    return worst


def make_case(case: Case) -> Step:
    from atom.benchmarks.gpu_kernels import MODELS, NUM_COPIES

    lens = list(case.lens)
    return Step(MODELS[case.model], lens, [n + case.prefix for n in lens], 0, NUM_COPIES)


def time_case(case: Case, step: Step, shape: Any) -> tuple[float, float]:
    """(microseconds, error at a few rows of the first and the last sequence)."""
    import torch

    from atom.benchmarks.gpu_kernels import random, time_us
    from atom.benchmarks.gpu_measure import relative_error

    tiles = step.plan(shape)
    step.output.fill_(float("nan"))
    step.run(shape, tiles)
    error = float("inf") if step.output.isnan().any() else 0.0
    for seq in {0, len(case.lens) - 1}:
        count = case.lens[seq]
        rows, wanted = step.wanted(seq, [0, 63, 64, count // 2 + 3, count - 1])
        error = max(error, relative_error(step.output[rows], wanted))
    calls = [lambda copy=copy: step.run(shape, tiles, copy) for copy in range(len(step.split))]
    if not case.is_hot:
        return time_us(calls), error
    left, right = random(8192, 8192), random(8192, 8192)
    events = []
    for index in range(NUM_HOT):
        for _ in range(3):
            left @ right
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        calls[index % len(calls)]()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(b.elapsed_time(e) * 1e3 for b, e in events[NUM_HOT // 2 :]), error


def compile_variant(variant: str) -> None:
    """Compile what the checks and the timings launch; nothing runs."""
    from atom.benchmarks.gpu_kernels import MODELS
    from atom.kernels.triton.compile_ahead import KernelCompilation, missing_kernels, recording

    shapes = shapes_of(variant)

    with recording() as recorder:
        for dim, group in CHECKED:
            step = mixed_step(dim, group)
            step.run(shapes[0], step.plan(shapes[0]))
        for heads in MODELS.values():
            step = Step(heads, [256], [256], 0)
            for shape in shapes:
                step.run(shape, step.plan(shape))
    with KernelCompilation(missing_kernels(list(recorder.launches.values()))) as compilation:
        compilation.wait()


def run_child(variant: str) -> Iterator[dict[str, Any]]:
    """Results, one a check or a timing; waits for a line on stdin between compiling and running."""
    import torch

    with torch.inference_mode():
        compile_variant(variant)
        sys.stdin.readline()
        shapes = shapes_of(variant)
        for dim, group in CHECKED:
            yield attempt(
                {"check": f"{dim}/{group}"}, lambda d=dim, g=group: {"error": check(shapes[0], d, g)}
            )
        for case in CASES:
            step = make_case(case)
            for shape in shapes:
                label = f"{variant} {'x'.join(map(str, shape[:4]))}"
                yield attempt(
                    {"case": case.name, "label": label},
                    lambda c=case, s=step, sh=shape: dict(
                        zip(("us", "error"), time_case(c, s, sh), strict=True)
                    ),
                )
            del step


def attempt(facts: dict[str, Any], call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return facts | call()
    except Exception as error:  # the other cases are still of use
        return facts | {"problem": f"{type(error).__name__}: {str(error)[:200]}"}


# -- the parent


def start_child(variant: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "atom.benchmarks.prefill_variants", "--child", variant]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def collect(variant: str, child: subprocess.Popen[str], limit_s: float) -> list[dict[str, Any]]:
    """What a child found within ``limit_s`` seconds; then it is killed."""
    try:
        found, errors = child.communicate("go\n", timeout=limit_s)
    except subprocess.TimeoutExpired:
        child.kill()
        found, errors = child.communicate()
        errors = f"killed after {limit_s:.0f} s, perhaps it hangs\n{errors[-300:]}"
    results = [json.loads(line) for line in found.splitlines() if line.startswith("{")]
    if child.returncode:
        results.append({"problem": f"{variant}: exit {child.returncode}: {errors[-600:]}"})
    return results


def print_results(results: dict[str, list[dict[str, Any]]]) -> None:
    times: dict[str, dict[str, float]] = {}
    labels: list[str] = []
    for variant, rows in results.items():
        errors = {row["check"]: row["error"] for row in rows if "check" in row and "error" in row}
        is_right = len(errors) == len(CHECKED) and max(errors.values()) < MAX_ERROR
        print(f"{variant}: {'right' if is_right else 'WRONG'}", {k: f"{v:.1e}" for k, v in errors.items()})
        for row in rows:
            if "problem" in row:
                print(f"  {variant}: {row}")
            elif "case" in row:
                mark = "" if row["error"] < MAX_ERROR else " WRONG"
                if mark:
                    print(f"  {variant}: {row}")
                label = row["label"] + mark
                labels += [label] if label not in labels else []
                times.setdefault(row["case"], {})[label] = row["us"]
    print("\n| us | " + " | ".join(labels) + " | best, of the limit |\n" + "|---" * (len(labels) + 2) + "|")
    for case in CASES:
        found = times.get(case.name)
        if found:
            cells = [f"{found[label]:.0f}" if label in found else "-" for label in labels]
            best = min((value for label, value in found.items() if "WRONG" not in label), default=None)
            share = f"{flops(case) / best / 1e6:.0f} TFLOP/s, {floor_us(case) / best:.0%}" if best else "-"
            print(f"| {case.name} | " + " | ".join(cells) + f" | {share} |")


def flops(case: Case) -> float:
    num_heads, dim = {"0.6B": (16, 128), "1B": (32, 64), "8B": (32, 128)}[case.model]
    return sum(4 * num_heads * dim * (n * case.prefix + n * (n + 1) / 2) for n in case.lens)


def floor_us(case: Case) -> float:
    return flops(case) / H200.matmul_tflop_s / 1e6


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="atom.benchmarks.prefill_variants", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--limit", type=float, default=100.0, help="Seconds in all.")
    parser.add_argument("--child", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        for result in run_child(args.child):
            print(json.dumps(result), flush=True)
        return 0
    deadline = time.monotonic() + args.limit
    children = {variant: start_child(variant) for variant in args.variants}
    results: dict[str, list[dict[str, Any]]] = {}
    try:
        for index, (variant, child) in enumerate(children.items()):
            # The first waits for the compiler too; what it leaves of its share is the others'.
            left = max(deadline - time.monotonic(), 1.0)
            share = left / (len(children) - index) * (1.6 if index == 0 and len(children) > 1 else 1.0)
            results[variant] = collect(variant, child, share)
    finally:
        for child in children.values():
            if child.poll() is None:
                child.kill()
    print_results(results)
    return int(not any("case" in row for rows in results.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
