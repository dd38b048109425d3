"""ATOM on a GPU, by the definitions that its peers were measured with.

    python -m atom.benchmarks.gpu_suite [--models qwen3-0.6b ...] [--only decode_b1 ...] [--json OUT]

Weights are random, of the models' real shapes, and each model's engine starts once. Each figure is printed beside
the peer's, the targets and the share of the bound (``gpu_roofline``). Results are written after every workload, so a
run that is cut short keeps what it has; ``--budget`` ends it in good time instead. Of a prefill, the rate of its
operations and the share of the measured matmul peak stand in the last column; with ``--gaps``, of a decode step the
time for which the device does not compute: wall time less device events around the forward passes.

The engine has a process of its own, as in the server. With ``--in-process`` it computes in this one, as the peers'
offline engines do where that is faster for them; the record's settings say which it was.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from atom.benchmarks.gpu_roofline import H200, H200_FP8, Ceilings, ModelShape
from atom.benchmarks.gpu_workloads import (
    FOLDER,
    Figures,
    WorkloadFile,
    load_workloads,
    read_model_config,
    run_workload,
)
from atom.model_engine.arg_utils import EngineArgs
from atom.model_engine.llm_engine import LLMEngine
from atom.runtime.histogram import unflatten
from atom.sampling_params import SamplingParams
from atom.utils.cli_parser import FlexibleArgumentParser
from atom.utils.gc_utils import settle_heap, unfreeze_heap

PEERS_FILE = FOLDER / "gpu_peers.json"
DENSE_MODELS = ["qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b"]
_MAX_ERROR = 500  # characters of an error that the record keeps


class NoText:
    """Stands for a tokenizer where nobody reads the text: every id means nothing, none ends an answer."""

    bos_id: int | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    eos_ids: tuple[int, ...] = ()
    special_ids: frozenset[int] = frozenset()
    chat_template: str | None = None

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return []

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return ""

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def id_to_token(self, token_id: int) -> str:
        return ""

    def token_to_id(self, token: str) -> int | None:
        return None


class AtomEngine:
    """ATOM's offline engine as the workloads call it."""

    def __init__(self, engine: LLMEngine, settings: dict[str, Any]):
        self._engine = engine
        self._settings = settings

    def generate(self, prompts: list[list[int]], output_len: int, temperature: float) -> list[list[int]]:
        params = SamplingParams(temperature=temperature, max_tokens=output_len, ignore_eos=True)
        answers = self._engine.generate(prompts, params, use_tqdm=False)
        return [answer["token_ids"] for answer in answers]

    def device_seconds(self) -> float | None:
        values = self._engine.get_metrics_statistics()
        spans = [unflatten(name, values) for name in ("gpu_forward_seconds", "gpu_sample_seconds")]
        return None if None in spans else sum(total for _, total in spans)

    def info(self) -> dict[str, Any]:
        import torch

        return {
            "name": "atom",
            "torch": torch.__version__,
            "settings": self._settings,
            "start": self._engine.phases,
            **self._engine.info(),
        }


def run_model(
    args: EngineArgs,
    model: str,
    folder: Path,
    spec: WorkloadFile,
    only: list[str] | None,
    record: dict[str, Any],
    out: Path | None,
    deadline: float,
    in_process: bool = False,
) -> list[Figures]:
    """Start one model's engine and run its workloads until ``deadline`` (``time.monotonic``).

    A workload that fails is recorded with its error and the rest go on. ``record`` is filled, and written to
    ``out``, after each workload.
    """
    config = read_model_config(folder)
    args.model = str(folder)
    settings = {
        name: value for name, value in vars(args).items() if value != getattr(EngineArgs(), name, None)
    }
    settings["in_process"] = in_process
    is_fp8 = (args.online_quant_config or {}).get("global_quant_config") == "ptpc_fp8"
    entry: dict[str, Any] = {"model": model, "results": [], "skipped": []}
    record.setdefault("models", []).append(entry)
    results: list[Figures] = []
    with _engine(args, NoText(config["vocab_size"]), in_process) as llm:
        engine = AtomEngine(llm, settings)
        entry["engine"] = engine.info()
        for workload in spec.of_model(model, only):
            if time.monotonic() > deadline:
                entry["skipped"].append(workload.id)
                continue
            try:
                figures = run_workload(engine, workload, config["vocab_size"], spec.seed)
            except Exception as error:  # the other workloads are still of use
                figures = Figures(**{name: getattr(workload, name) for name in Figures.__struct_fields__[:6]})
                figures.error = f"{type(error).__name__}: {error}"[:_MAX_ERROR]
            results.append(figures)
            entry["results"].append(msgspec.to_builtins(figures))
            _write(record, out)
            print(row(model, config, figures, is_fp8), flush=True)
    if entry["skipped"]:
        print(f"{model}: no time for {', '.join(entry['skipped'])}", flush=True)
    _write(record, out)
    return results


@contextmanager
def _engine(args: EngineArgs, tokenizer: NoText, in_process: bool) -> Iterator[LLMEngine]:
    """A started engine. In this process its heap is settled, as a process of its own does, and memory is given back."""
    with args.create_engine(tokenizer, in_process=in_process) as engine:
        if in_process:
            settle_heap()
        yield engine
    if in_process:
        import torch

        unfreeze_heap()
        gc.collect()
        torch.cuda.empty_cache()


