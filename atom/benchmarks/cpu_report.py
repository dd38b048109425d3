"""From measurements of the CPU benchmark to medians, ratios, shares of the machine's limits, and targets."""

import statistics
from dataclasses import dataclass
from typing import Any

import msgspec

from atom.benchmarks.cpu_peer import Measurement
from atom.benchmarks.machine_limits import MachineLimits

_NAME_WIDTH = 30
_CELL_WIDTH = 28


@dataclass(frozen=True)
class Contender:
    """An engine in one of its settings. ``engine`` is a key of ``cpu_peer.ENGINES``."""

    name: str
    engine: str
    dtype: str
    lm_head_dtype: str = "auto"


class Record(msgspec.Struct):
    """One process: a contender in one round, with the machine as it was just before."""

    contender: str
    round: int
    measurement: Measurement
    limits: MachineLimits
    others: float  # share of the machine's CPU time that went to anything else meanwhile, the hypervisor too


@dataclass(frozen=True)
class ModelSize:
    """Elements of the weights: of the blocks, and of the output head, which is the embedding too."""

    num_block_params: int
    num_head_params: int

    def decode_bytes(self, contender: Contender) -> int:
        """Bytes of weights that a decode step reads. Scales and norms of an int8 head are not counted."""
        size = {"bfloat16": 2, "float32": 4}[contender.dtype]
        head_size = 1 if contender.lm_head_dtype == "int8" else size
        return self.num_block_params * size + self.num_head_params * head_size

    @property
    def prefill_flops(self) -> int:
        """Operations of the blocks' products for one prompt token; attention and the head come on top."""
        return 2 * self.num_block_params


@dataclass(frozen=True)
class Figure:
    """A field of ``Measurement`` as people read it: divided by ``unit_size``, with ``digits`` decimals."""

    field: str
    title: str
    unit_size: float = 1.0
    digits: int = 0
    higher_is_better: bool = True


FIGURES = (
    Figure("decode_tok_s", "decode, batch 1 (tok/s)", digits=1),
    Figure("prefill_512_tok_s", "prefill 512 (tok/s)"),
    Figure("prefill_2048_tok_s", "prefill 2048 (tok/s)"),
    Figure("concurrent_tok_s", "16 x 128 in/128 out (tok/s)"),
    Figure("ttft_128_ms", "first token of 128 (ms)", higher_is_better=False),
    Figure("start_to_first_token_s", "start to first token (s)", digits=2, higher_is_better=False),
    Figure("peak_rss_bytes", "peak RSS (MB)", unit_size=1e6, higher_is_better=False),
)
FIGURE = {figure.field: figure for figure in FIGURES}


@dataclass(frozen=True)
class Target:
    """A bound on a figure of ``contender``: of its ratio to ``reference``, or of itself where that is None."""

    field: str
    contender: str
    bound: float
    reference: str | None = None

    def judge(self, records: list[Record]) -> tuple[float, bool] | None:
        """The value and whether it keeps the bound; None when nothing was measured for it."""
        if self.reference is None:
            found = values(records, self.contender, self.field)
        else:
            found = ratios(records, self.contender, self.reference, self.field)
        if not found:
            return None
        value = statistics.median(found)
        return value, value >= self.bound if FIGURE[self.field].higher_is_better else value <= self.bound

    def __str__(self) -> str:
        figure = FIGURE[self.field]
        sign = ">=" if figure.higher_is_better else "<="
        what = f"{figure.title.rsplit(' (', 1)[0]}, {self.contender}"
        if self.reference is not None:
            return f"{what} {sign} {self.bound:g} x {self.reference}"
        unit = figure.title.rsplit("(", 1)[1].rstrip(")")
        return f"{what} {sign} {self.bound / figure.unit_size:g} {unit}"


TRANSFORMERS, ATOM, ATOM_INT8 = "transformers bf16", "atom bf16", "atom bf16 + int8 LM head"
TARGETS = (
    Target("decode_tok_s", ATOM, 1.15, TRANSFORMERS),
    Target("decode_tok_s", ATOM_INT8, 1.5, TRANSFORMERS),
    Target("prefill_512_tok_s", ATOM, 1.3, TRANSFORMERS),
    Target("prefill_2048_tok_s", ATOM, 1.3, TRANSFORMERS),
    Target("concurrent_tok_s", ATOM, 1.5, TRANSFORMERS),
    Target("start_to_first_token_s", ATOM, 4.0),
    Target("peak_rss_bytes", ATOM, 1.6e9),
)


def values(records: list[Record], contender: str, field: str) -> list[float]:
    """The figure in every round of ``contender`` that measured it."""
    found = [getattr(r.measurement, field) for r in records if r.contender == contender]
    return [value for value in found if value is not None]


def ratios(records: list[Record], contender: str, reference: str, field: str) -> list[float]:
    """``contender`` over ``reference``, formed inside each round that has both."""
    by_round: dict[int, dict[str, float]] = {}
    for record in records:
        value = getattr(record.measurement, field)
        if value is not None:
            by_round.setdefault(record.round, {})[record.contender] = value
    pairs = [found for found in by_round.values() if contender in found and reference in found]
    return [found[contender] / found[reference] for found in pairs]


