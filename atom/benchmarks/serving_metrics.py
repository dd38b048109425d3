"""From the outcomes of a serving benchmark to its figures, the printed table and the JSON result."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from atom.benchmarks.serving_client import Outcome
from atom.benchmarks.serving_load import Run
from atom.errors import ConfigError

METRICS = {
    "ttft": "Time to first token",
    "tpot": "Time per output token (after the first)",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
_WIDTH = 52


@dataclass(frozen=True)
class Summary:
    """Figures of the successful requests. Times in milliseconds, throughputs a second.

    Attributes:
        concurrency: requests under way on average.
        request_goodput: requests a second that met every objective; None without objectives.
        values: of each metric, ascending in no order: one value a request, of ``itl`` one an event.
    """

    duration: float
    completed: int
    total_input_tokens: int
    total_output_tokens: int
    concurrency: float
    request_goodput: float | None
    values: dict[str, np.ndarray]
    errors: Counter[str]

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration

    @property
    def output_throughput(self) -> float:
        return self.total_output_tokens / self.duration

    @property
    def total_token_throughput(self) -> float:
        return (self.total_input_tokens + self.total_output_tokens) / self.duration

    def statistics(self, metric: str, percentiles: Sequence[float]) -> dict[str, float]:
        """``mean``, ``median``, ``std`` and ``p99`` (as named) of a metric; zeros where nothing was measured."""
        values = self.values[metric] if len(self.values[metric]) else np.zeros(1)
        found = {"mean": values.mean(), "median": np.median(values), "std": values.std()}
        found |= {f"p{p:g}": np.percentile(values, p) for p in percentiles}
        return {name: float(value) for name, value in found.items()}


def summarize(run: Run, goodput: dict[str, float]) -> Summary:
    """``goodput``: the most milliseconds of each metric that a good request has."""
    done = [outcome for outcome in run.outcomes if outcome.is_success]
    seconds = {
        "ttft": [outcome.ttft for outcome in done],
        "tpot": [outcome.tpot for outcome in done if outcome.num_output_tokens > 1],
        "itl": [gap for outcome in done for gap in outcome.itls],
        "e2el": [outcome.latency for outcome in done],
    }
    num_good = sum(_is_good(outcome, goodput) for outcome in done)
    duration = max(run.duration, 1e-9)
    return Summary(
        duration=duration,
        completed=len(done),
        total_input_tokens=sum(outcome.num_prompt_tokens for outcome in done),
        total_output_tokens=sum(outcome.num_output_tokens for outcome in done),
        concurrency=sum(seconds["e2el"]) / duration,
        request_goodput=num_good / duration if goodput else None,
        values={metric: 1e3 * np.asarray(values) for metric, values in seconds.items()},
        errors=Counter(outcome.error for outcome in run.outcomes if outcome.error),
    )


def _is_good(outcome: Outcome, goodput: dict[str, float]) -> bool:
    seconds = {"ttft": outcome.ttft, "tpot": outcome.tpot, "e2el": outcome.latency}
    return all(1e3 * seconds[metric] <= limit for metric, limit in goodput.items())


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """``["ttft:200", "tpot:50"]`` as milliseconds by metric. Raises ConfigError."""
    limits = {}
    for word in words:
        name, _, text = word.partition(":")
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if name not in GOODPUT_METRICS or not 0 <= value < float("inf"):
            allowed = ", ".join(GOODPUT_METRICS)
            raise ConfigError(f"--goodput must be one of {allowed}, a colon and milliseconds, got {word!r}")
        limits[name] = value
    return limits


def format_summary(
    summary: Summary,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    accept_length: float | None,
    acceptance_rate: float | None,
) -> str:
    """The table for people."""

    def row(title: str, value: float | int, digits: int = 2) -> str:
        return f"{title:<40} {value:>{_WIDTH - 41}{'' if isinstance(value, int) else f'.{digits}f'}}"

    num_failed = summary.errors.total()
    lines = [" Serving benchmark ".center(_WIDTH, "="), row("Successful requests:", summary.completed)]
    if num_failed:
        lines.append(row("FAILED requests:", num_failed))
        lines += [f"  {count} x {reason}" for reason, count in summary.errors.most_common(5)]
        if len(summary.errors) > 5:
            lines.append(f"  and {len(summary.errors) - 5} more reasons")
    lines += [
        row("Benchmark duration (s):", summary.duration),
        row("Total input tokens:", summary.total_input_tokens),
        row("Total generated tokens:", summary.total_output_tokens),
        row("Request throughput (req/s):", summary.request_throughput),
    ]
    if summary.request_goodput is not None:
        lines.append(row("Request goodput (req/s):", summary.request_goodput))
    lines += [
        row("Output token throughput (tok/s):", summary.output_throughput),
        row("Total token throughput (tok/s):", summary.total_token_throughput),
        row("Concurrency:", summary.concurrency),
    ]
    if accept_length is not None:
        lines.append(row("Accept length (tok/forward):", accept_length))
    if acceptance_rate is not None:
        lines.append(row("Acceptance rate (%):", 100 * acceptance_rate))
    for metric in metrics:
        lines.append(f" {METRICS[metric]} ".center(_WIDTH, "-"))
        found = summary.statistics(metric, percentiles)
        shown = [name for name in found if name != "std"]
        lines += [row(f"{name.capitalize()} {metric.upper()} (ms):", found[name]) for name in shown]
    return "\n".join([*lines, "=" * _WIDTH])


def result_fields(summary: Summary, metrics: Sequence[str], percentiles: Sequence[float]) -> dict[str, Any]:
    """The measured part of the JSON result.

    Goodput stands under two names: ``request_goodput``, and ``request_goodput:`` with a colon, which existing
    scripts read.
    """
    fields: dict[str, Any] = {
        "duration": summary.duration,
        "completed": summary.completed,
        "total_input_tokens": summary.total_input_tokens,
        "total_output_tokens": summary.total_output_tokens,
        "request_throughput": summary.request_throughput,
        "request_goodput": summary.request_goodput,
        "request_goodput:": summary.request_goodput,
        "output_throughput": summary.output_throughput,
        "total_token_throughput": summary.total_token_throughput,
        "concurrency": summary.concurrency,
    }
    for metric in metrics:
        found = summary.statistics(metric, percentiles)
        fields |= {f"{name}_{metric}_ms": value for name, value in found.items()}
    return fields


def detailed_fields(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """One entry a request, the failed ones included; times in seconds."""
    return {
        "input_lens": [outcome.num_prompt_tokens for outcome in outcomes],
        "output_lens": [outcome.num_output_tokens for outcome in outcomes],
        "ttfts": [outcome.ttft for outcome in outcomes],
        "itls": [outcome.itls for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }


def pytorch_records(result: dict[str, Any], args: dict[str, Any]) -> list[dict[str, Any]]:
    """The result as records of PyTorch's benchmark database, one a figure."""
    names = [name for name in result if name.endswith("_ms") or name.endswith("_throughput")]
    return [
        {
            "benchmark": {"name": "ATOM serving benchmark", "extra_info": {"args": args}},
            "model": {"name": result["model_id"]},
            "metric": {"name": name, "benchmark_values": [result[name]], "extra_info": {}},
        }
        for name in names
    ]
