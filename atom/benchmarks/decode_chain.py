"""Decode steps of the dense models on a GPU: checked, timed as graph replays and through the engine.

    python -m atom.benchmarks.decode_chain [--models qwen3-0.6b ...] [--batches 1 8 32] [--plain] [--parts] [--json OUT]
    python -m atom.benchmarks.decode_chain --variants [--models ...] [--batches ...]
    python -m atom.benchmarks.decode_chain --attention [--models ...] [--batches 8 32 64] [--budget S]

A workload is the peers' decode_bN: N sequences with a prompt of 128 tokens, 256 tokens out. ``graph`` is the device
time of the recorded step, its context growing from 128 to 384; the head of more than 64 sequences is not recorded.
``engine`` is the wall-clock time of a step of the engine core, with scheduling, sampling and reading back. Weights are
random, of the models' real shapes. Each model runs in a process of its own, after its kernels were compiled side by
side. ``--plain`` times the modules as well, ``--parts`` what a step takes without its attention and without its head,
``--variants`` recorded steps with other forms of attention, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from atom.benchmarks.child import lines_of_child, print_line
from atom.benchmarks.decode_launches import SHAPES, compile_side_by_side, launches_of, record_step
from atom.benchmarks.gpu_measure import device_us, relative_error
from atom.benchmarks.gpu_roofline import H200
from atom.kernels.triton.decode_choices import MAX_TOKENS

MODELS = Path(__file__).parent / "models"
BATCHES, ATTENTION_BATCHES = (1, 8, 32), (8, 32, 64)
PROMPT_TOKENS, NEW_TOKENS = 128, 256
TARGETS = {  # milliseconds a token, first and final
    "qwen3-0.6b": {1: (0.75, 0.50), 8: (0.90, 0.60), 32: (1.15, 0.85)},
    "llama-3.2-1b": {1: (0.95, 0.72), 8: (1.05, 0.80), 32: (1.20, 0.95)},
    "llama-3.1-8b": {1: (4.30, 3.85), 8: (4.45, 4.00), 32: (5.00, 4.50)},
}
PEERS = {
    "qwen3-0.6b": {1: 1.611, 8: 1.608, 32: 2.113},
    "llama-3.2-1b": {1: 1.831, 8: 1.724, 32: 1.930},
    "llama-3.1-8b": {1: 4.946, 8: 5.064, 32: 5.538},
}


def build_engine(
    model: str, batches: list[int], device: str, folder: Path = MODELS, max_step_tokens: int = 4096
) -> Any:
    """A started engine core with decode graphs of ``batches`` and invented weights."""
    from atom.config import Config
    from atom.model_engine.engine_core import EngineCore

    config = Config.build(
        str(folder / model),
        device=device,
        load_dummy="xavier",
        max_model_len=9216,
        max_num_seqs=max(batches),
        max_num_batched_tokens=max_step_tokens,
        kv_cache_memory=(8 << 30) * (1 + (max(batches) > MAX_TOKENS)) if device == "cuda" else 64 << 20,
        enable_prefix_caching=False,
        compilation_config={"level": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": tuple(batches)},
    )
    core = EngineCore(config, lambda message: None)
    core.start(lambda phase, fraction: None)
    return core


def time_engine(core: Any, batch: int, new_tokens: int = NEW_TOKENS) -> float:
    """Milliseconds a step of the engine core: the median over the workload's decode steps."""
    import numpy as np

    from atom.model_engine.messages import AddRequests, NewRequest
    from atom.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    requests = [
        NewRequest(
            number + 1,
            np.full(PROMPT_TOKENS, 7 + number, np.int32).tobytes(),
            params,
            [],
            new_tokens,
            time.monotonic(),
            hash_seed=1,
        )
        for number in range(batch)
    ]
    core.handle(AddRequests(requests, [None] * batch))
    stamps = []
    while core.has_work:
        core.step()
        stamps.append(time.perf_counter())
    spans = [after - before for before, after in zip(stamps, stamps[1:], strict=False)][4:-2]
    # The mean of what the machine does undisturbed: spans of single steps jitter with the host.
    spans.sort()
    kept = spans[: max(1, len(spans) * 9 // 10)]
    return sum(kept) / len(kept) * 1e3


class Replays:
    """Recorded steps of ``batch`` sequences whose contexts begin at 128 tokens, with random keys and values."""

    def __init__(self, core: Any, batch: int):
        import torch

        from atom.utils.region_graph import request_bucket

        self.torch = torch
        self.forward = forward = core.worker._forward
        self.tables = tables = forward.tables
        self.batch, self.bucket = batch, request_bucket(batch, 1)
        columns = -(-(PROMPT_TOKENS + NEW_TOKENS) // tables.block_size) + 1
        for table in tables.block_tables:
            pages = torch.randperm(batch * columns, device=table.device).int() + 1
            table[:batch, :columns] = pages.view(batch, columns)
        for cache in forward._kv_caches.values():
            for tensor in (cache.k_cache, cache.v_cache):
                tensor[: batch * columns + 1].normal_()
        self.record()

    def reset(self, context: int = PROMPT_TOKENS) -> None:
        self.tables.computed[: self.batch] = context
        self.tables.last_token[: self.batch] = self.torch.arange(self.batch, device=self.tables.device) + 11

    def run(self) -> None:
        fused = self.forward.model.fused
        if fused is not None and fused.outbox is not None:
            fused.outbox.forget()
        self.forward.req_graph.replay(self.bucket)

    def record(self) -> None:
        """Record this bucket alone, as the step is now; recordings of others are dropped."""
        self.forward.req_graph.clear()
        self.forward.rehearse(self.batch, self.batch, False)
        self.forward.run_rehearsed()
        self.torch.cuda.synchronize()
        self.forward.record_request()
        self.torch.cuda.synchronize()
        packed = self.forward._publisher.buffer
        packed[: self.batch] = self.torch.arange(self.batch, dtype=self.torch.int32, device=packed.device)
        self.reset()

    def time_ms(self, steps: int = NEW_TOKENS - 2, repeats: int = 3, context: int = PROMPT_TOKENS) -> float:
        """Milliseconds a replay: the best of ``repeats`` runs over ``steps`` contexts from ``context`` on."""
        best = float("inf")
        for _ in range(repeats):
            self.reset(context)
            self.run()
            best = min(best, device_us(self.run, steps) / 1e3)
        self.reset()
        return best

    def check_replays(self, count: int = 20) -> str:
        """Whether replays with dependent launch equal the same kernels launched one after the other, bit for bit."""
        fused = self.forward.model.fused
        switched = (fused, fused._linear, fused._attention)
        names = ("_uses_pdl", "uses_pdl", "uses_pdl")

        def state() -> list[Any]:
            n = self.batch
            if n > MAX_TOKENS:
                return [fused.many_hidden[:n].clone()]
            return [fused.hidden[:n].clone(), fused.token_ids[:n].clone()]

        self.reset()
        usual = [getattr(owner, name) for owner, name in zip(switched, names, strict=True)]
        for owner, name in zip(switched, names, strict=True):
            setattr(owner, name, False)
        self.record()
        fused.want_logits(True)
        self.run()
        plain = state()
        for owner, name, value in zip(switched, names, usual, strict=True):
            setattr(owner, name, value)
        self.record()
        same = alike = 0
        first = None
        for _ in range(count):
            self.reset()
            for buffer in (
                fused._x,
                fused._scaled,
                fused._qkv,
                fused._attended,
                fused._gated,
                fused.hidden,
                fused.many_hidden,
                fused.logits,
            ):
                buffer.fill_(float("nan"))
            self.run()
            now = state()
            first = first or now
            alike += all(self.torch.equal(a, b) for a, b in zip(now, first, strict=True))
            same += all(self.torch.equal(a, b) for a, b in zip(now, plain, strict=True))
        error = relative_error(first[0], plain[0])
        return (
            f"{alike}/{count} replays alike, {same}/{count} equal to plain launches (difference {error:.1e})"
        )

    def check_modules(self) -> str:
        """The fused step beside the modules, from the same state: relative error of the hidden states, ids."""
        torch, model = self.torch, self.forward.model
        fused = model.fused
        self.reset()
        self.run()
        torch.cuda.synchronize()
        if self.batch > MAX_TOKENS:
            hidden = fused.many_hidden[: self.batch].clone()
            ids = model.compute_logits(hidden).argmax(-1)
        else:
            hidden, ids = fused.hidden[: self.batch].clone(), fused.token_ids[: self.batch].clone()
        self.reset()
        model.fused = None
        try:
            plain, *_ = self.forward_eagerly()
            logits = model.compute_logits(plain[: self.batch]).float()
        finally:
            model.fused = fused
        error = relative_error(hidden, plain)
        gap = float((logits.amax(-1) - logits.gather(-1, ids[:, None])[:, 0]).max())
        scale = float(logits.std())
        verdict = "ok" if error < 5e-2 and gap < 0.3 * scale else "WRONG"
        return f"hidden {error:.1e}, ids at most {gap:.3f} below the best (logits' spread {scale:.2f}): {verdict}"

    def forward_eagerly(self) -> Any:
        """The modules over the state of the tables."""
        forward = self.forward
        forward.rehearse(self.batch, self.batch, False)
        packed = forward._publisher.buffer
        packed[: self.batch] = self.torch.arange(self.batch, dtype=self.torch.int32, device=packed.device)
        return forward._forward()


def run_model(model: str, batches: list[int], with_plain: bool, with_parts: bool) -> list[dict[str, Any]]:
    """One line a batch; what fails is told and left out."""
    core = build_engine(model, batches, "cuda")
    fused = core.worker.model.fused
    print(f"{model}: fused {fused is not None}", flush=True)
    shape = next(shape for shape in SHAPES if shape.name == model)
    lines = []
    for batch in batches:
        line: dict[str, Any] = {"model": model, "batch": batch}
        replays = Replays(core, batch)
        if fused is not None:
            line["modules"] = replays.check_modules()
            line["replays"] = replays.check_replays()
            print(f"{model} b{batch}: {line['modules']}; {line['replays']}", flush=True)
            fused.want_logits(False)
        is_many = batch > MAX_TOKENS
        repeats = 1 if is_many else 3
        line["graph_ms"] = replays.time_ms(repeats=repeats)
        if fused is not None and not is_many:
            line["with_logits_ms"] = _with_logits(fused, replays)
            if with_parts:
                line |= _time_parts(fused, replays)
        line["engine_ms"] = time_engine(core, batch)
        if with_plain and fused is not None:
            core.worker.model.fused = None
            replays.record()
            line["modules_graph_ms"] = replays.time_ms(repeats=repeats)
            core.worker.model.fused = fused
            replays.record()
        line["bound_ms"] = _step_bytes(shape, batch) / H200.read_gb_s / 1e6
        print(json.dumps(line), flush=True)
        lines.append(line)
    return lines


def run_variants(model: str, batches: list[int], budget_s: float) -> list[dict[str, Any]]:
    """One line a batch: milliseconds of the recorded step by variant; the batches share the budget."""
    from atom.benchmarks.decode_variants import time_variants

    core = build_engine(model, batches, "cuda", max_step_tokens=256)
    fused = core.worker.model.fused
    shape = next(shape for shape in SHAPES if shape.name == model)
    lines = []
    for batch in batches:
        replays = Replays(core, batch)
        print(f"{model} b{batch}: {replays.check_modules()}; {replays.check_replays(5)}", flush=True)
        fused.want_logits(False)
        times = time_variants(fused, replays, shape, budget_s / len(batches))
        for name, milliseconds in sorted(times.items(), key=lambda item: item[1]):
            print(f"   {milliseconds:.4f} {name}", flush=True)
        lines.append({"model": model, "batch": batch, "graph_ms": times.get("usual"), "variants": times})
    return lines


def _step_bytes(shape: Any, batch: int) -> int:
    """Weights once, keys and values of the mean context."""
    weights = shape.layer_weights * _num_layers(shape.name)
    kept = (
        2 * shape.num_kv_heads * shape.head_dim * (PROMPT_TOKENS + NEW_TOKENS // 2) * _num_layers(shape.name)
    )
    head = shape.vocab_size * shape.hidden_size if batch <= MAX_TOKENS else 0  # which is not recorded
    return 2 * (weights + head + kept * batch)


def _num_layers(model: str) -> int:
    return json.loads((MODELS / model / "config.json").read_text())["num_hidden_layers"]


def _with_logits(fused: Any, replays: Replays) -> float:
    fused.want_logits(True)
    try:
        return replays.time_ms()
    finally:
        fused.want_logits(False)


def _time_parts(fused: Any, replays: Replays) -> dict[str, float]:
    """The step without its attention, and without its head (the results are then nonsense)."""
    import atom.model_ops.fused_cuda as module

    found = {}
    own_attention, own_head = fused._attention, module.head
    try:
        fused._attention = lambda *args, **options: None
        replays.record()
        found["no_attention_ms"] = replays.time_ms()
        fused._attention = own_attention
        module.head = lambda *args, **options: None
        replays.record()
        found["no_head_ms"] = replays.time_ms()
        module.head = own_head
    finally:
        fused._attention, module.head = own_attention, own_head
        replays.record()
    return found


def table_of(lines: list[dict[str, Any]]) -> str:
    """A Markdown table, peers' figures and targets beside ours."""
    rows = [
        "| model, batch | graph ms | engine ms | bound ms | share | vLLM | first / final |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for line in lines:
        model, batch = line["model"], line["batch"]
        first, final = TARGETS[model].get(batch, (0.0, 0.0))
        rows.append(
            f"| {model} b{batch} | {line['graph_ms']:.3f} | {line['engine_ms']:.3f} | {line['bound_ms']:.3f} "
            f"| {line['bound_ms'] / line['graph_ms']:.0%} | {PEERS[model].get(batch, 0.0):.3f} "
            f"| {first:.2f} / {final:.2f} |"
        )
    return "\n".join(rows)


def variants_of(lines: list[dict[str, Any]], count: int = 8) -> str:
    """A Markdown table of the ``count`` fastest variants of every model and batch."""
    rows = ["| model, batch | ms | variant |", "| --- | --- | --- |"]
    for line in lines:
        ordered = sorted(line["variants"].items(), key=lambda item: item[1])
        names = [name for name, _ in ordered]
        for name, milliseconds in ordered[:count] + [o for o in ordered[count:] if o[0] == "usual"]:
            rows.append(f"| {line['model']} b{line['batch']} | {milliseconds:.4f} | {name} |")
        wrong = [name for name in names if "WRONG" in name]
        rows += [f"| {line['model']} b{line['batch']} | | {name} |" for name in wrong]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--batches", nargs="+", type=int, help="default 1 8 32, for --attention 8 32 64")
    parser.add_argument("--plain", action="store_true", help="time the modules too")
    parser.add_argument("--parts", action="store_true", help="time steps without attention and without head")
    parser.add_argument(
        "--variants", action="store_true", help="time recorded steps with other forms of attention"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=60.0,
        help="seconds of a model for its variants, of --attention for all",
    )
    parser.add_argument("--compile-only", action="store_true", help="compile what would be timed, and stop")
    parser.add_argument(
        "--attention", action="store_true", help="check and time attention of batches in every form"
    )
    parser.add_argument("--json", type=Path, help="where all figures go")
    # --one: this process runs the models itself.
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.batches = args.batches or list(ATTENTION_BATCHES if args.attention else BATCHES)
    shapes = [shape for shape in SHAPES if shape.name in args.models]
    if args.attention:
        from atom.benchmarks import decode_batches

        decode_batches.time_attention(args.models, args.batches, args.budget, args.compile_only)
        return
    if args.one:
        for model in args.models:
            if args.variants:
                lines = run_variants(model, args.batches, args.budget)
            else:
                lines = run_model(model, args.batches, args.plain, args.parts)
            for line in lines:
                print_line(line)
        return
    record = record_step
    if args.variants:
        from atom.benchmarks.decode_variants import record_variants as record
    compile_side_by_side(
        launches_of(lambda recorder: [record(recorder, s, n) for s in shapes for n in args.batches])
    )
    if args.compile_only:
        return
    lines = []
    for model in args.models:
        lines += lines_of_child("atom.benchmarks.decode_chain", _child_args(model, args), model)
    if args.json is not None:
        args.json.write_text(json.dumps(lines, indent=1))
    print(variants_of(lines) if args.variants else table_of(lines))


def _child_args(model: str, args: argparse.Namespace) -> list[str]:
    """For the process that runs one model."""
    command = ["--one", "--models", model, "--batches", *map(str, args.batches), "--budget", str(args.budget)]
    return command + ["--plain"] * args.plain + ["--parts"] * args.parts + ["--variants"] * args.variants


if __name__ == "__main__":
    main()
