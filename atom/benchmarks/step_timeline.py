"""Where the device waits for the host in a step: ``python -m atom.benchmarks.step_timeline [--model qwen3-0.6b]``.

Runs prompts and decode steps through an engine core in this process, under torch's profiler. For each prompt workload
it prints the wall time, the time before the first and behind the last kernel, the kernels' own time, and the longest
gaps between kernels with the names on both sides; for decode steps of 1, 8 and 64 sequences the wall time of a step
without the profiler, and with it the time of a recorded step and of what lies between two: the median gap, the longest
ones with the names around them, and the copies. Weights are random, of the model's real shapes.

    python -m atom.benchmarks.step_timeline --kind decode --level 0 [--batches 1 8 64]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from atom.benchmarks.level_suite import MODELS
from atom.errors import ConfigError
from atom.platforms import get_platform

WORKLOADS = ((1, 2048), (1, 8192), (16, 1024))  # prompts, tokens of each
BATCHES = (1, 8, 64)  # sequences that decode
DECODE_PROMPT, DECODE_STEPS = 128, 200  # tokens of each prompt; steps that are timed without the profiler
DECODE_WARM_UP, PROFILED_STEPS = 8, 20
REPEATS = 7
NUM_GAPS = 12
NUM_STEP_GAPS = 3
KV_BYTES = 16 << 30


class Span(NamedTuple):
    """A kernel or a copy on the device: nanoseconds, and its name."""

    start: int
    end: int
    name: str
    launch: int = 0  # what the host launched: all kernels of a recorded graph have the same number


@dataclass(slots=True)
class Timeline:
    """What the device did between two moments, in microseconds."""

    before: float  # from the first operation on the host to the first kernel
    busy: float
    behind: float  # from the last kernel to the last operation on the host
    gaps: list[tuple[float, float, str, str]] = field(default_factory=list)  # length, place, names around it

    @property
    def idle(self) -> float:
        """Between kernels."""
        return sum(gap[0] for gap in self.gaps)


def timeline(spans: Iterable[Span], host_start: int, host_end: int) -> Timeline:
    """Spans may overlap: kernels with dependent launch do. Raises ValueError where there are none."""
    ordered = sorted(spans)
    if not ordered:
        raise ValueError("spans must hold at least 1 kernel, got 0")
    first, end, last = ordered[0].start, ordered[0].end, ordered[0].name
    busy, gaps = end - first, []
    for span in ordered[1:]:
        if span.start > end:
            gaps.append(((span.start - end) / 1e3, (end - first) / 1e3, last, span.name))
        busy += max(0, span.end - max(span.start, end))
        if span.end > end:
            end, last = span.end, span.name
    return Timeline(
        (first - host_start) / 1e3, busy / 1e3, (host_end - end) / 1e3, sorted(gaps, reverse=True)
    )


@dataclass(slots=True)
class StepGap:
    """What lies between two recorded steps."""

    length: float  # microseconds from the last kernel of one to the first of the other
    names: list[str]  # that kernel, whatever else ran in between, and the first one


@dataclass(slots=True)
class DecodeTimeline:
    """Recorded decode steps, in microseconds."""

    steps: list[float]  # each from its first kernel to its last
    busy: list[float]  # of each, in which a kernel ran
    gaps: list[StepGap]
    others: dict[str, list[float]]  # lengths of what ran outside of the steps, by name

    @property
    def longest(self) -> list[StepGap]:
        return sorted(self.gaps, key=lambda gap: -gap.length)


def decode_timeline(spans: Iterable[Span]) -> DecodeTimeline:
    """A recorded step is a launch of several kernels; kernels may overlap. Raises ValueError for fewer than 2."""
    launches: dict[int, list[Span]] = {}
    for span in sorted(spans):
        launches.setdefault(span.launch, []).append(span)
    steps = [kernels for kernels in launches.values() if len(kernels) > 1]
    if len(steps) < 2:
        raise ValueError(f"spans must hold at least 2 recorded steps, got {len(steps)}")
    single = [kernels[0] for kernels in launches.values() if len(kernels) == 1]
    others: dict[str, list[float]] = {}
    for span in single:
        others.setdefault(span.name, []).append((span.end - span.start) / 1e3)
    found = DecodeTimeline([], [], [], others)
    before: Span | None = None  # the kernel of the step before that ended last
    for kernels in steps:
        first, last = kernels[0], max(kernels, key=lambda span: span.end)
        if before is not None:
            inside = [span.name for span in single if before.start < span.start < first.start]
            found.gaps.append(StepGap((first.start - before.end) / 1e3, [before.name, *inside, first.name]))
        found.steps.append((last.end - first.start) / 1e3)
        found.busy.append(timeline(kernels, first.start, last.end).busy)
        before = last
    return found


class Prompts:
    """Random prompts for an engine core."""

    def __init__(self, core: Any, vocab_size: int):
        self._core = core
        self._vocab_size = vocab_size
        self._count = 0

    def run(self, count: int, length: int) -> None:
        """Compute ``count`` prompts of ``length`` tokens, and wait for the one token of each."""
        self.begin(count, length, 1)
        self.finish()

    def step(self, count: int) -> float:
        """Milliseconds that ``count`` further steps take."""
        began = time.perf_counter()
        for _ in range(count):
            self._core.step()
        return (time.perf_counter() - began) * 1e3

    def step_until_all_decode(self) -> None:
        """Step until no prompt is left to be computed."""
        while True:
            self._core.step()
            stats = self._core.stats()
            if not stats["requests_waiting"] + stats["requests_partial_prefill"]:
                return

    def finish(self) -> None:
        """Step until every answer is there."""
        while self._core.has_work:
            self._core.step()

    def begin(self, count: int, length: int, new_tokens: int) -> None:
        """Hand over ``count`` prompts of ``length`` tokens, to be answered with ``new_tokens``."""
        import numpy as np

        from atom.model_engine.messages import AddRequests, NewRequest
        from atom.sampling_params import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        requests = []
        for _ in range(count):
            self._count += 1
            ids = np.random.default_rng(self._count).integers(0, self._vocab_size, length)
            packed = ids.astype(np.int32).tobytes()
            requests.append(
                NewRequest(self._count, packed, params, [], new_tokens, time.monotonic(), hash_seed=1)
            )
        self._core.handle(AddRequests(requests, [None] * count))


def profiled(run: Callable[[], object]) -> tuple[list[Span], list[Span]]:
    """What the device did in ``run()``, and what the host did."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        run()
        torch.cuda.synchronize()
    spans, host = [], []
    for event in profiler.profiler.kineto_results.events():
        end = event.start_ns() + event.duration_ns()
        span = Span(event.start_ns(), end, event.name(), event.correlation_id())
        (host if str(event.device_type()).endswith("CPU") else spans).append(span)
    return spans, host


