"""Start-up time, decode time and graph memory for each compilation level and graph mode.

    python -m atom.benchmarks.level_suite [--models qwen3-0.6b llama-3.1-8b] [--levels 0 2 3] [--json FILE]

Every combination starts twice in a process of its own, with an empty compile cache and then with the one that the
first start left; the second is also timed while it decodes. Weights are random, of the model's real shapes. Prints
a Markdown table.
"""

import argparse
import gc
import itertools
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from atom.benchmarks.child import ChildError, print_result, run_child
from atom.platforms import get_platform
from atom.utils.bytecode_cache import keep_bytecode
from atom.utils.gc_utils import settle_heap

MODELS = Path(__file__).parent / "models"
MODES = ("NONE", "FULL", "TR_HYBRID")
PROMPT_TOKENS = 128
KV_BYTES = 12 << 30
WARM_STEPS, TIMED_STEPS = 16, 64


class LevelResult(msgspec.Struct):
    """One start: seconds by phase, and milliseconds a decode step by batch size."""

    phases: dict[str, float]
    decode_ms: dict[str, float]
    graph_bytes: int
    num_graphs: int
    num_compiled: int
    num_loaded: int

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())


def measure(
    model: str, device: str, level: int, mode: str, cache_dir: str, batches: list[int]
) -> LevelResult:
    """Start an engine in this process and time its decode steps."""
    from atom.runtime.startup_phases import StartupPhases

    phases = StartupPhases(since_creation=True)
    gc.disable()  # as the engine process does, and the line below
    keep_bytecode()
    phases.begin("import torch")
    from atom.config import Config
    from atom.model_engine.engine_core import EngineCore
    from atom.model_engine.messages import Ready

    config = Config.build(
        str(MODELS / model),
        device=device,
        load_dummy="xavier",
        max_model_len=9216,
        kv_cache_memory=KV_BYTES,
        enable_prefix_caching=False,
        compilation_config={"level": level, "cudagraph_mode": mode, "cache_dir": cache_dir},
    )
    messages = []
    core = EngineCore(config, messages.append, phases=phases)
    core.start(lambda phase, fraction: None, settle=settle_heap)
    seconds = next(message for message in messages if isinstance(message, Ready)).phases
    decode_ms = {str(batch): time_decode(core, batch) for batch in batches}
    recorder = core.worker._recorder
    from atom.utils.compile_cache import compilation_counter

    return LevelResult(
        seconds,
        decode_ms,
        recorder.memory if recorder else 0,
        len(recorder.recorded) if recorder else 0,
        compilation_counter.num_compiled,
        compilation_counter.num_loaded,
    )


def time_decode(core, batch: int) -> float:
    """Milliseconds a step while ``batch`` sequences decode."""
    import numpy as np

    from atom.model_engine.messages import AddRequests, NewRequest
    from atom.sampling_params import SamplingParams

    length = WARM_STEPS + TIMED_STEPS + 16
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    requests = [
        NewRequest(
            number + 1,
            np.full(PROMPT_TOKENS, 7 + number, np.int32).tobytes(),
            params,
            [],
            length,
            time.monotonic(),
            hash_seed=1,
        )
        for number in range(batch)
    ]
    core.handle(AddRequests(requests, [None] * batch))
    for _ in range(WARM_STEPS):
        core.step()
    began = time.perf_counter()
    for _ in range(TIMED_STEPS):
        core.step()
    elapsed = time.perf_counter() - began
    while core.has_work:
        core.step()
    return elapsed / TIMED_STEPS * 1e3


def run_suite(
    models: list[str],
    device: str,
    levels: list[int],
    modes: list[str],
    batches: list[int],
    num_parallel: int = 1,
) -> dict[tuple[str, int, str], dict[str, LevelResult]]:
    """Results by ``(model, level, mode)``: ``cold`` and ``warm``; a failure is told and left out.

    ``num_parallel`` cold starts run at a time; warm ones, which are timed, run alone.
    """
    results = {key: {} for key in itertools.product(models, levels, modes)}

    def start(key: tuple[str, int, str], name: str, timed: list[int]) -> None:
        try:
            results[key][name] = result = _start(
                *key, device, os.path.join(root, "-".join(map(str, key))), timed
            )
            print(_line(*key, name, result), file=sys.stderr, flush=True)
        except ChildError as error:
            print(f"{key} {name}: {error}", file=sys.stderr)

    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(num_parallel) as pool:
        list(pool.map(lambda key: start(key, "cold", []), results))
        for key in results:
            start(key, "warm", batches)
    return results


def _start(model: str, level: int, mode: str, device: str, folder: str, batches: list[int]) -> LevelResult:
    # Triton keeps what it compiles: a cold start must not find it either.
    environment = {"TRITON_CACHE_DIR": os.path.join(folder, "triton")}
    args = ["--child", "--device", device, "--models", model, "--levels", str(level), "--modes", mode]
    args += ["--cache-dir", os.path.join(folder, "atom"), "--batches", *map(str, batches or [0])]
    threads = get_platform(device).default_num_threads
    return run_child("atom.benchmarks.level_suite", args, LevelResult, threads, environment)


def _line(model: str, level: int, mode: str, name: str, result: LevelResult) -> str:
    phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in result.phases.items())
    decode = ", ".join(f"{batch}: {ms:.3f} ms" for batch, ms in result.decode_ms.items())
    return (
        f"{model} level {level} {mode} {name}: {result.seconds:.2f} s ({phases}); {result.num_compiled} compiled, "
        f"{result.num_loaded} loaded, {result.num_graphs} graphs; {decode}"
    )


def table(results: dict, batches: list[int]) -> str:
    """A Markdown table of the results; imports are counted apart from the rest of a start."""
    decode = " | ".join(f"decode {batch} (ms)" for batch in batches)
    lines = [
        f"| model | level | graphs | imports (s) | start cold (s) | start warm (s) | {decode} | graph memory (MiB) |",
        "|---" * (7 + len(batches)) + "|",
    ]
    for (model, level, mode), pair in results.items():
        if len(pair) < 2:
            lines.append(f"| {model} | {level} | {mode} |" + " failed |" * (4 + len(batches)))
            continue
        cold, warm = pair["cold"], pair["warm"]
        imports = sum(warm.phases.get(phase, 0.0) for phase in ("imports", "import torch"))
        times = " | ".join(f"{warm.decode_ms[str(batch)]:.3f}" for batch in batches)
        lines.append(
            f"| {model} | {level} | {mode} | {imports:.1f} | {cold.seconds:.1f} | {warm.seconds:.1f} | {times} | "
            f"{warm.graph_bytes / 2**20:.0f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "llama-3.1-8b"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--levels", nargs="+", type=int, default=[0, 2, 3])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--parallel", type=int, default=1, help="cold starts at a time")
    parser.add_argument("--json", help="write the results there")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cache-dir", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        batches = [batch for batch in args.batches if batch]
        print_result(
            measure(args.models[0], args.device, args.levels[0], args.modes[0], args.cache_dir, batches)
        )
        return 0
    results = run_suite(args.models, args.device, args.levels, args.modes, args.batches, args.parallel)
    print(table(results, args.batches))
    if args.json:
        plain = {" ".join(map(str, key)): msgspec.to_builtins(pair) for key, pair in results.items()}
        Path(args.json).write_text(json.dumps(plain, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
