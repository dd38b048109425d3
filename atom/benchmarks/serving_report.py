"""The HTML report of a serving benchmark: one file without references to anything outside it."""

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from atom.benchmarks import svg_charts
from atom.benchmarks.serving_load import Run
from atom.benchmarks.serving_metrics import METRICS, Summary

_CSS = """
:root { --ink: #1c2330; --muted: #667085; --grid: #e4e7ec; --main: #2f6fde; --accent: #c2410c; --paper: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --muted: #98a2b3; --grid: #2d3545; --main: #7aa5f5; --accent: #fb923c; --paper: #12161f; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
       max-width: 1320px; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: 0; } .muted { color: var(--muted); }
.grid2 { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 1.5rem; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; } td, th { padding: 0.25rem 0.6rem; text-align: right; }
td:first-child, th:first-child { text-align: left; } tr { border-bottom: 1px solid var(--grid); }
.failed { color: var(--accent); }
"""
_MAX_BINS = 200


def write_report(
    result: dict[str, Any], summary: Summary, run: Run, metrics: Sequence[str], percentiles: Sequence[float]
) -> str:
    """The page. ``result`` is the JSON result, from which the settings are taken."""
    charts = []
    for metric, title in (("ttft", "Time to first token"), ("itl", "Inter-token latency")):
        values = summary.values[metric]
        marks = {}
        if len(values):
            marks = {"median": float(np.median(values)), "p99": float(np.percentile(values, 99))}
        charts.append(svg_charts.histogram(title, values, "ms", marks))
    times, rates = tokens_over_time(run)
    charts.append(svg_charts.line("Output throughput over time", times, rates, "s", "tokens/s"))
    times, running = requests_over_time(run)
    charts.append(svg_charts.line("Requests under way", times, running, "s", "requests"))

    settings = (
        "backend",
        "model_id",
        "tokenizer_id",
        "num_prompts",
        "request_rate",
        "burstiness",
        "max_concurrency",
    )
    facts = [(name.replace("_", " "), result[name]) for name in settings]
    facts += sorted((result.get("metadata") or {}).items())
    title = f"Serving benchmark: {result['model_id']}"
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_CSS}{svg_charts.CSS}</style></head><body>",
            f'<h1>{escape(title)}</h1><p class="muted">{escape(str(result["date"]))}</p>',
            '<div class="grid2"><div>',
            _table(["setting", "value"], facts),
            "</div><div>",
            _table(["result", "value"], _totals(result)),
            "</div></div>",
            _failures(summary),
            _latencies(summary, metrics, percentiles),
            f'<div class="grid2">{"".join(charts)}</div>',
            "</body></html>",
            "",
        ]
    )


def tokens_over_time(run: Run) -> tuple[list[float], list[float]]:
    """Middle of each interval in seconds, and tokens a second in it.

    An event may carry several tokens: a request's tokens are shared out evenly over its events.
    """
    done = [outcome for outcome in run.outcomes if outcome.is_success and outcome.token_times]
    if not done:
        return [], []
    times = np.concatenate([outcome.token_times for outcome in done]) - run.start
    weights = np.concatenate([_weights(len(o.token_times), o.num_output_tokens) for o in done])
    num_bins = _num_bins(run)
    counts, edges = np.histogram(times, num_bins, (0.0, run.duration), weights=weights)
    middles = (edges[:-1] + edges[1:]) / 2
    return middles.tolist(), (counts / (run.duration / num_bins)).tolist()


def _weights(num_events: int, num_tokens: int) -> np.ndarray:
    return np.full(num_events, max(num_tokens, 1) / num_events)


def requests_over_time(run: Run) -> tuple[list[float], list[float]]:
    """Seconds, and successful requests under way then."""
    done = [outcome for outcome in run.outcomes if outcome.is_success and outcome.token_times]
    if not done:
        return [], []
    starts = np.sort([outcome.start - run.start for outcome in done])
    ends = np.sort([outcome.token_times[-1] - run.start for outcome in done])
    times = np.linspace(0.0, run.duration, _num_bins(run) + 1)
    running = np.searchsorted(starts, times, "right") - np.searchsorted(ends, times, "left")
    return times.tolist(), running.astype(float).tolist()


def _num_bins(run: Run) -> int:
    """One a second, but enough to see something of a short run and no more than a page shows."""
    return int(min(_MAX_BINS, max(40, run.duration)))


def _totals(result: dict[str, Any]) -> list[tuple[str, Any]]:
    names = ["completed", "duration", "total_input_tokens", "total_output_tokens", "request_throughput"]
    names += ["request_goodput", "output_throughput", "total_token_throughput", "concurrency"]
    names += ["accept_length", "acceptance_rate"]
    return [(name.replace("_", " "), result[name]) for name in names if result[name] is not None]


def _latencies(summary: Summary, metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    rows = []
    header = ["latency (ms)"]
    for metric in metrics:
        found = summary.statistics(metric, percentiles)
        header = ["latency (ms)", *found]
        rows.append((METRICS[metric], *found.values()))
    return _table(header, rows)


def _failures(summary: Summary) -> str:
    if not summary.errors:
        return ""
    rows = [(reason, count) for reason, count in summary.errors.most_common(5)]
    return f'<div class="failed">{_table([f"{summary.errors.total()} requests failed", "count"], rows)}</div>'


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(_show(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _show(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)