def profiled_prompts(prompts: Prompts, count: int, length: int) -> Timeline:
    spans, host = profiled(lambda: prompts.run(count, length))
    return timeline(spans, min(span.start for span in host), max(span.end for span in host))


def profiled_decode(prompts: Prompts, count: int) -> tuple[float, DecodeTimeline]:
    """Milliseconds of a step of ``count`` sequences without the profiler, and what the device did in some under it."""
    prompts.begin(count, DECODE_PROMPT, count + DECODE_WARM_UP + DECODE_STEPS + PROFILED_STEPS)
    prompts.step_until_all_decode()
    prompts.step(DECODE_WARM_UP)
    wall = prompts.step(DECODE_STEPS) / DECODE_STEPS
    spans, _ = profiled(lambda: prompts.step(PROFILED_STEPS))
    prompts.finish()
    return wall, decode_timeline(spans)


def report(name: str, walls: list[float], found: Timeline) -> str:
    """Lines of text; ``walls`` in milliseconds are of runs without the profiler."""
    lines = [
        f"{name}: {statistics.median(walls):.2f} ms (of {len(walls)}: {min(walls):.2f} to {max(walls):.2f}); profiled: "
        f"{found.before:.0f} us before the first kernel, {found.busy:.0f} busy, {found.idle:.0f} in "
        f"{len(found.gaps)} gaps, {found.behind:.0f} behind the last"
    ]
    for length, place, left, right in found.gaps[:NUM_GAPS]:
        lines.append(f"  {length:8.1f} us at {place:9.0f}  {left[:50]} -> {right[:50]}")
    return "\n".join(lines)


def report_decode(name: str, wall: float, found: DecodeTimeline) -> str:
    """Lines of text; ``wall`` in milliseconds is a step's mean without the profiler."""
    gap = statistics.median(gap.length for gap in found.gaps)
    lines = [
        f"{name}: {wall:.4f} ms a step; profiled: a recorded step {statistics.median(found.steps):.1f} us, kernels "
        f"{statistics.median(found.busy):.1f} of them; between two {gap:.1f} us (median of {len(found.gaps)})"
    ]
    for one in found.longest[:NUM_STEP_GAPS]:
        lines.append(f"  {one.length:8.1f} us  {' -> '.join(part[:36] for part in one.names)}")
    for other, lengths in sorted(found.others.items()):
        lines.append(f"  {len(lengths):4d} x {statistics.median(lengths):.1f} us  {other[:60]}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(p.name for p in MODELS.iterdir()))
    parser.add_argument("--level", type=int, default=3, help="decode steps are recorded at 0 too")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--kind", choices=("prompts", "decode", "both"), default="both")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help="sequences that decode")
    args = parser.parse_args(argv)
    try:
        get_platform("cuda")
    except ConfigError as error:
        print(f"step_timeline needs a GPU: {error}", file=sys.stderr)
        return 2
    from atom.config import Config
    from atom.model_engine.engine_core import EngineCore

    compilation = {"level": args.level, "cudagraph_mode": "FULL" if args.level else "FULL_DECODE_ONLY"}
    if args.kind == "decode":
        compilation |= {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": tuple(args.batches)}
    config = Config.build(
        str(MODELS / args.model),
        device="cuda",
        load_dummy="xavier",
        max_model_len=9216,
        max_num_seqs=max(*args.batches, max(count for count, _ in WORKLOADS)),
        kv_cache_memory=KV_BYTES,
        enable_prefix_caching=False,
        compilation_config=compilation,
    )
    core = EngineCore(config, lambda message: None)
    core.start(lambda phase, fraction: None)
    prompts = Prompts(core, core.worker.hf_config.vocab_size)
    for count, length in WORKLOADS if args.kind != "decode" else ():
        prompts.run(count, length)
        walls = []
        for _ in range(args.repeats):
            began = time.perf_counter()
            prompts.run(count, length)
            walls.append((time.perf_counter() - began) * 1e3)
        found = profiled_prompts(prompts, count, length)
        print(report(f"{args.model} {count} x {length}", walls, found), flush=True)
    for count in args.batches if args.kind != "prompts" else ():
        print(report_decode(f"{args.model} decode {count}", *profiled_decode(prompts, count)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
