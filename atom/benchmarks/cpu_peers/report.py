"""From rounds of all engines to medians, ratios inside a round, shares of the machine's limits, and targets."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from atom.benchmarks.cpu_peers.rounds import PeerRecord
from atom.benchmarks.cpu_peers.variants import (
    BY_NAME,
    FILE_WEIGHTS,
    TARGETS,
    WEIGHT_BITS,
    PeerTarget,
    Variant,
)
from atom.benchmarks.cpu_report import FIGURE, FIGURES, Figure

PEER_FIGURES = (
    *FIGURES,
    Figure("http_tok_s", "16 x 128/128, HTTP (tok/s)"),
    Figure("serving_rss_bytes", "peak RSS serving (MB)", unit_size=1e6, higher_is_better=False),
)
PEER_FIGURE = FIGURE | {figure.field: figure for figure in PEER_FIGURES}
_COLUMNS = {  # heads of the table, short enough for all to stand side by side
    "decode_tok_s": "decode b1",
    "prefill_512_tok_s": "prefill 512",
    "prefill_2048_tok_s": "prefill 2048",
    "concurrent_tok_s": "16 at once",
    "http_tok_s": "16, HTTP",
    "ttft_128_ms": "first of 128, ms",
    "start_to_first_token_s": "start, s",
    "peak_rss_bytes": "RSS, MB",
    "serving_rss_bytes": "serving, MB",
}
_NAME_WIDTH, _CELL_WIDTH = 24, 19


@dataclass(frozen=True)
class WeightSizes:
    """Elements of the blocks and of the tied output head, and bytes of the tensors of the model's own file."""

    num_block_params: int
    num_head_params: int
    file_bytes: int

    def decode_bytes(self, variant: Variant) -> float:
        """Bytes of weights that a decode step reads; norms are not counted."""
        if variant.weights == FILE_WEIGHTS:
            return self.file_bytes
        blocks, head = WEIGHT_BITS[variant.weights]
        return (self.num_block_params * blocks + self.num_head_params * head) / 8

    @property
    def prefill_ops(self) -> int:
        """Operations of the blocks' products for one prompt token; attention and the head come on top."""
        return 2 * self.num_block_params


def figure_values(records: Iterable[PeerRecord], variant: str, field: str) -> list[float]:
    found = [getattr(record.measurement, field) for record in records if record.variant == variant]
    return [value for value in found if value is not None]


def best_by_round(records: Iterable[PeerRecord], variants: Sequence[str], field: str) -> dict[int, float]:
    """The best value of any of ``variants`` in each round that has one."""
    best = max if PEER_FIGURE[field].higher_is_better else min
    rounds: dict[int, list[float]] = {}
    for record in records:
        value = getattr(record.measurement, field)
        if record.variant in variants and value is not None:
            rounds.setdefault(record.round, []).append(value)
    return {number: best(found) for number, found in rounds.items()}


def ratios(
    records: Sequence[PeerRecord], contenders: Sequence[str], references: Sequence[str], field: str
) -> list[float]:
    """Best of ``contenders`` over best of ``references``, formed inside each round that has both."""
    ours, theirs = best_by_round(records, contenders, field), best_by_round(records, references, field)
    return [ours[number] / theirs[number] for number in sorted(ours.keys() & theirs.keys())]


def decode_shares(records: Iterable[PeerRecord], variant: Variant, sizes: WeightSizes) -> list[float]:
    """Bytes of weights a second that decoding reads, over what the machine could read just before."""
    return [
        record.measurement.decode_tok_s * sizes.decode_bytes(variant) / record.limits.read_bandwidth
        for record in records
        if record.variant == variant.name and record.measurement.decode_tok_s is not None
    ]


def prefill_shares(
    records: Iterable[PeerRecord], variant: Variant, field: str, sizes: WeightSizes
) -> list[float]:
    """Operations a second of a prefill's products over those of a large product.

    Of int8 where the variant multiplies int8; else of the faster of bf16 and fp32, for weights may be widened.
    """
    shares = []
    for record in records:
        rate = getattr(record.measurement, field)
        if record.variant != variant.name or rate is None:
            continue
        limit = max(record.limits.matmul_bf16, record.limits.matmul_fp32)
        if variant.products == "int8":
            limit = max(limit, record.limits.matmul_int8 or 0.0)
        shares.append(rate * sizes.prefill_ops / limit)
    return shares


def judge(target: PeerTarget, records: Sequence[PeerRecord]) -> dict[str, Any] | None:
    """The target's value and whether it holds; None where it was not measured."""
    if target.references:
        found = ratios(records, target.contenders, target.references, target.field)
    else:
        found = list(best_by_round(records, target.contenders, target.field).values())
    if not found:
        return None
    value, is_ratio = statistics.median(found), bool(target.references)
    higher = PEER_FIGURE[target.field].higher_is_better
    return {
        "field": target.field,
        "target": describe_target(target),
        "bound": target.bound,
        "value": value,
        "shown": f"{value:.2f}x" if is_ratio else _number(target.field, value),
        "ok": value >= target.bound if higher else value <= target.bound,
    }