def bandwidth_shares(records: list[Record], contender: Contender, size: ModelSize) -> list[float]:
    """Bytes a second that decoding reads, over what the machine could read just before."""
    return [
        record.measurement.decode_tok_s * size.decode_bytes(contender) / record.limits.read_bandwidth
        for record in records
        if record.contender == contender.name and record.measurement.decode_tok_s is not None
    ]


def matmul_shares(records: list[Record], contender: Contender, field: str, size: ModelSize) -> list[float]:
    """Operations a second of a prefill's products, over those of a large product.

    The faster of bf16 and fp32 for bf16 weights, which may be widened; fp32 for fp32 ones.
    """
    shares = []
    for record in records:
        rate = getattr(record.measurement, field)
        if record.contender == contender.name and rate is not None:
            limit = record.limits.matmul_fp32
            if contender.dtype == "bfloat16":
                limit = max(limit, record.limits.matmul_bf16)
            shares.append(rate * size.prefill_flops / limit)
    return shares


def summary(records: list[Record], contenders: list[Contender], size: ModelSize) -> dict[str, Any]:
    """Everything the table shows, as JSON values: medians, ranges, ratios, shares, targets."""
    reference = contenders[0].name
    result: dict[str, Any] = {"contenders": {}, "ratios": {}, "shares": {}, "targets": []}
    for contender in contenders:
        name = contender.name
        result["contenders"][name] = {
            figure.field: _spread(values(records, name, figure.field)) for figure in FIGURES
        }
        result["shares"][name] = {
            "read_bandwidth": _median(bandwidth_shares(records, contender, size)),
            "matmul_512": _median(matmul_shares(records, contender, "prefill_512_tok_s", size)),
            "matmul_2048": _median(matmul_shares(records, contender, "prefill_2048_tok_s", size)),
        }
        if name != reference:
            result["ratios"][name] = {
                figure.field: _median(ratios(records, name, reference, figure.field)) for figure in FIGURES
            }
    for target in TARGETS:
        verdict = target.judge(records)
        if verdict is not None:
            value, is_kept = verdict
            result["targets"].append(
                {
                    "field": target.field,
                    "target": str(target),
                    "bound": target.bound,
                    "value": value,
                    "ok": is_kept,
                }
            )
    return result


def format_table(records: list[Record], contenders: list[Contender], size: ModelSize) -> str:
    """Figures down, contenders across: median [min-max] and, from the second on, the ratio to the first."""
    facts = summary(records, contenders, size)
    names = [contender.name for contender in contenders]
    lines = [_row("median [min-max], ratio", names), _row("", ["-" * (_CELL_WIDTH - 2)] * len(names))]
    for figure in FIGURES:
        cells = []
        for name in names:
            spread, ratio = facts["contenders"][name][figure.field], None
            if name in facts["ratios"]:
                ratio = facts["ratios"][name][figure.field]
            cells.append(_cell(figure, spread, ratio))
        lines.append(_row(figure.title, cells))
    for key, title in (
        ("read_bandwidth", "decode, of read bandwidth"),
        ("matmul_512", "prefill 512, of matmul rate"),
        ("matmul_2048", "prefill 2048, of matmul rate"),
    ):
        shares = [facts["shares"][name][key] for name in names]
        lines.append(_row(title, ["-" if share is None else f"{share:.0%}" for share in shares]))
    read_mb = [f"{size.decode_bytes(contender) / 1e6:.0f}" for contender in contenders]
    lines.append(_row("weights read a token (MB)", read_mb))
    if facts["targets"]:
        lines += ["", "targets"]
    for target in facts["targets"]:
        value = target["value"] / FIGURE[target["field"]].unit_size
        lines.append(f"  {'ok    ' if target['ok'] else 'MISSED'}  {target['target']}: {value:.4g}")
    return "\n".join(lines)


def limits_line(records: list[Record]) -> str:
    """The machine's limits over the whole run."""
    parts = []
    for field, title, unit_size, unit in (
        ("read_bandwidth", "reads", 1e9, "GB/s"),
        ("matmul_bf16", "bf16 products", 1e9, "GFLOP/s"),
        ("matmul_fp32", "fp32 products", 1e9, "GFLOP/s"),
    ):
        spread = _spread([getattr(record.limits, field) / unit_size for record in records])
        assert spread is not None
        parts.append(f"{title} {spread['median']:.0f} [{spread['min']:.0f}-{spread['max']:.0f}] {unit}")
    return ", ".join(parts)


def _row(title: str, cells: list[str]) -> str:
    return f"{title:<{_NAME_WIDTH}}" + "".join(f"{cell:<{_CELL_WIDTH}}" for cell in cells).rstrip()


def _cell(figure: Figure, spread: dict[str, float] | None, ratio: float | None) -> str:
    if spread is None:
        return "-"
    low, middle, high = (
        f"{spread[key] / figure.unit_size:.{figure.digits}f}" for key in ("min", "median", "max")
    )
    text = middle if low == high else f"{middle} [{low}-{high}]"
    return text if ratio is None else f"{text} {ratio:.2f}x"


def _spread(found: list[float]) -> dict[str, float] | None:
    if not found:
        return None
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}


def _median(found: list[float]) -> float | None:
    return statistics.median(found) if found else None