def _write(record: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.write_text(json.dumps(record, indent=1))


HEADER = (
    "| model | workload | ATOM | vLLM | first | final | bound | share of bound | met | device |\n"
    + "|---" * 10
    + "|"
)


def row(model: str, config: dict[str, Any], figures: Figures, is_fp8: bool = False) -> str:
    """One line of the table. Shares are of the H200's measured ceilings, with ``is_fp8`` those of layers in fp8; the
    peer's figures and the targets are of bf16.
    """
    head = f"| {model} | {figures.id} |"
    if figures.error:
        return f"{head} {figures.error} |" + " |" * 7
    unit = "tok/s" if figures.kind == "throughput" else "ms"
    ceilings = H200_FP8 if is_fp8 else H200
    bound = ModelShape(config, layer_bytes=1 if is_fp8 else 2).bound_s(
        figures.kind, figures.concurrency, figures.prompt_len, figures.output_len, ceilings
    )
    peers = peer_figures().get(model, {}).get(figures.id, [None, None, None])
    bound_value = bound * 1e3
    if figures.kind == "throughput":
        bound_value = figures.concurrency * figures.output_len / bound
    numbers = [figures.value, *peers, bound_value]
    cells = " | ".join("" if number is None else _format(number, unit) for number in numbers)
    share = f"{bound / figures.seconds:.0%}"
    return (
        f"{head} {cells} | {share} | {verdict(figures, peers)} | {device_facts(config, figures, ceilings)} |"
    )


def device_facts(config: dict[str, Any], figures: Figures, ceilings: Ceilings = H200) -> str:
    """How busy the device was: a prefill's operations a second, and their share of the matmul peak; a decode step's
    gap. Empty where there is nothing to say.
    """
    if figures.kind == "prefill":
        flops = ModelShape(config).prefill_flops(figures.concurrency, figures.prompt_len)
        rate = flops / figures.seconds / 1e12
        return f"{rate:.0f} TFLOP/s, {rate / ceilings.matmul_tflop_s:.0%} of peak"
    if figures.gap_s is None:
        return ""
    return f"gap {figures.gap_s * 1e6:.1f} us, {figures.gap_s / figures.seconds:.1%}"


def verdict(figures: Figures, peers: list[float | None]) -> str:
    """The furthest of peer, first and final target that the figure reaches."""
    reached = "behind vLLM" if any(peers) else ""
    for name, target in zip(("vLLM", "first", "final"), peers, strict=True):
        if target is None:
            continue
        is_met = figures.value >= target if figures.kind == "throughput" else figures.value <= target
        if not is_met:
            break
        reached = name
    return reached


def peer_figures() -> dict[str, dict[str, list[float | None]]]:
    """By model and workload: the peer's figure, and our first and final target."""
    return json.loads(PEERS_FILE.read_text())["figures"]


def _format(number: float, unit: str) -> str:
    if unit == "tok/s":
        return f"{number:,.0f} {unit}"
    return f"{number:.3f} {unit}" if number < 10 else f"{number:.1f} {unit}"


def main(argv: list[str] | None = None) -> int:
    parser = FlexibleArgumentParser(
        prog="atom.benchmarks.gpu_suite",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(
        load_dummy="xavier", enable_prefix_caching=False, dtype=None, max_model_len=None, max_num_seqs=None
    )
    parser.add_argument("--workloads", help="Workload file; default: the one that peers were measured with.")
    parser.add_argument("--models", nargs="+", help="Default: the dense ones, or all of --workloads.")
    parser.add_argument("--only", nargs="+", help="Ids of workloads; default: all of the model.")
    parser.add_argument(
        "--budget", type=float, default=540.0, help="No workload starts after so many seconds."
    )
    parser.add_argument(
        "--gaps", action="store_true", help="Measure how long the device waits between decode steps."
    )
    parser.add_argument(
        "--in-process",
        action="store_true",
        help="Compute in this process instead of one of the engine's own.",
    )
    parser.add_argument("--json", type=Path, help="Write the results there, after every workload.")
    namespace = parser.parse_args(argv)
    if namespace.gaps:
        os.environ["ATOM_ENABLE_METRICS_DEVICE_TIMER"] = "1"  # the engine's process inherits it
    began = time.monotonic()
    try:
        spec, root = load_workloads(namespace.workloads)
    except ValueError as error:
        parser.error(str(error))
    models = namespace.models or (list(spec.models) if namespace.workloads else DENSE_MODELS)
    unknown = [model for model in models if model not in spec.models]
    if unknown:
        parser.error(f"--models: {unknown[0]!r} is not one of {', '.join(spec.models)}")
    namespace.dtype = namespace.dtype or spec.dtype
    namespace.max_model_len = namespace.max_model_len or spec.max_model_len
    namespace.max_num_seqs = namespace.max_num_seqs or max(w.concurrency for w in spec.workloads)
    record: dict[str, Any] = {}
    print(HEADER, flush=True)
    failed = False
    for model in models:
        args = EngineArgs.from_cli_args(namespace)
        folder = root / spec.models[model]
        deadline = began + namespace.budget
        results = run_model(
            args,
            model,
            folder,
            spec,
            namespace.only,
            record,
            namespace.json,
            deadline,
            namespace.in_process,
        )
        failed = failed or any(figures.error for figures in results)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