def describe_target(target: PeerTarget) -> str:
    figure = PEER_FIGURE[target.field]
    sign = ">=" if figure.higher_is_better else "<="
    what = f"{figure.title.rsplit(' (', 1)[0]}: {' or '.join(target.contenders)}"
    if target.references:
        return f"{what} {sign} {target.bound:g} x the best of {', '.join(target.references)}"
    unit = figure.title.rsplit("(", 1)[1].rstrip(")")
    return f"{what} {sign} {target.bound / figure.unit_size:g} {unit}"


def summary(records: Sequence[PeerRecord], variants: Sequence[Variant], sizes: WeightSizes) -> dict[str, Any]:
    """Everything that is printed, as JSON values."""
    found = {}
    for variant in variants:
        shares = {
            "read_bandwidth": _median(decode_shares(records, variant, sizes)),
            "matmul_512": _median(prefill_shares(records, variant, "prefill_512_tok_s", sizes)),
            "matmul_2048": _median(prefill_shares(records, variant, "prefill_2048_tok_s", sizes)),
        }
        figures = {field: _spread(figure_values(records, variant.name, field)) for field in _COLUMNS}
        megabytes = sizes.decode_bytes(variant) / 1e6
        found[variant.name] = {"figures": figures, "shares": shares, "weight_mb": megabytes}
    judged = [judge(target, records) for target in TARGETS]
    return {
        "limits": limits(records),
        "variants": found,
        "targets": [verdict for verdict in judged if verdict is not None],
    }


def limits(records: Sequence[PeerRecord]) -> dict[str, dict[str, float] | None]:
    """What the machine could do over the whole run: median, lowest and highest probe."""
    fields = ("read_bandwidth", "matmul_bf16", "matmul_fp32", "matmul_int8")
    probes = {field: [getattr(record.limits, field) for record in records] for field in fields}
    return {field: _spread([v for v in found if v is not None]) for field, found in probes.items()}


def format_report(records: Sequence[PeerRecord], variants: Sequence[Variant], sizes: WeightSizes) -> str:
    """Engines down and figures across; below it the shares of the limits, and the targets."""
    facts = summary(records, variants, sizes)
    lines = [_limits_line(facts["limits"]), ""]
    lines += [_row("median [min-max]", _COLUMNS.values())]
    for name, entry in facts["variants"].items():
        cells = [_cell(field, entry["figures"][field]) for field in _COLUMNS]
        lines.append(_row(name, cells))
    heads = ("weights, MB", "decode: bandwidth", "prefill 512: rate", "prefill 2048: rate")
    lines += ["", _row("share of the limits", heads)]
    for name, entry in facts["variants"].items():
        shares = ["-" if share is None else f"{share:.0%}" for share in entry["shares"].values()]
        lines.append(_row(name, [f"{entry['weight_mb']:.0f}", *shares]))
    lines += ["", "targets" if facts["targets"] else "no target was measured"]
    for verdict in facts["targets"]:
        lines.append(f"  {'ok    ' if verdict['ok'] else 'MISSED'}  {verdict['target']}: {verdict['shown']}")
    return "\n".join(lines)


def measured_variants(records: Iterable[PeerRecord]) -> list[Variant]:
    """Variants that have a record: ATOM's first, then the others, each in the order of the table."""
    names = {record.variant for record in records}
    present = [variant for name, variant in BY_NAME.items() if name in names]
    return sorted(present, key=lambda variant: not variant.is_atom)


def _limits_line(facts: dict[str, dict[str, float] | None]) -> str:
    titles = {"read_bandwidth": "reads", "matmul_bf16": "bf16 products"}
    titles |= {"matmul_fp32": "fp32 products", "matmul_int8": "int8 products"}
    parts = []
    for field, title in titles.items():
        if (spread := facts[field]) is not None:
            low, middle, high = (f"{spread[key] / 1e9:.0f}" for key in ("min", "median", "max"))
            unit = "GB/s" if field == "read_bandwidth" else "Gop/s"
            parts.append(f"{title} {middle} [{low}-{high}] {unit}")
    return f"machine limits: {', '.join(parts)}"


def _number(field: str, value: float) -> str:
    figure = PEER_FIGURE[field]
    return f"{value / figure.unit_size:.{figure.digits}f}"


def _cell(field: str, spread: dict[str, float] | None) -> str:
    if spread is None:
        return "-"
    low, middle, high = (_number(field, spread[key]) for key in ("min", "median", "max"))
    return middle if low == high else f"{middle} [{low}-{high}]"


def _row(title: str, cells: Iterable[str]) -> str:
    return f"{title:<{_NAME_WIDTH}}" + "".join(f"{cell:<{_CELL_WIDTH}}" for cell in cells).rstrip()


def _spread(found: list[float]) -> dict[str, float] | None:
    if not found:
        return None
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}


def _median(found: list[float]) -> float | None:
    return statistics.median(found) if found else None
