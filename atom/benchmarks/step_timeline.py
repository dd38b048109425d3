"""Where the device waits for the host in a step: ``python -m atom.benchmarks.step_timeline [--model qwen3-0.6b]``.

Runs prompts and decode steps through an engine core in this process, under torch's profiler, and prints for each
workload the wall time, the time before the first and behind the last kernel, the kernels' own time, and the longest
gaps between kernels with the names on both sides. Weights are random, of the model's real shapes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from atom.benchmarks.level_suite import MODELS
from atom.errors import ConfigError
from atom.platforms import get_platform

WORKLOADS = ((1, 2048), (1, 8192), (16, 1024))  # prompts, tokens of each
REPEATS = 7
NUM_GAPS = 12
KV_BYTES = 16 << 30


class Span(NamedTuple):
    """A kernel or a copy on the device: nanoseconds, and its name."""

    start: int
    end: int
    name: str


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


class Prompts:
    """Random prompts for an engine core, each answered with one token."""

    def __init__(self, core: Any, vocab_size: int):
        self._core = core
        self._vocab_size = vocab_size
        self._count = 0

    def run(self, count: int, length: int) -> None:
        """Compute ``count`` prompts of ``length`` tokens, and wait for their tokens."""
        import numpy as np

        from atom.model_engine.messages import AddRequests, NewRequest
        from atom.sampling_params import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        requests = []
        for _ in range(count):
            self._count += 1
            ids = np.random.default_rng(self._count).integers(0, self._vocab_size, length)
            packed = ids.astype(np.int32).tobytes()
            requests.append(NewRequest(self._count, packed, params, [], 1, time.monotonic(), hash_seed=1))
        self._core.handle(AddRequests(requests, [None] * count))
        while self._core.has_work:
            self._core.step()


def profiled(run: Any) -> Timeline:
    """The device's timeline of ``run()``."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        run()
        torch.cuda.synchronize()
    spans, host = [], []
    for event in profiler.profiler.kineto_results.events():
        span = Span(event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        (host if str(event.device_type()).endswith("CPU") else spans).append(span)
    return timeline(spans, min(span.start for span in host), max(span.end for span in host))


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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(p.name for p in MODELS.iterdir()))
    parser.add_argument("--level", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    args = parser.parse_args(argv)
    try:
        get_platform("cuda")
    except ConfigError as error:
        print(f"step_timeline needs a GPU: {error}", file=sys.stderr)
        return 2
    from atom.config import Config
    from atom.model_engine.engine_core import EngineCore

    config = Config.build(
        str(MODELS / args.model),
        device="cuda",
        load_dummy="xavier",
        max_model_len=9216,
        kv_cache_memory=KV_BYTES,
        enable_prefix_caching=False,
        compilation_config={"level": args.level, "cudagraph_mode": "FULL" if args.level else "NONE"},
    )
    core = EngineCore(config, lambda message: None)
    core.start(lambda phase, fraction: None)
    prompts = Prompts(core, core.worker.hf_config.vocab_size)
    for count, length in WORKLOADS:
        prompts.run(count, length)
        walls = []
        for _ in range(args.repeats):
            began = time.perf_counter()
            prompts.run(count, length)
            walls.append((time.perf_counter() - began) * 1e3)
        found = profiled(lambda count=count, length=length: prompts.run(count, length))
        print(report(f"{args.model} {count} x {length}", walls, found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
