"""The demo model beside transformers on this CPU.

    python -m atom.benchmarks.cpu_suite [--json] [--rounds N] [--quick] [--dtype float32]
    python -m atom.benchmarks.cpu_suite --peers ...      beside other engines too: cpu_peers.suite

Same weights, same dtype, same threads. Each round runs every contender once, in a process of its own, after
waiting for an idle machine; ratios are formed inside a round. What the figures mean is written at
:func:`atom.benchmarks.cpu_peer.measure`; docs/performance.md has the method and the targets.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import msgspec
from tqdm import tqdm

from atom.benchmarks.child import ChildError, run_child
from atom.benchmarks.cpu_peer import SANITY_PROMPT, WORKLOADS, Measurement
from atom.benchmarks.cpu_report import (
    ATOM,
    ATOM_INT8,
    FIGURES,
    TRANSFORMERS,
    Contender,
    ModelSize,
    Record,
    format_table,
    limits_line,
    summary,
)
from atom.benchmarks.demo_export import DemoFolder, export_demo_model
from atom.benchmarks.machine_limits import MachineLimits
from atom.platforms import get_platform

CONTENDERS = {  # the first is what the others are compared with
    "bfloat16": [
        Contender(TRANSFORMERS, "transformers", "bfloat16"),
        Contender(ATOM, "atom", "bfloat16"),
        Contender(ATOM_INT8, "atom", "bfloat16", lm_head_dtype="int8"),
    ],
    "float32": [
        Contender("transformers fp32", "transformers", "float32"),
        Contender("atom fp32", "atom", "float32"),
    ],
}
DEFAULT_ROUNDS = 3
IDLE_SHARE = 0.15  # others may use this much of the machine when a process starts
IDLE_TIMEOUT_S = 60.0
NOISY_SHARE = 0.03  # a run during which others used more than this is repeated
MAX_ATTEMPTS = 3
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def run_rounds(contenders: list[Contender], model: DemoFolder, rounds: int, num_threads: int) -> list[Record]:
    """Every contender once a round. The order turns by one each round, so that none always comes first."""
    records: list[Record] = []
    order = [
        (n, contenders[(n + i) % len(contenders)]) for n in range(rounds) for i in range(len(contenders))
    ]
    with tqdm(order, unit="run", file=sys.stderr, disable=not sys.stderr.isatty()) as bar:
        for number, contender in bar:
            bar.set_description(f"round {number + 1}/{rounds}, {contender.name}")
            record = run_contender(contender, number, model, num_threads)
            records.append(record)
            tqdm.write(describe_record(record), file=sys.stderr)
    return records


def run_contender(contender: Contender, number: int, model: DemoFolder, num_threads: int) -> Record:
    """A run that others did not disturb, or after MAX_ATTEMPTS the least disturbed one."""
    attempts: list[Record] = []
    while True:
        wait_until_idle()
        limits = run_child(
            "atom.benchmarks.machine_limits", ["--num-threads", str(num_threads)], MachineLimits, num_threads
        )
        idle, total, own = *cpu_ticks(), own_ticks()
        measurement = measure_contender(contender, model, num_threads)
        new_idle, new_total = cpu_ticks()
        others = 1 - (new_idle - idle + own_ticks() - own) / max(1, new_total - total)
        attempts.append(Record(contender.name, number, measurement, limits, max(0.0, others)))
        if others < NOISY_SHARE or len(attempts) == MAX_ATTEMPTS:
            return min(attempts, key=lambda record: record.others)


def measure_contender(
    contender: Contender, model: DemoFolder, num_threads: int, start_only: bool = False
) -> Measurement:
    """One run of ``contender`` in a fresh process. Raises ChildError."""
    args = [contender.engine, "--model", model.folder if contender.engine == "transformers" else "demo"]
    args += ["--dtype", contender.dtype, "--num-threads", str(num_threads)]
    if contender.lm_head_dtype != "auto":
        args += ["--engine-args", json.dumps({"lm_head_dtype": contender.lm_head_dtype})]
    args += ["--workloads", *(() if start_only else WORKLOADS)]
    args += ["--launched-at", repr(time.monotonic())]
    return run_child("atom.benchmarks.cpu_peer", args, Measurement, num_threads)


def describe_record(record: Record) -> str:
    """One line for who waits."""
    parts = []
    for figure in FIGURES:
        value = getattr(record.measurement, figure.field)
        if value is not None:
            parts.append(f"{figure.title.rsplit(' (', 1)[0]} {value / figure.unit_size:.{figure.digits}f}")
    noise = f"{record.others:.1%} of the CPU time went to others"
    return f"round {record.round + 1}, {record.contender}: {'; '.join(parts)} ({noise})"


def cpu_ticks() -> tuple[int, int]:
    """Clock ticks of the whole machine since boot: idle, and all."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return fields[3] + fields[4], sum(fields[:8])


def own_ticks() -> int:
    """Clock ticks that children of this process have used, once they have ended."""
    times = os.times()
    return round((times.children_user + times.children_system) * _TICKS_PER_S)


def wait_until_idle(interval_s: float = 0.5, timeout_s: float = IDLE_TIMEOUT_S) -> None:
    """Wait until others use less than IDLE_SHARE of the machine, ``timeout_s`` at most."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        idle, total = cpu_ticks()
        time.sleep(interval_s)
        new_idle, new_total = cpu_ticks()
        if new_idle - idle > (1 - IDLE_SHARE) * (new_total - total):
            return


def decode_text(ids: list[int]) -> str:
    from atom.model_loader.model_files import ModelFiles

    return ModelFiles.resolve("demo").load_tokenizer().decode(ids)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if "--peers" in argv:
        from atom.benchmarks.cpu_peers.suite import main as compare_with_peers

        return compare_with_peers([word for word in argv if word != "--peers"])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", action="store_true", help="other engines too; --peers --help has more")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--rounds", type=int, default=DEFAULT_ROUNDS, help="runs of every contender")
    parser.add_argument(
        "--quick", action="store_true", help="one round: a first impression in about 2 minutes"
    )
    parser.add_argument("--dtype", choices=sorted(CONTENDERS), default="bfloat16")
    parser.add_argument("--num-threads", type=int, help="compute threads; default: one a core")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    rounds = 1 if args.quick else args.rounds

    platform = get_platform("cpu")
    num_threads = args.num_threads or platform.default_num_threads
    facts = platform.describe()
    machine = f"{facts['cores']} cores, {facts['instruction sets']}, {num_threads} threads"
    contenders = CONTENDERS[args.dtype]
    try:
        model = export_demo_model(args.dtype, num_threads)
        size = ModelSize(model.num_block_params, model.num_head_params)
        print("starting every contender once, untimed, for a warm page cache", file=sys.stderr)
        for contender in contenders:
            measure_contender(contender, model, num_threads, start_only=True)
        records = run_rounds(contenders, model, rounds, num_threads)
    except ChildError as error:
        print(f"cpu_suite: {error}", file=sys.stderr)
        return 1

    print(f"gemma-3-270m, {args.dtype}; {rounds} rounds; {machine}")
    print(f"machine limits: {limits_line(records)}\n")
    print(format_table(records, contenders, size))
    print(f"\ngreedy text after {SANITY_PROMPT!r}:")
    for contender in contenders:
        ids = next(r.measurement.sanity_ids for r in records if r.contender == contender.name)
        print(f"  {contender.name}: {decode_text(ids)!r}")
    if args.json:
        result = {"machine": machine, "dtype": args.dtype, "rounds": rounds}
        result |= summary(records, contenders, size) | {"records": msgspec.to_builtins(records)}
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
