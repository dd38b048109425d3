"""Time what a request costs beside its computation, from ``generate``'s entry to its return, stage by stage.

A real engine, in a process of its own or in this one, with a runner whose device does nothing for ``DEVICE_MS``
(``instant_device``): prompts of random ids, one token each. Medians over many calls. The stages:

    front     entry of generate -> the request's arrival time: ids taken in, checked and packed
    hop       -> scheduled: message made, sent and decoded, the core's thread awake, sequences made
    schedule  -> the worker has the batch: blocks
    launch    -> the first launch on the device: parameters, packing
    back      the device's ids are there -> the answer is put down in the front end
    return    -> generate has returned
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import sys
import time
from dataclasses import dataclass
from itertools import pairwise

from atom.benchmarks.gpu_suite import NoText
from atom.benchmarks.instant_device import REAL_VOCAB, BusyRunner
from atom.benchmarks.level_suite import MODELS
from atom.config import Config
from atom.model_engine.llm_engine import LLMEngine
from atom.sampling_params import SamplingParams

WORKLOADS = ((1, 2048), (1, 8192), (16, 1024))  # prompts, tokens of each
STAGES = ("front", "hop", "schedule", "launch", "back", "return")
REPEATS = 60
_WARM_UP = 10


@dataclass(frozen=True)
class Overhead:
    """What one workload came to, in microseconds; ``total`` is all but the device's own time."""

    num_prompts: int
    prompt_len: int
    in_process: bool
    total: float
    stages: dict[str, float]


def measure(
    num_prompts: int,
    prompt_len: int,
    in_process: bool,
    repeats: int = REPEATS,
    engine: LLMEngine | None = None,
) -> Overhead:
    """Medians over ``repeats`` calls of ``generate``."""
    if engine is None:
        with make_engine(in_process) as own:
            return measure(num_prompts, prompt_len, in_process, repeats, own)
    rng = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    totals: list[float] = []
    stages: dict[str, list[float]] = {name: [] for name in STAGES}
    for number in range(_WARM_UP + repeats):
        prompts = [[rng.randrange(REAL_VOCAB) for _ in range(prompt_len)] for _ in range(num_prompts)]
        engine.get_metrics_statistics()  # as gpu_suite does: the engine has just been awake
        began = time.monotonic()
        answers = engine.generate(prompts, params, use_tqdm=False)
        ended = time.monotonic()
        if number < _WARM_UP:
            continue
        at = engine.get_metrics_statistics()
        moments = [began, *(at[name] for name in ("arrival", "scheduled", "given", "launched"))]
        moments += [at["done"], began + max(answer["latency"] for answer in answers), ended]
        pairs = [pair for pair in pairwise(moments) if pair[0] != at["launched"]]
        for name, (start, end) in zip(STAGES, pairs, strict=True):
            stages[name].append(1e6 * (end - start))
        totals.append(1e6 * (ended - began - (at["done"] - at["launched"])))
    medians = {name: statistics.median(values) for name, values in stages.items()}
    return Overhead(num_prompts, prompt_len, in_process, statistics.median(totals), medians)


def make_engine(in_process: bool) -> LLMEngine:
    """An engine without a model; its prompts fit one step."""
    config = Config.build(
        str(MODELS / "qwen3-0.6b"),
        runner_qualname=f"{BusyRunner.__module__}.{BusyRunner.__qualname__}",
        loop="overlapped",
        enable_prefix_caching=False,
        max_num_seqs=16,
        max_num_batched_tokens=16384,
        max_model_len=8448,
        num_kvcache_blocks=2048,
    )
    return LLMEngine(config=config, in_process=in_process, tokenizer=NoText(REAL_VOCAB))


def run(repeats: int = REPEATS) -> list[Overhead]:
    """One result a workload and kind of engine."""
    results = []
    for in_process in (False, True):
        with make_engine(in_process) as engine:
            results += [measure(*workload, in_process, repeats, engine) for workload in WORKLOADS]
    return results


def format_table(results: list[Overhead]) -> str:
    """Microseconds, one row a workload and kind of engine."""
    lines = [f"{'request overhead, us':<38}{'total':>9}" + "".join(f"{name:>10}" for name in STAGES)]
    for r in results:
        name = f"{r.num_prompts} x {r.prompt_len:,}{', in process' if r.in_process else ''}"
        lines.append(f"{name:<38}{r.total:>9.0f}" + "".join(f"{r.stages[stage]:>10.0f}" for stage in STAGES))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=REPEATS)
    args = parser.parse_args(argv)
    logging.getLogger("atom").setLevel(logging.WARNING)
    print(format_table(run(args.repeats)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
