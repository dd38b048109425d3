"""Running variants in rounds: every one once a round, in processes of its own, the machine probed beside it."""

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

import atom
from atom.benchmarks.child import ChildError, run_child, thread_environment
from atom.benchmarks.cpu_peer import WORKLOADS, Measurement
from atom.benchmarks.cpu_peers.http_load import ATOM_DIALECT, LLAMA_DIALECT, free_port, measure_server
from atom.benchmarks.cpu_peers.installers import (
    install_all,
    llama_file,
    llama_program,
    model_folder,
    openvino_folder,
)
from atom.benchmarks.cpu_peers.llama_cpp import LlamaPrograms
from atom.benchmarks.cpu_peers.variants import HTTP, Variant
from atom.benchmarks.cpu_peers.workspace import PeerUnavailable, Workspace
from atom.benchmarks.cpu_suite import NOISY_SHARE, cpu_ticks, own_ticks, wait_until_idle
from atom.benchmarks.machine_limits import MachineLimits
from atom.config import Config, check_supported
from atom.errors import AtomError

_ENVIRONMENTS = {
    "openvino": "ov",
    "vllm": "vllm",
}  # peer -> its virtual environment; the others run in ATOM's


class PeerRecord(msgspec.Struct):
    """One variant in one round, with the machine as it was just before.

    ``others``: share of the machine's CPU time that went to anything else meanwhile, the hypervisor too.
    """

    variant: str
    round: int
    measurement: Measurement
    limits: MachineLimits
    others: float
    text: str = ""  # greedy text after the sanity prompt


@dataclass(frozen=True)
class Plan:
    """How a round is run. ``max_attempts``: runs that others disturbed are repeated up to so many times."""

    num_threads: int
    workloads: tuple[str, ...]
    max_attempts: int
    idle_timeout_s: float


def available(
    work: Workspace, variants: Iterable[Variant], install: bool
) -> tuple[list[Variant], dict[str, str]]:
    """Variants that can run, and for the others the reason by name."""
    variants = list(variants)
    reasons: dict[str, str] = {}
    peers = list(dict.fromkeys(variant.peer for variant in variants if not variant.is_atom))
    missing = install_all(work, peers) if install else {}
    for variant in variants:
        if variant.peer in missing:
            reasons[variant.name] = missing[variant.peer]
        elif variant.is_atom:
            try:
                check_supported(Config.build("demo", **_atom_settings(variant)))
            except (AtomError, TypeError) as error:
                reasons[variant.name] = str(error).splitlines()[0]
    return [variant for variant in variants if variant.name not in reasons], reasons


class RoundRunner:
    """Measures variants. One whose run fails is left out from then on; ``reasons`` says why."""

    def __init__(self, work: Workspace, plan: Plan, decode_text: Callable[[list[int]], str]):
        self._work, self._plan, self._decode_text = work, plan, decode_text
        self.reasons: dict[str, str] = {}

    def run_round(self, number: int, variants: Sequence[Variant]) -> Iterable[PeerRecord]:
        """Every variant once; the order turns by one each round, so that none always comes first."""
        shift = number % max(1, len(variants))
        for variant in (*variants[shift:], *variants[:shift]):
            if variant.name in self.reasons:
                continue
            try:
                yield self._measure_quietly(variant, number)
            except (ChildError, PeerUnavailable, OSError) as error:
                self.reasons[variant.name] = failure_reason(error)
                print(f"{variant.name} is left out: {self.reasons[variant.name]}", file=sys.stderr)

    def _measure_quietly(self, variant: Variant, number: int) -> PeerRecord:
        """The run that others disturbed least."""
        attempts: list[PeerRecord] = []
        while True:
            wait_until_idle(timeout_s=self._plan.idle_timeout_s)
            threads = self._plan.num_threads
            limits = run_child(
                "atom.benchmarks.machine_limits",
                ["--num-threads", str(threads), "--int8"],
                MachineLimits,
                threads,
            )
            idle, total, own = *cpu_ticks(), own_ticks()
            measurement, text = self.measure(variant)
            new_idle, new_total = cpu_ticks()
            others = 1 - (new_idle - idle + own_ticks() - own) / max(1, new_total - total)
            attempts.append(PeerRecord(variant.name, number, measurement, limits, max(0.0, others), text))
            if others < NOISY_SHARE or len(attempts) >= self._plan.max_attempts:
                return min(attempts, key=lambda record: record.others)

    def measure(self, variant: Variant) -> tuple[Measurement, str]:
        """Figures of the workloads that are asked for and that the variant has, and its greedy text."""
        asked = [name for name in self._plan.workloads if name in variant.workloads]
        in_process = [name for name in asked if name in WORKLOADS]
        text = ""
        if variant.peer == "llama.cpp":
            programs = self._llama(variant)
            measurement = programs.measure(in_process)
            text = programs.sanity_text()
        else:
            measurement = self._run_python(variant, in_process)
            text = self._decode_text(measurement.sanity_ids)
        if HTTP in asked:
            self._serve(variant, measurement)
        return measurement, text

    def _run_python(self, variant: Variant, workloads: Collection[str]) -> Measurement:
        peer, model, arguments = variant.peer, "demo", dict(variant.settings)
        if peer == "openvino":
            model = str(openvino_folder(self._work, arguments.pop("format")))
        elif not variant.is_atom:
            model = str(model_folder(self._work))
        args = [peer, "--model", model, "--num-threads", str(self._plan.num_threads)]
        args += ["--engine-args", json.dumps(arguments), "--workloads", *workloads]
        interpreter = self._work.python(_ENVIRONMENTS[peer]) if peer in _ENVIRONMENTS else sys.executable
        args += ["--launched-at", repr(time.monotonic())]
        return run_child(
            "atom.benchmarks.cpu_peer",
            args,
            Measurement,
            self._plan.num_threads,
            environment=_import_path(),
            interpreter=interpreter,
        )

    def _serve(self, variant: Variant, measurement: Measurement) -> None:
        port = free_port()
        environment = thread_environment(self._plan.num_threads) | _import_path()
        if variant.is_atom:
            command = atom_server_command(variant, port, self._plan.num_threads)
            result = measure_server(command, port, ATOM_DIALECT, environment)
        else:
            result = measure_server(
                self._llama(variant).server_command(port), port, LLAMA_DIALECT, environment
            )
        measurement.http_tok_s, measurement.serving_rss_bytes = result.tok_s, result.peak_rss_bytes

    def _llama(self, variant: Variant) -> LlamaPrograms:
        file = llama_file(self._work, variant.settings["file"])
        return LlamaPrograms(lambda name: llama_program(self._work, name), file, self._plan.num_threads)


def atom_server_command(variant: Variant, port: int, num_threads: int) -> list[str]:
    """``atom serve`` with a variant's settings as flags."""
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in _atom_settings(variant).items()]
    options = ["--num-threads", str(num_threads), "--no-enable-prefix-caching", "--server-port", str(port)]
    return [sys.executable, "-m", "atom.cli", "serve", "demo", *flags, *options]


def failure_reason(error: Exception) -> str:
    """One line for a report: of a child's output the last line that names an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line]
    return (named or lines or [type(error).__name__])[-1][:300]


def _atom_settings(variant: Variant) -> dict[str, object]:
    return {"device": "cpu", "dtype": "bfloat16", **variant.settings}


def _import_path() -> dict[str, str]:
    """Lets other interpreters, and other working folders, import this very ATOM."""
    root = str(Path(atom.__file__).parents[1])
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{root}{os.pathsep}{before}" if before else root}
