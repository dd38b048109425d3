"""The workloads that engines are compared by on a GPU, and how each is timed. Knows no engine.

Prompts are uniform random token ids, the end of sequence is ignored, all requests of a workload are submitted at
once, prefix caching is off. Wall-clock time around ``generate`` is what counts, so the host's work does too.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

FOLDER = Path(__file__).parent
DEFAULT_FILE = FOLDER / "gpu_workloads.json"


class Workload(msgspec.Struct, forbid_unknown_fields=True):
    """``decode``: (time for ``output_len`` tokens - time for one) / (``output_len`` - 1). Others: the whole time."""

    id: str
    kind: Literal["decode", "prefill", "throughput"]
    prompt_len: int
    output_len: int
    concurrency: int
    temperature: float
    warmup: int
    repeats: int
    models: list[str] | Literal["all"]


class WorkloadFile(msgspec.Struct):
    """``models`` maps a name to a folder with a ``config.json``, relative to the file."""

    dtype: str
    max_model_len: int
    seed: int
    models: dict[str, str]
    workloads: list[Workload]

    def of_model(self, model: str, only: list[str] | None = None) -> Iterator[Workload]:
        for workload in self.workloads:
            is_for_model = workload.models == "all" or model in workload.models
            if is_for_model and (not only or workload.id in only):
                yield workload


class Engine(Protocol):
    """What is measured."""

    def generate(self, prompts: list[list[int]], output_len: int, temperature: float) -> list[list[int]]:
        """Output ids of each prompt, exactly ``output_len`` of them."""

    def device_seconds(self) -> float | None:
        """Seconds for which the device has computed so far; None where nobody measures it."""

    def info(self) -> dict[str, Any]:
        """Versions and settings, for the record."""


class Figures(msgspec.Struct, omit_defaults=True):
    """What one workload came to; ``value`` is in the unit that targets are stated in."""

    id: str
    kind: str
    prompt_len: int
    output_len: int
    concurrency: int
    temperature: float
    samples_s: list[float] = []
    first_token_s: list[float] = []  # decode alone: the runs that are subtracted
    value: float = 0.0  # decode: ms a step; prefill: ms; throughput: output tokens a second
    seconds: float = 0.0  # what is compared with the bound: of a decode step, else of the run
    gap_s: float | None = None  # decode alone: of a step, for which the device does not compute
    num_distinct_tokens: float = 0.0
    error: str = ""


def load_workloads(path: Path | str | None = None) -> tuple[WorkloadFile, Path]:
    """The file's contents, and the folder that its models are relative to.

    Raises ValueError, naming the file, for what is no such file.
    """
    path = Path(path or DEFAULT_FILE)
    try:
        return msgspec.json.decode(path.read_bytes(), type=WorkloadFile), path.parent
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no workload file: {error}") from error


def read_model_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def run_workload(engine: Engine, workload: Workload, vocab_size: int, seed: int) -> Figures:
    """Run ``warmup + repeats`` rounds of fresh prompts; medians over the repeats.

    Raises RuntimeError when an answer has another number of tokens than was asked for.
    """
    rng = random.Random(f"{seed}/{workload.id}")
    w = workload
    figures = Figures(w.id, w.kind, w.prompt_len, w.output_len, w.concurrency, w.temperature, [], [])
    num_distinct, busy_s = [], []
    for number in range(w.warmup + w.repeats):
        prompts = [
            [rng.randrange(10, vocab_size - 1000) for _ in range(w.prompt_len)] for _ in range(w.concurrency)
        ]
        device = engine.device_seconds()
        seconds, answers = _time(engine, prompts, w.output_len, w.temperature)
        after = engine.device_seconds()
        first = _time(engine, prompts, 1, w.temperature)[0] if w.kind == "decode" else None
        if number < w.warmup:
            continue
        if device is not None:
            busy_s.append((after - device) - (engine.device_seconds() - after))
        figures.samples_s.append(seconds)
        if first is not None:
            figures.first_token_s.append(first)
        num_distinct.append(len({token for answer in answers for token in answer}))
    figures.num_distinct_tokens = statistics.median(num_distinct)
    if w.kind == "decode":
        pairs = zip(figures.samples_s, figures.first_token_s, strict=True)
        figures.seconds = statistics.median((full - first) / (w.output_len - 1) for full, first in pairs)
        if busy_s:
            figures.gap_s = figures.seconds - statistics.median(busy_s) / (w.output_len - 1)
    else:
        figures.seconds = statistics.median(figures.samples_s)
    figures.value = figures.seconds * 1e3
    if w.kind == "throughput":
        figures.value = w.concurrency * w.output_len / figures.seconds
    return figures


def _time(
    engine: Engine, prompts: list[list[int]], output_len: int, temperature: float
) -> tuple[float, list[list[int]]]:
    began = time.perf_counter()
    answers = engine.generate(prompts, output_len, temperature)
    seconds = time.perf_counter() - began
    if len(answers) != len(prompts) or any(len(answer) != output_len for answer in answers):
        found = [len(answer) for answer in answers][:8]
        raise RuntimeError(f"wanted {len(prompts)} answers of {output_len} tokens, got {found}")
    return seconds, answers
