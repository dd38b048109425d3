"""The comparison as one SVG picture: a panel of bars for each figure, ATOM's in the accent colour."""

from html import escape
from typing import Any

from atom.benchmarks.cpu_peers.report import PEER_FIGURE
from atom.benchmarks.cpu_peers.variants import BY_NAME
from atom.benchmarks.svg_charts import CSS, Bar, bars, bars_height

PANELS = (
    "decode_tok_s",
    "prefill_512_tok_s",
    "prefill_2048_tok_s",
    "concurrent_tok_s",
    "http_tok_s",
    "start_to_first_token_s",
    "serving_rss_bytes",
)
_WIDTH, _HEAD, _GAP = 640, 40, 14
_COLOURS = """
svg { --ink: #1c2430; --muted: #667085; --grid: #e4e7ec; --main: #98a2b3; --accent: #c2410c; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e6e9ef; --muted: #98a2b3; --grid: #344054; --main: #667085; --accent: #fb923c; }
}
text { fill: var(--ink); font: 12px system-ui, sans-serif; } .paper { fill: none; }
"""


def draw(facts: dict[str, Any], machine: str) -> str:
    """The picture of ``report.summary``: medians as bars, a panel a figure, best first."""
    panels, top = [], _HEAD
    for field in PANELS:
        figure = PEER_FIGURE[field]
        found = []
        for name, entry in facts["variants"].items():
            spread = entry["figures"][field]
            if spread is not None:
                low, middle, high = (spread[key] / figure.unit_size for key in ("min", "median", "max"))
                found.append(Bar(name, middle, low, high, is_marked=BY_NAME[name].is_atom))
        if not found:
            continue
        found.sort(key=lambda bar: bar.value, reverse=figure.higher_is_better)
        height = bars_height(len(found))
        chart = bars(figure.title, found, figure.digits)
        panels.append(f'<svg y="{top}" width="{_WIDTH}" height="{height}">{chart}</svg>')
        top += height + _GAP
    head = '<text x="8" y="16" font-weight="600">gemma-3-270m on the CPU</text>'
    head += f'<text x="8" y="32" style="fill: var(--muted)">{escape(machine)}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top}" viewBox="0 0 {_WIDTH} {top}">'
        f"<style>{_COLOURS}{CSS}</style>{head}{''.join(panels)}</svg>\n"
    )
