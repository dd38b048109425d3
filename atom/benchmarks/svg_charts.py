"""Small charts as SVG text: histogram, line over time, and bars. Colours come from the page's CSS variables."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 34, 46

CSS = """
svg.chart { width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg.chart text { fill: var(--ink); } svg.chart .muted { fill: var(--muted); }
svg.chart .grid { stroke: var(--grid); } svg.chart .bar { fill: var(--main); }
svg.chart .line { fill: none; stroke: var(--main); stroke-width: 1.5; }
svg.chart .area { fill: var(--main); opacity: 0.15; }
svg.chart .marked { fill: var(--accent); } svg.chart .range { stroke: var(--ink); stroke-width: 1; }
svg.chart .mark { stroke: var(--accent); stroke-dasharray: 4 3; } svg.chart .mark-text { fill: var(--accent); }
"""


@dataclass(frozen=True)
class _Axes:
    """Maps values to the drawing area; both axes start at ``low``."""

    x_low: float
    x_high: float
    y_high: float

    def x(self, value: float) -> float:
        span = self.x_high - self.x_low or 1.0
        return _LEFT + (value - self.x_low) / span * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - value / (self.y_high or 1.0) * (_HEIGHT - _TOP - _BOTTOM)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``, about ``count`` of them."""
    span = high - low
    if not span > 0:
        return [low]
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def histogram(
    title: str,
    values: Sequence[float] | np.ndarray,
    x_title: str,
    marks: dict[str, float],
    num_bins: int = 50,
) -> str:
    """How often values occur. The axis ends at the 99.5th percentile or the last mark; more is counted in a note."""
    values = np.asarray(values, float)
    if not len(values):
        return _empty(title)
    high = max(float(np.percentile(values, 99.5)), *marks.values(), 1e-9) * 1.02
    low = min(float(values.min()), high)
    low = 0.0 if low < high / 2 else low
    counts, edges = np.histogram(values, num_bins, (low, high))
    axes = _Axes(low, high, float(counts.max()) * 1.08)
    parts = _frame(axes, x_title, "count")
    for count, left, right in zip(counts.tolist(), edges.tolist(), edges[1:].tolist(), strict=False):
        if count:
            x, y = axes.x(left), axes.y(count)
            width = max(axes.x(right) - x - 1, 0.5)
            tip = f"{left:.4g} to {right:.4g}: {count}"
            parts.append(
                f'<rect class="bar" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
                f'height="{axes.y(0) - y:.1f}"><title>{tip}</title></rect>'
            )
    for i, (name, value) in enumerate(marks.items()):
        x = axes.x(value)
        anchor = "end" if x > _WIDTH * 0.8 else "start"
        shift = -4 if anchor == "end" else 4
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{axes.y(0):.1f}"/>')
        parts.append(
            f'<text class="mark-text" x="{x + shift:.1f}" y="{_TOP + 10 + 14 * i}" text-anchor="{anchor}">'
            f"{escape(name)} {value:.4g}</text>"
        )
    beyond = int((values > high).sum())
    note = f"{len(values)} values" + (
        f", {beyond} beyond the axis, up to {values.max():.4g}" if beyond else ""
    )
    return _chart(title, note, parts)


def line(title: str, x: Sequence[float], y: Sequence[float], x_title: str, y_title: str) -> str:
    """One value over time, the area below it filled."""
    if not len(x):
        return _empty(title)
    axes = _Axes(0.0, float(max(x)), float(max(y)) * 1.08)
    points = " ".join(f"{axes.x(a):.1f},{axes.y(b):.1f}" for a, b in zip(x, y, strict=True))
    base = axes.y(0)
    parts = _frame(axes, x_title, y_title)
    parts.append(
        f'<polygon class="area" points="{axes.x(x[0]):.1f},{base:.1f} {points} {axes.x(x[-1]):.1f},{base:.1f}"/>'
    )
    parts.append(f'<polyline class="line" points="{points}"/>')
    return _chart(title, f"mean {float(np.mean(y)):.4g}, peak {float(max(y)):.4g}", parts)


@dataclass(frozen=True)
class Bar:
    """A named value with the range that it was seen in; a marked one is drawn in the accent colour."""

    name: str
    value: float
    low: float
    high: float
    is_marked: bool = False


_BAR_LEFT, _BAR_RIGHT, _BAR_STEP = 180, 60, 18


def bars_height(count: int) -> int:
    """Height of a chart of ``count`` bars, in units of its 640 wide drawing area."""
    return _TOP + count * _BAR_STEP + 8


def bars(title: str, found: Sequence[Bar], digits: int = 0) -> str:
    """Horizontal bars from zero, in the order given, each with its value and a line over its range."""
    if not found:
        return _empty(title)
    scale = (_WIDTH - _BAR_LEFT - _BAR_RIGHT) / (max(bar.high for bar in found) or 1.0)
    parts = []
    for number, bar in enumerate(found):
        y = _TOP + number * _BAR_STEP
        middle, end = y + _BAR_STEP / 2 - 2, _BAR_LEFT + bar.high * scale
        kind = "marked" if bar.is_marked else "bar"
        parts.append(
            f'<text x="{_BAR_LEFT - 6}" y="{y + 11}" text-anchor="end">{escape(bar.name)}</text>'
            f'<rect class="{kind}" x="{_BAR_LEFT}" y="{y}" width="{bar.value * scale:.1f}" height="14"/>'
            f'<line class="range" x1="{_BAR_LEFT + bar.low * scale:.1f}" x2="{end:.1f}" '
            f'y1="{middle}" y2="{middle}"/>'
            f'<text x="{end + 5:.1f}" y="{y + 11}">{bar.value:.{digits}f}</text>'
        )
    return _chart(title, "", parts, bars_height(len(found)))


def _frame(axes: _Axes, x_title: str, y_title: str) -> list[str]:
    parts = []
    for value in nice_ticks(0.0, axes.y_high):
        y = axes.y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in nice_ticks(axes.x_low, axes.x_high, 8):
        x = axes.x(value)
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{value:g}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(
        f'<text class="muted" x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(x_title)}</text>'
    )
    side = f'transform="translate(14 {(_TOP + _HEIGHT - _BOTTOM) / 2}) rotate(-90)"'
    parts.append(f'<text class="muted" {side} text-anchor="middle">{escape(y_title)}</text>')
    return parts


def _chart(title: str, note: str, parts: list[str], height: int = _HEIGHT) -> str:
    head = f'<text x="{_LEFT}" y="18" font-weight="600">{escape(title)}</text>'
    head += f'<text class="muted" x="{_WIDTH - _RIGHT}" y="18" text-anchor="end">{escape(note)}</text>'
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f"{head}{''.join(parts)}</svg>"
    )


def _empty(title: str) -> str:
    return _chart(title, "nothing was measured", [])
